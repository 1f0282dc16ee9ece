"""What a model is called with besides token ids: for a text model, nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from firn.core.values import Prompt

PreparePass = Callable[[int], None]
"""Called before a pass over this many tokens."""


def unprepared(n_tokens: int) -> None:
    """Nothing has to be prepared."""


class ModelArguments(Protocol):
    """Makes the keyword arguments of the model's calls. Engine thread."""

    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        """For prompt tokens [start, end)."""
        ...

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        """For `width` tokens of each row, from these positions on."""
        ...

    def shift(self, prompt: Prompt) -> int:
        """How far rotary positions are ahead of token counts after this prompt."""
        ...


class IdsOnly:
    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        return {}

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        return {}

    def shift(self, prompt: Prompt) -> int:
        return 0


IDS_ONLY = IdsOnly()
