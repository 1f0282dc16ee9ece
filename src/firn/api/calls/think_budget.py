"""A reply's thinking budget: when it is used up, the engine forces the end of thinking."""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.events import Token
from firn.text.reply.reader import ReplyReader

LOOKAHEAD_TOKENS = 128
"""Tokens left in the budget when the engine is told to force the end. It runs ahead of what has
been read here, by several tokens per step, and two equal requests should stop thinking at the same
token."""


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """Arguments of `Engine.force`: tokens, and their position in the reply. No tokens: withdraw the
    previous ones."""

    at: int
    tokens: tuple[int, ...]


class ThinkBudget:
    """Owner: one choice of a request, on the asyncio thread."""

    def __init__(self, n_tokens: int, closing: tuple[int, ...]) -> None:
        self._n_tokens = n_tokens
        self._closing = closing
        self._forced = False
        self._n_arrived = 0
        """How many of the forced closing tokens have arrived."""
        self._is_late = False
        """Whether they arrive after the model has ended its thinking by itself."""

    def check(self, reader: ReplyReader) -> ThinkingEnd | None:
        """What to tell the engine before the first token, and after each token; None: nothing."""
        left = max(self._n_tokens - reader.n_reasoning, 0)
        if not self._forced and reader.in_reasoning and left <= LOOKAHEAD_TOKENS:
            self._forced = True
            return ThinkingEnd(reader.n_completion + left, self._closing)
        if self._forced and not reader.in_reasoning and not self._n_arrived:
            self._forced = False
            return ThinkingEnd(0, ())
        return None

    def skips(self, token: Token, reader: ReplyReader) -> bool:
        """Whether to hide this token: it closes thinking that had already ended, and was withdrawn
        too late. The model has seen it, but the user need not.
        """
        if not token.forced:
            return False
        if self._n_arrived == 0:
            self._is_late = not reader.in_reasoning
        self._n_arrived += 1
        if self._n_arrived == len(self._closing):
            self._n_arrived, self._forced = 0, False
        return self._is_late
