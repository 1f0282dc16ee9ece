"""Steps that a device computes from a recorded graph, without building them in Python again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from firn.models.decode.ragged import Columns


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How many tokens the rows hold. at: for each row, on the device. n_more: the most tokens of a
    row that the layers do not know of."""

    at: mx.array
    n_more: int


class StepTrace(Protocol):
    """Owner: the engine thread, through a runner."""

    is_deep: bool
    """Whether a step can be dispatched before the one before it is read, as its graph is there."""

    def plain(self, ids: mx.array, layers: Sequence[Any]) -> mx.array | None:
        """Feed each row one token, (rows, 1). None: nothing was done; the step must be built."""
        ...

    def wide(
        self,
        ids: mx.array,
        layers: Sequence[Any],
        columns: Columns,
        *,
        lengths: RowLengths | None = None,
    ) -> mx.array | None:
        """Feed each row its tokens, (rows, width). lengths: how many tokens each row holds, where the
        layers do not know."""
        ...

    def had_new_shape(self) -> bool:
        """Whether the newest step took longer than others of its shape. Resets the flag."""
        ...


class NoStepTrace:
    """Every step is built."""

    is_deep = False

    def plain(self, ids: mx.array, layers: Sequence[Any]) -> mx.array | None:
        return None

    def wide(
        self,
        ids: mx.array,
        layers: Sequence[Any],
        columns: Columns,
        *,
        lengths: RowLengths | None = None,
    ) -> mx.array | None:
        return None

    def had_new_shape(self) -> bool:
        return False
