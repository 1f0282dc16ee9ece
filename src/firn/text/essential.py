"""What of a prompt is read whatever else is skipped: system prompt, tools, the newest message. Pure.

Messages begin at openers, and templates differ in what else they put between them: tools in a message of
their own, before the first user's words or before the last one's. Where it is not clear, more is
essential rather than less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.core.values import Message

LONG_CHARS = 64
"""More than this between a message's opener and its words is no mere header."""
SHORT_CHARS = 8
"""A message so short may stand anywhere by chance."""


@dataclass(frozen=True, slots=True)
class Opener:
    """Where a message begins: in the text, and in tokens."""

    start: int
    end: int
    token: int


def essential(
    text: str,
    openers: Sequence[Opener],
    messages: Sequence[Message],
    *,
    n_tokens: int,
    count: Callable[[str], int],
) -> tuple[tuple[int, int], ...]:
    """Ranges of tokens. count: how many tokens a piece of the text is."""
    if not openers or not messages:
        return ()
    head = _head(text, openers, messages, count)
    newest = _newest(text, openers, messages, count)
    if head >= newest:
        return ((0, n_tokens),)
    return (*([(0, head)] if head else []), (newest, n_tokens))


def _head(
    text: str, openers: Sequence[Opener], messages: Sequence[Message], count: Callable[[str], int]
) -> int:
    """Tokens before the words of the first message that is not the system's."""
    at = 0
    for message in messages:
        words = message.text.strip()
        found = text.find(words, at) if words else -1
        if message.role == "system":
            at = found + len(words) if found >= 0 else at
            continue
        if found < 0:
            return 0
        before = [o for o in openers if o.end <= found]
        lead = text[before[-1].end if before else 0 : found]
        if not before:
            return count(lead) + 1
        is_more = len(lead) > LONG_CHARS or at > before[-1].end
        return before[-1].token + (count(lead) + 1 if is_more else 0)
    return 0


def _newest(
    text: str, openers: Sequence[Opener], messages: Sequence[Message], count: Callable[[str], int]
) -> int:
    """The token at which the newest message begins, with what only the newest turn has before it."""
    last, words = openers[-1], messages[-1].text.strip()
    tail = text[last.end :]
    is_header = words not in tail or (len(words) <= SHORT_CHARS and len(tail) < LONG_CHARS)
    newest = openers[-2] if is_header and len(openers) > 1 else last
    said = messages[-2].text.strip() if len(messages) > 1 else ""
    end = text.rfind(said, 0, newest.start) if said else -1
    between = text[end + len(said) : newest.start] if end >= 0 else ""
    extra = count(between) + 1 if len(between) > LONG_CHARS else 0
    return max(newest.token - extra, 0)
