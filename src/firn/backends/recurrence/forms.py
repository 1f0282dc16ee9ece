"""Recurrences in chunks, as backends use them: how long the chunks are, and from when on they pay."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import mlx.core as mx

from firn.backends.recurrence.chunks import Product, in_float32
from firn.backends.recurrence.delta import gated_delta
from firn.backends.recurrence.linear import linear_attention
from firn.backends.recurrence.wkv import wkv7


@dataclass(frozen=True, slots=True)
class Chunked:
    """chunk: tokens. min_work, min_tokens: tokens times elements of the state, and tokens; below one
    of them, the operations on chunks take longer than they save. max_product: multiplications of a
    matrix product, for which chunks are made shorter. has_tf32: whether MLX's own products round to
    TF32, which would show."""

    chunk: int
    min_work: int = 0
    min_tokens: int = 1
    max_product: int = sys.maxsize
    has_tf32: bool = False

    def suits(self, k: mx.array, v: mx.array) -> bool:
        """Whether to compute this call; otherwise it is left to the library."""
        return v.size * k.shape[-1] >= self.min_work and k.shape[1] >= self.min_tokens

    def size(self, k: mx.array, v: mx.array, *, longest: int | None = None) -> int:
        """Tokens of a chunk."""
        room = max(self.max_product // (k.shape[-1] * v.shape[-1]), 1)
        return min(longest or self.chunk, 1 << (room.bit_length() - 1))

    @property
    def multiply(self) -> Product:
        return in_float32 if self.has_tf32 else mx.matmul


@dataclass(frozen=True, slots=True)
class ChunkedDelta:
    """channel_chunk: tokens of a chunk whose decays are of channels."""

    chunks: Chunked
    channel_chunk: int

    @property
    def identity(self) -> str:
        c = self.chunks
        text = f"delta-{c.chunk}-{self.channel_chunk}-{c.min_work}-{c.max_product}"
        return text + "-float32" * c.has_tf32

    def suits(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        return self.chunks.suits(q, v)

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        size = self.chunks.size(q, v, longest=None if g.ndim == 3 else self.channel_chunk)
        multiply = self.chunks.multiply
        return gated_delta(q, k, v, g, beta, state, mask, chunk=size, multiply=multiply)


@dataclass(frozen=True, slots=True)
class ChunkedLinear:
    chunks: Chunked

    def suits(self, k: mx.array, v: mx.array) -> bool:
        return self.chunks.suits(k, v)

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
        beta: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        size, multiply = self.chunks.size(k, v), self.chunks.multiply
        return linear_attention(q, k, v, g, state, mask, beta, chunk=size, multiply=multiply)


@dataclass(frozen=True, slots=True)
class ChunkedWkv:
    chunks: Chunked

    def suits(self, k: mx.array, v: mx.array) -> bool:
        return self.chunks.suits(k, v)

    def __call__(
        self,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        size, multiply = self.chunks.size(k, v), self.chunks.multiply
        return wkv7(r, w, k, v, a, b, state, mask, chunk=size, multiply=multiply)
