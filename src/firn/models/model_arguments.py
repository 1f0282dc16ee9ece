"""What a model is called with besides token ids: for a text model, nothing but its caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from firn.core.values import Prompt

PreparePass = Callable[[int], None]
"""Called before a pass over this many tokens."""


def unprepared(n_tokens: int) -> None:
    """Nothing has to be prepared."""


class ModelArguments(Protocol):
    """Makes the keyword arguments of the model's calls, and shows it its caches. Engine thread."""

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        """As in core.ports.Runner."""
        ...

    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        """For prompt tokens [start, end)."""
        ...

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        """For `width` tokens of each row, from these positions on."""
        ...

    def shift(self, prompt: Prompt) -> int:
        """How far rotary positions are ahead of token counts after this prompt."""
        ...

    def reading(
        self, layers: list[Any], prompt: Prompt, start: int, end: int, *, n_padding: int = 0
    ) -> AbstractContextManager[list[Any]]:
        """A lone row's caches for its prompt's tokens [start, end); call the model inside.

        n_padding: tokens after them whose results are not used."""
        ...

    def seen(self, layers: list[Any], shifts: Sequence[int]) -> list[Any]:
        """A group's caches for a step of rows whose positions are shifted so far."""
        ...


class CachesAsTheyAre:
    """The model counts positions by what is in its caches, or is given them."""

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        return False

    def reading(
        self, layers: list[Any], prompt: Prompt, start: int, end: int, *, n_padding: int = 0
    ) -> AbstractContextManager[list[Any]]:
        return nullcontext(layers)

    def seen(self, layers: list[Any], shifts: Sequence[int]) -> list[Any]:
        return layers


class IdsOnly(CachesAsTheyAre):
    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        return {}

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        return {}

    def shift(self, prompt: Prompt) -> int:
        return 0


IDS_ONLY = IdsOnly()
