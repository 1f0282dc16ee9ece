"""Whether the device multiplies correctly: products as models need them, compared with NumPy's.

A wrong driver, or a virtual machine's GPU, may return zeros or garbage without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

WIDTH = 512
ROWS = (1, 64)
"""A decode step's product and a prompt's: other kernels."""
LARGEST_ERROR = 0.02
"""Relative to the largest element. bfloat16 has eight bits: sums that are right come within 0.004."""
Multiply = Callable[[Any, Any], Any]


def product_error(multiply: Multiply = mx.matmul) -> float:
    """The largest error of a bfloat16 product on MLX's default device, relative to the largest element
    of the right one; infinite if something in it is no number."""
    right = mx.array(_numbers(WIDTH), mx.bfloat16)
    return max(_error(multiply, mx.array(_numbers(n), mx.bfloat16), right) for n in ROWS)


def _error(multiply: Multiply, left: mx.array, right: mx.array) -> float:
    here = np.array(multiply(left, right).astype(mx.float32))
    wanted = np.array(left.astype(mx.float32)) @ np.array(right.astype(mx.float32))
    error = np.abs(here - wanted).max() / np.abs(wanted).max()
    return float(error) if np.isfinite(here).all() else np.inf


def _numbers(n_rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(n_rows).standard_normal((n_rows, WIDTH), dtype=np.float32)
