"""Memory that the CUDA driver keeps, with a fake driver: test machines have none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from firn.backends import memory as device_memory
from firn.backends.cuda import pool
from firn.backends.cuda.device import CudaBackend
from tests.backends.fakes import pretend

POOL = 77


class FakeDriver:
    def __init__(self, *, reserved: int = 0, used: int = 0, fails: bool = False) -> None:
        self.values = {pool.RESERVED: reserved, pool.USED: used}
        self.fails = fails
        self.trimmed_to: list[int] = []

    def cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> int:
        device._obj.value = ordinal.value
        return 0

    def cuDeviceGetDefaultMemPool(self, found: Any, device: ctypes.c_int) -> int:
        found._obj.value = POOL + device.value
        return 0

    def cuMemPoolGetAttribute(self, which: ctypes.c_void_p, name: ctypes.c_int, value: Any) -> int:
        assert which.value == POOL
        value._obj.value = self.values[name.value]
        return 1 if self.fails else 0

    def cuMemPoolTrimTo(self, which: ctypes.c_void_p, nbytes: ctypes.c_size_t) -> int:
        assert which.value == POOL
        self.trimmed_to.append(nbytes.value)
        return 0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    pool._pool.cache_clear()
    yield
    pool._pool.cache_clear()


def use(driver: FakeDriver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_driver", lambda: driver)


def test_what_the_driver_keeps_is_not_another_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX frees 18 GiB; the device reports them as used until the pool gives them back."""
    monkeypatch.setattr(
        mx, "device_info", lambda: {"free_memory": 100 << 30, "memory_size": 140 << 30}
    )
    monkeypatch.setattr(device_memory, "used_nbytes", lambda: 2 << 30)
    use(FakeDriver(reserved=20 << 30, used=2 << 30), monkeypatch)
    assert CudaBackend().memory.now().available_nbytes == 120 << 30
    use(None, monkeypatch)
    assert CudaBackend().memory.now().available_nbytes == 102 << 30


@pytest.mark.parametrize("kind", ["cpu", "metal"])
def test_elsewhere_there_is_no_such_pool(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "used_nbytes", lambda: 0)
    use(FakeDriver(reserved=1 << 60), monkeypatch)
    backend = pretend(kind, monkeypatch)
    now = backend.memory.now().available_nbytes
    assert now is None or now < 1 << 60


def test_it_is_given_back_with_what_mlx_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(reserved=5, used=3)
    use(driver, monkeypatch)
    freed = mx.zeros((1 << 20,)) + 1
    mx.eval(freed)
    del freed
    assert mx.get_cache_memory() > 0
    CudaBackend().memory.free_unused()
    assert mx.get_cache_memory() == 0
    assert driver.trimmed_to == [0]


@pytest.mark.parametrize(
    "driver", [None, FakeDriver(reserved=5, used=9), FakeDriver(reserved=5, fails=True)]
)
def test_a_driver_that_cannot_tell_keeps_nothing(
    driver: FakeDriver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(driver, monkeypatch)
    assert pool.unused_nbytes() == 0
    pool.trim()
