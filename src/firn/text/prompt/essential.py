"""What must be read of a prompt whatever else is skipped: system prompt, tools, newest message. Pure.

Messages begin at openers, and templates differ in what else they put between them: tools may be in
a message of their own, before the first user's words or before the last user's. Where that is
unclear, more is essential rather than less.

A long newest message (a pasted file with a question) would leave nothing to skip. Only its
beginning and its end are essential: that is where people put their question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.core.values import Message

LONG_CHARS = 64
"""A longer text between a message's opener and its words is not just a header."""
LONG_MESSAGE = 2048
"""In tokens. A newest message up to this length is read whole."""
BEGINNING, ENDING = 256, 768
"""In tokens. How much of a longer one is read, at its beginning and at its end."""

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of tokens, in order."""


@dataclass(frozen=True, slots=True)
class Opener:
    """Where a message begins: in the text, and in tokens."""

    start: int
    end: int
    token: int


@dataclass(frozen=True, slots=True)
class NewestMessage:
    """Where the newest message is, in tokens.

    # start: including tools that only the newest turn has   [words, end): what its author wrote
    """

    start: int
    words: int
    end: int


def essential(
    text: str,
    openers: Sequence[Opener],
    messages: Sequence[Message],
    *,
    n_tokens: int,
    count: Callable[[str], int],
) -> Ranges:
    """The essential ranges of a chat. count: how many tokens a piece of the text has."""
    if not openers or not messages:  # it is unknown where the system prompt ends
        return ((0, n_tokens),)
    head = _head(text, openers, messages, count)
    newest = _newest(text, openers, messages, n_tokens=n_tokens, count=count)
    start = 0 if head >= newest.start else newest.start
    before = ((0, head),) if head and start else ()
    words = max(head, newest.words)
    if newest.end - words <= LONG_MESSAGE:
        return (*before, (start, n_tokens))
    return (*before, (start, words + BEGINNING), (newest.end - ENDING, n_tokens))


def essential_of_text(n_tokens: int) -> Ranges:
    """The essential ranges of a text that is not a chat; a short one has none."""
    if n_tokens <= LONG_MESSAGE:
        return ()
    return ((0, BEGINNING), (n_tokens - ENDING, n_tokens))


def _head(
    text: str, openers: Sequence[Opener], messages: Sequence[Message], count: Callable[[str], int]
) -> int:
    """How many tokens come before the words of the first message that is not a system message."""
    at = 0
    for message in messages:
        words = message.text.strip()
        start = text.find(words, at) if words else -1
        if message.role == "system":
            at = start + len(words) if start >= 0 else at
            continue
        if start < 0:
            return 0
        before = [o for o in openers if o.end <= start]
        lead = text[before[-1].end if before else 0 : start]
        if not before:
            return count(lead) + 1
        is_more = len(lead) > LONG_CHARS or at > before[-1].end
        return before[-1].token + (count(lead) + 1 if is_more else 0)
    return 0


def _newest(
    text: str,
    openers: Sequence[Opener],
    messages: Sequence[Message],
    *,
    n_tokens: int,
    count: Callable[[str], int],
) -> NewestMessage:
    last, words = openers[-1], messages[-1].text.strip()
    opener = last
    if len(openers) > 1:
        tail, before = text[last.end :], text[openers[-2].end : last.start]
        # What is in both was written before, and occurs in the header of the reply by chance.
        if words not in tail or (len(tail) < LONG_CHARS and words in before):
            opener = openers[-2]
    at = text.find(words, opener.end)
    lead, after = ("", "") if at < 0 else (text[opener.end : at], text[at + len(words) :])
    between = _between(text, messages, opener)
    return NewestMessage(
        max(opener.token - _tokens_beyond_header(between, count), 0),
        opener.token + _tokens_beyond_header(lead, count),
        n_tokens - _tokens_beyond_header(after, count),
    )


def _between(text: str, messages: Sequence[Message], opener: Opener) -> str:
    """The text between the words of the last message but one and the newest one's opener."""
    words = messages[-2].text.strip() if len(messages) > 1 else ""
    at = text.rfind(words, 0, opener.start) if words else -1
    return text[at + len(words) : opener.start] if at >= 0 else ""


def _tokens_beyond_header(text: str, count: Callable[[str], int]) -> int:
    """How many tokens a text around a message has; 0 for a mere header."""
    return count(text) + 1 if len(text) > LONG_CHARS else 0
