"""Memory that the CUDA driver keeps for this process after MLX has freed it.

MLX allocates from one of the driver's memory pools. Freed memory stays there until the driver is
asked to return it, which may be never: until then other programs cannot have it, and NVML counts it
as used.
"""

from __future__ import annotations

import ctypes
from functools import cache

RESERVED, USED = 5, 7
"""Attributes of a pool: bytes reserved from the device, and bytes of them that are allocated."""


def unused_nbytes() -> int:
    """Bytes that the pool holds and MLX does not use; 0 if the driver cannot tell. Thread-safe."""
    driver = _driver()
    if driver is None:
        return 0
    values = []
    for attribute in (RESERVED, USED):
        value = ctypes.c_uint64()
        if driver.cuMemPoolGetAttribute(_pool(), ctypes.c_int(attribute), ctypes.byref(value)):
            return 0
        values.append(value.value)
    return max(values[0] - values[1], 0)


def trim() -> None:
    """Return unused memory to the device. Thread-safe."""
    driver = _driver()
    if driver is not None:
        driver.cuMemPoolTrimTo(_pool(), ctypes.c_size_t(0))


@cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver; None if there is none, or one without pools."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        has_pools = driver.cuMemPoolGetAttribute and driver.cuMemPoolTrimTo
    except (OSError, AttributeError):
        return None
    return driver if has_pools and not driver.cuInit(ctypes.c_uint(0)) else None


@cache
def _pool() -> ctypes.c_void_p:
    """The pool that MLX uses: the default one of the first device. NULL, which the driver rejects, if
    there is none."""
    driver, device, pool = _driver(), ctypes.c_int(), ctypes.c_void_p()
    assert driver is not None
    if not driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)):
        driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device)
    return pool
