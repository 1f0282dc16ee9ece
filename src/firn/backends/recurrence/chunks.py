"""What linear recurrences in chunks share: how tokens are arranged, and triangular matrices.

Arrays of a call are (batch, tokens, heads, ...); in chunks they are (chunks, batch, key heads, heads of
each, tokens, ...). Matrices (tokens, tokens) are transposed: a row writes, a column reads, so what a
later token reads of an earlier one is above the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np

Product = Callable[[mx.array, mx.array], mx.array]
"""Of matrices."""
Heads = tuple[int, int]
"""Key heads, and heads of each."""
SHORT_DIGITS = 0xFFFFE000
"""Of a float32: sign, exponent and the ten bits that TF32 keeps."""


def size_of(chunk: int, n_tokens: int) -> int:
    """Tokens of a chunk: no more than the call has, rounded up to a power of two."""
    return min(chunk, 1 << (n_tokens - 1).bit_length())


def in_chunks(a: mx.array, size: int, heads: Heads, *, padding: int = 0) -> mx.array:
    """In float32. Tokens that the last chunk lacks are filled with `padding`."""
    a, n_missing = a.astype(mx.float32), -a.shape[1] % size
    if n_missing:
        more = mx.full((a.shape[0], n_missing, *a.shape[2:]), padding, dtype=a.dtype)
        a = mx.concatenate([a, more], axis=1)
    a = a.reshape(a.shape[0], -1, size, *heads, *a.shape[3:])
    return mx.contiguous(a.transpose(1, 0, 3, 4, 2, *range(5, a.ndim)))


def joined(y: mx.array, n_tokens: int) -> mx.array:
    """From chunks back to (batch, tokens, heads, values)."""
    n_batch, n_values = y.shape[1], y.shape[-1]
    y = y.transpose(1, 0, 4, 2, 3, 5)
    return y.reshape(n_batch, -1, y.shape[3] * y.shape[4], n_values)[:, :n_tokens]


def in_float32(a: mx.array, b: mx.array, *, multiply: Product = mx.matmul) -> mx.array:
    """a @ b to about 2e-7 where MLX multiplies in TF32: of the parts that have so few digits, and of
    their rests."""
    a_most, b_most = _shortened(a), _shortened(b)
    rests: mx.array = multiply(a_most, b - b_most) + multiply(a - a_most, b_most)
    return rests + multiply(a_most, b_most)


def _shortened(a: mx.array) -> mx.array:
    return (a.view(mx.uint32) & SHORT_DIGITS).view(mx.float32)


@cache
def levels(size: int) -> list[mx.array]:
    """Above the diagonal: the squares that join two blocks of 1, 2, 4, ... tokens into one."""
    block = [np.arange(size) >> level for level in range(size.bit_length() - 1)]
    masks = [(b[None] == b[:, None] + 1) & (b[None] % 2 == 1) for b in block]
    return [mx.array(mask.astype(np.float32)) for mask in masks]


def inverse(system: mx.array, multiply: Product) -> mx.array:
    """Of 1 + system, a strictly upper triangle, by blocks:

    | A  X |-1   | A'  -A' X B' |
    | .  B |   = | .       B'   |
    """
    size = system.shape[-1]
    inverted = mx.eye(size)
    for level, mask in enumerate(levels(size)):
        square = system * mask
        between = multiply(multiply(inverted, square), inverted) if level else square
        inverted = inverted - between
    return inverted


def decays_between(g: mx.array) -> mx.array:
    """Of heads (.., tokens): from one token to a later one, (.., tokens, tokens). 1 on the diagonal."""
    size = g.shape[-1]
    later = mx.triu(mx.ones((size, size), dtype=mx.bool_), 1)  # of the column than of the row
    return mx.triu(mx.cumprod(mx.where(later, g[..., None, :], 1), axis=-1))


def since_begin(g: mx.array, *, with_own: bool = True) -> mx.array:
    """Of channels (.., tokens, channels): products of decays up to each token."""
    return mx.cumprod(g, axis=-2, inclusive=with_own)


def until_end(g: mx.array) -> mx.array:
    """Products of the decays behind each token."""
    return mx.cumprod(g, axis=-2, reverse=True, inclusive=False)
