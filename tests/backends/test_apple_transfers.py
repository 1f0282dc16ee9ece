"""How records enter an Apple GPU: in pages that it can adopt, with the same bits."""

from __future__ import annotations

import logging
import math
from mmap import PAGESIZE
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from firn.backends.apple_transfers import AdoptingTransfers, find_transfers
from firn.cache.arrays import host, transfers
from firn.cache.arrays.payload import evaluate, n_at_once, stacked
from firn.cache.arrays.transfers import Transfers
from tests.backends.fakes import FakeMetal


class AskedMlx:
    """Notes what MLX is asked to adopt."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray[Any, Any]] = []

    def asarray(self, data: np.ndarray[Any, Any]) -> mx.array:
        self.asked.append(data)
        return mx.asarray(data)


def bits(array: mx.array) -> bytes:
    as_bytes = array.view(mx.uint8) if array.ndim else array.reshape(1).view(mx.uint8)
    return np.array(as_bytes).tobytes()


@pytest.mark.parametrize("dtype", host.CODES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 1, 8, 512), (1, 5, 7, 999), ()], ids=str)
def test_records_keep_their_bits(
    shape: tuple[int, ...], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlx = AskedMlx()
    monkeypatch.setattr(transfers, "_in_use", [AdoptingTransfers(mlx)])
    whole = mx.random.randint(-128, 127, (math.prod(shape),)).astype(dtype).reshape(shape)
    payload = stacked([(whole,)])
    evaluate([payload])
    lent = host.to_host(payload)
    buffers = host.staged([memoryview(bytes(b)) for b in lent.fetch()])
    again = host.from_host(lent.tensors, lent.places, buffers)
    (array,) = again.stacks
    assert (array.dtype, array.shape) == (dtype, (1, *shape))
    assert bits(array) == bits(payload.stacks[0])
    assert len(mlx.asked) == (whole.nbytes >= PAGESIZE)


def test_what_is_adopted_begins_and_ends_with_a_page() -> None:
    mlx = AskedMlx()
    adopting = AdoptingTransfers(mlx)
    whole = memoryview(bytes(range(256)) * PAGESIZE)
    small, large = adopting.stage([whole[7 : PAGESIZE + 5], whole[7 : 2 * PAGESIZE + 10]])
    assert small == whole[7 : PAGESIZE + 5]
    assert large == whole[7 : 2 * PAGESIZE + 10]
    data = np.frombuffer(large, np.uint8)
    array = adopting.array(data, data.shape, mx.uint8)
    (asked,) = mlx.asked
    assert asked.ctypes.data == data.ctypes.data
    assert asked.ctypes.data % PAGESIZE == 0
    assert asked.nbytes == 3 * PAGESIZE
    assert array.nbytes == len(large)


def test_small_tensors_are_left_where_they_are() -> None:
    """A page for each would be more than they are."""
    buffer = memoryview(bytes(PAGESIZE - 1))
    assert AdoptingTransfers().stage([buffer])[0] is buffer


def test_bytes_that_no_thread_has_staged_are_copied() -> None:
    mlx = AskedMlx()
    data = np.arange(2 * PAGESIZE, dtype=np.uint8)
    array = AdoptingTransfers(mlx).array(data, data.shape, mx.uint8)
    assert bits(array) == data.tobytes()
    assert mlx.asked == []


def test_metal_adopts_memory() -> None:
    assert type(FakeMetal().transfers) is AdoptingTransfers


@pytest.mark.parametrize("error", [None, ValueError("not here"), AttributeError("asarray")])
def test_where_that_fails_mlx_copies(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def asarray(self, data: np.ndarray[Any, Any]) -> mx.array:
            if error is not None:
                raise error
            return mx.zeros(data.shape, mx.uint8)

    with caplog.at_level(logging.WARNING):
        assert type(find_transfers(Failing())) is Transfers
    assert len(caplog.records) == 1


def test_metal_fills_one_layer_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are filled together are joined first, which copies everything once more."""
    monkeypatch.setattr(transfers, "_in_use", [FakeMetal().transfers])
    layers = [(mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4))) for _ in range(4)]
    assert n_at_once([stacked(layers), stacked(layers)]) == 1
