"""Rotary positions of a decode step, for MLX's CPU backend.

On that backend mx.fast.rope consists of thirty small operations, and a model calls it twice per
layer: a third of a small model's decode step. Here rows at the same position are multiplied by one
matrix, which all layers share; rows at different positions are rotated by

    x * cos(angles) + (x @ quarter turn) * sin(angles)

Chunks of several tokens are left to MLX.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from firn.models.patches import Patches

MAX_KINDS = 256
"""Layers may have frequencies of their own. A model whose frequencies keep changing is left to MLX."""
_plain_rope = mx.fast.rope


class RopeKind(NamedTuple):
    """The arguments that do not change from step to step. freqs: the array's id()."""

    dims: int
    width: int
    traditional: bool
    base: float | None
    scale: float
    freqs: int


class Rotation:
    """The arrays for one kind: those that never change, and the matrix of the newest position."""

    def __init__(self, kind: RopeKind, freqs: mx.array | None, *, turn: mx.array) -> None:
        self._freqs = freqs  # a reference, so that no other array gets its id()
        self._scale = kind.scale
        self.turn = turn
        speeds = _speeds(kind, freqs)
        self._speeds = mx.concatenate([speeds, mx.zeros(kind.width - kind.dims)])
        mx.eval(self._speeds)
        self._at: int | None = None
        self._matrix = turn

    def matrix(self, position: int) -> mx.array:
        """The matrix that rotates a row to this position."""
        if self._at != position:
            angles = self._speeds * (position * self._scale)
            self._matrix = mx.diag(mx.cos(angles)) + self.turn * mx.sin(angles)
            self._at = position
        return self._matrix

    def waves(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Cosine and sine, (rows, 1, 1, width). Not cached: the array may be changed in place."""
        places = positions.astype(mx.float32).reshape(-1, 1, 1, 1)
        angles = (places * self._scale if self._scale != 1 else places) * self._speeds
        return mx.cos(angles), mx.sin(angles)


class _Rotations(threading.local):
    """Per thread: an array that has not been computed yet belongs to its thread's stream."""

    def __init__(self) -> None:
        self._by_kind: dict[RopeKind, Rotation] = {}
        self._turns: dict[tuple[int, int, bool], mx.array] = {}

    def of(self, kind: RopeKind, freqs: mx.array | None) -> Rotation | None:
        """None once there are too many kinds."""
        rotation = self._by_kind.get(kind)
        if rotation is None and len(self._by_kind) < MAX_KINDS:
            rotation = self._by_kind[kind] = Rotation(kind, freqs, turn=self._turn(kind))
        return rotation

    def _turn(self, kind: RopeKind) -> mx.array:
        """A quarter turn: each pair of values (a, b) becomes (-b, a)."""
        key = (kind.dims, kind.width, kind.traditional)
        if key not in self._turns:
            all_dims = np.arange(kind.dims)
            first, second = (
                all_dims.reshape(-1, 2).T if kind.traditional else all_dims.reshape(2, -1)
            )
            turn = np.zeros((kind.width, kind.width), dtype=np.float32)
            turn[second, first], turn[first, second] = -1, 1
            self._turns[key] = mx.array(turn)
        return self._turns[key]


_rotations = _Rotations()


def install(patches: Patches) -> None:
    """Replace MLX's own function with `rope`, for this process."""
    patches.replace(mx.fast, "rope", rope)


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    **more: Any,
) -> mx.array:
    """What mx.fast.rope computes."""
    rotation = None
    known = type(offset) is int or isinstance(offset, mx.array)
    if known and a.ndim == 4 and a.shape[2] == 1 and not more:
        kind = RopeKind(dims, a.shape[-1], traditional, base, scale, id(freqs))
        rotation = _rotations.of(kind, freqs)
    if rotation is None:
        return _plain_rope(
            a,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            **more,
        )
    x = a.astype(mx.float32)
    if isinstance(offset, mx.array):
        cos, sin = rotation.waves(offset)
        rotated = x * cos + (x @ rotation.turn) * sin
    else:
        rotated = x @ rotation.matrix(offset)
    return rotated.astype(a.dtype)


def _speeds(kind: RopeKind, freqs: mx.array | None) -> mx.array:
    """The angle per position, for each dimension."""
    half = kind.dims // 2
    if freqs is not None:
        speeds = 1.0 / freqs.astype(mx.float32)
    else:
        assert kind.base is not None
        speeds = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(kind.base) / half))
    return mx.repeat(speeds, 2) if kind.traditional else mx.concatenate([speeds, speeds])
