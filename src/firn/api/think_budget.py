"""A reply's thinking budget: when it is used up, the engine is told to write the end of thinking."""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.events import Token
from firn.text.reply import ReplyReader

LOOKAHEAD_TOKENS = 128
"""The engine is told this long before the budget ends. It runs ahead of what has been read, by several
tokens a step, and the thinking of two equal requests should end at the same token."""


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """For `Engine.force`: these tokens from this position of the reply on; none at all withdraws what
    was forced before."""

    at: int
    tokens: tuple[int, ...]


class ThinkBudget:
    """Owner: one choice of a request, on the asyncio thread. Reads its reader, never writes to it."""

    def __init__(self, n_tokens: int, closing: tuple[int, ...]) -> None:
        self._n_tokens = n_tokens
        self._closing = closing
        self._forced = False
        self._n_arrived = 0
        """Of the closing tokens that were forced."""
        self._is_late = False

    def check(self, reader: ReplyReader) -> ThinkingEnd | None:
        """What to tell the engine now: before the first token, and after each."""
        left = max(self._n_tokens - reader.n_reasoning, 0)
        if not self._forced and reader.in_reasoning and left <= LOOKAHEAD_TOKENS:
            self._forced = True
            return ThinkingEnd(reader.n_completion + left, self._closing)
        if self._forced and not reader.in_reasoning and not self._n_arrived:
            self._forced = False
            return ThinkingEnd(0, ())
        return None

    def skips(self, token: Token, reader: ReplyReader) -> bool:
        """Whether this token closes thinking that had already ended by itself: withdrawn too late.

        The model has seen it then; the user need not.
        """
        if not token.forced:
            return False
        if self._n_arrived == 0:
            self._is_late = not reader.in_reasoning
        self._n_arrived += 1
        if self._n_arrived == len(self._closing):
            self._n_arrived, self._forced = 0, False
        return self._is_late
