"""Assigns log-probabilities to the pieces of text that they belong to."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from firn.core.events import TextLogprob, Token, TokenLogprob
from firn.core.ports import Tokenizer


class _Entry(NamedTuple):
    """A token whose text is [start, end) of the raw reply; empty while a character is incomplete."""

    start: int
    end: int
    logprob: TokenLogprob


class LogprobBuffer:
    """Tokens wait here until some of their text is delivered. Owner: one choice of a reply.

    A token is shown with the delta that has its first character; the tokens of a split character,
    with that character. Tokens of reasoning, calls and markup are never shown: the bytes of the
    tokens that are shown add up to the choice's text.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special - visible
        self._waiting: deque[_Entry] = deque()

    @property
    def n_waiting(self) -> int:
        """Logprobs that are kept here, judging by the last token; its alternatives count, too."""
        return len(self._waiting) * (1 + len(self._waiting[-1].logprob.top)) if self._waiting else 0

    def add(self, token: Token, start: int, end: int) -> None:
        if token.logprob is not None and token.id not in self._hidden:
            self._waiting.append(_Entry(start, end, token.logprob))

    def take(self, start: int, end: int) -> tuple[TextLogprob, ...]:
        """The logprobs of the tokens with text in [start, end); earlier tokens are dropped."""
        logprobs = []
        while self._waiting and self._waiting[0].start < end:
            entry = self._waiting.popleft()
            if entry.end > start or entry.start >= start:
                logprobs.append(self._shown(entry.logprob))
        return tuple(logprobs)

    def drop(self, end: int) -> None:
        """No text before this will be shown: reasoning of any length keeps no tokens here."""
        while self._waiting and self._waiting[0].start < end and self._waiting[0].end <= end:
            self._waiting.popleft()

    def _shown(self, logprob: TokenLogprob) -> TextLogprob:
        data = self._tokenizer.token_bytes(logprob.token)
        top = []
        for token, value in logprob.top:
            raw = self._tokenizer.token_bytes(token)
            top.append((_text(raw), raw, value))
        return TextLogprob(_text(data), data, logprob.logprob, tuple(top))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
