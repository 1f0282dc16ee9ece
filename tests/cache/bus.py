"""Stands in for an NVIDIA GPU's driver on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from firn.backends.cuda.bus import MAX_PIECES, BusTransfers
from firn.cache.arrays import transfers


class Bus:
    """Counts the copies and gathers it makes."""

    gathers = True

    def __init__(self) -> None:
        self.n_out = self.n_in = self.n_gathered = 0
        self.why_not = ""

    def gather(
        self, arrays: Sequence[mx.array], row: int, bounds: Sequence[tuple[int, int]]
    ) -> list[mx.array]:
        assert BusTransfers(self).can_gather(arrays)  # type: ignore[arg-type]
        assert len({(a.dtype, *a.shape) for a in arrays}) == 1
        assert 0 < len(bounds) <= MAX_PIECES
        self.n_gathered += 1
        return [mx.stack([a[row : row + 1, :, start:end] for a in arrays]) for start, end in bounds]

    def stop_gathering(self, why: object) -> None:
        self.gathers, self.why_not = False, str(why)

    def locate(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return [mx.flatten(a).view(mx.uint8) for a in arrays]

    def to_host(self, addresses: Sequence[mx.array], sizes: Sequence[int]) -> list[memoryview]:
        self.n_out += len(sizes)
        return [memoryview(np.array(a).tobytes()) for a in addresses]

    def stage(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        return [memoryview(bytes(b)) for b in buffers]

    def to_device(self, data: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        self.n_in += 1
        flat = mx.array(np.array(data.view(np.uint8)))
        return flat.view(dtype).reshape(shape)


def drive(bus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, records move over this bus."""
    monkeypatch.setattr(transfers, "_in_use", [BusTransfers(bus)])
