"""What the CUDA driver keeps for this process after MLX has freed it.

MLX allocates from a memory pool of the driver's. What it frees stays there until the driver is asked to
give it back, which may be never: meanwhile other programs cannot have it, and to NVML it looks used.
"""

from __future__ import annotations

import ctypes
from functools import cache

RESERVED, USED = 5, 7
"""Attributes of a pool: bytes that it has from the device, and bytes of them that are allocated."""


def unused_nbytes() -> int:
    """What the pool holds and MLX does not; 0 where the driver cannot tell. From any thread."""
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
    """Give it back to the device. From any thread."""
    driver = _driver()
    if driver is not None:
        driver.cuMemPoolTrimTo(_pool(), ctypes.c_size_t(0))


@cache
def _driver() -> ctypes.CDLL | None:
    """None where there is none, or none with pools."""
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
