"""Batched attention caches whose rows each have their own end, for steps of several tokens.

mlx-lm's batched caches are right-justified: all rows take the same number of tokens per step. Here
a row's tokens begin at column 0 (pages) or are stored at their position modulo the length (a ring).
Taking back rejected tokens moves the row's end:

    pages   # [0, lengths[i]) row i's tokens   [lengths[i], width) rejected or never written: masked
    ring    # token t is in column t % length; the last max_size of [0, lengths[i]) are in use

A group changes to these classes at its first verification and keeps them. They have what models use of
mlx-lm's classes (`update_and_fetch`, `keys_and_values`, `make_mask`, `offset`), and what groups use
(`extend`, `filter`, `extract`).

Owner: the engine thread, through a group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import MAX_STEP_TOKENS

MAX_KEPT = 4
"""Arrays kept of each kind, for the other layers of a step."""
MAX_FEED = MAX_STEP_TOKENS
"""Tokens of one row in one step, at most."""
STEP = 256


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of its caches a step sees. block: their number is rounded up to a multiple of
    it, the last ones masked. has_bias: masks are numbers to add instead of booleans."""

    block: int = 1
    has_bias: bool = False

    def width(self, n_tokens: int) -> int:
        return rounded_up(n_tokens, block=self.block)

    def mask(self, seen: mx.array, dtype: mx.Dtype) -> mx.array:
        """seen: true where a token sees a column. dtype: what attention computes in.

        MLX's attention on CUDA adds its mask, and would convert booleans again in each layer.
        """
        if not self.has_bias:
            return seen
        return mx.where(seen, mx.array(0.0, dtype), mx.array(-mx.inf, dtype))


ALL_COLUMNS = Columns()


class IndexArrays:
    """Lengths and columns as arrays, shared by the layers of a group: in one step all layers have the
    same lengths."""

    def __init__(self, visible: Columns = ALL_COLUMNS) -> None:
        self.visible = visible
        self._offsets: dict[tuple[int, ...], mx.array] = {}
        self._columns: dict[tuple[tuple[int, ...], int, int], mx.array] = {}

    def offsets(self, lengths: Sequence[int]) -> mx.array:
        key = tuple(lengths)
        offsets = self._offsets.get(key)
        if offsets is None:
            _evict(self._offsets)
            offsets = self._offsets[key] = mx.array(key, dtype=mx.int32)
        return offsets

    def write_columns(self, lengths: Sequence[int], n_new: int, ring: int = 1 << 30) -> mx.array:
        """The columns of each row's next tokens: (rows, 1, new tokens, 1)."""
        key = (tuple(lengths), n_new, ring)
        columns = self._columns.get(key)
        if columns is None:
            _evict(self._columns)
            at = (np.array(lengths)[:, None] + np.arange(n_new)[None]) % ring
            columns = self._columns[key] = mx.array(at.astype(np.int32)[:, None, :, None])
        return columns


def _evict(table: dict[Any, mx.array]) -> None:
    while len(table) >= MAX_KEPT:
        del table[next(iter(table))]


class RaggedCache:
    """Keys and values (rows, heads, columns, width), and every row's length on host and device."""

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        lengths: Sequence[int],
        *,
        lone: Any,
        arrays: IndexArrays | None = None,
    ) -> None:
        """lone: the class of a single row's cache. mlx-vlm has classes of the same names as mlx-lm."""
        self.keys, self.values = keys, values
        self._arrays = arrays or IndexArrays()
        self._lone = lone
        self.lengths: list[int] = []
        self.offset: mx.array
        self.keep(lengths)

    def keep(self, lengths: Sequence[int]) -> None:
        """Set how many tokens each row holds."""
        self.lengths = list(lengths)
        self.offset = self._arrays.offsets(self.lengths)

    def keep_like(self, other: RaggedCache) -> None:
        """Hold as many tokens as another layer of the same rows."""
        self.lengths, self.offset = other.lengths, other.offset

    @property
    def state(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.keys, self.values, self.offset

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def empty(self) -> bool:
        return False

    def size(self) -> int:
        return max(self.lengths)

    def filter(self, rows: Sequence[int]) -> None:
        index = mx.array(list(rows))
        self.keys, self.values = self.keys[index], self.values[index]
        self.keep([self.lengths[i] for i in rows])

    def place(self, other: Any, seat: int) -> None:
        """Write a lone row's cache over one seat."""
        raise NotImplementedError

    def extract(self, seat: int) -> Any:
        """One seat's row, as a lone row's cache."""
        raise NotImplementedError

    def _write(self, keys: mx.array, values: mx.array, *, ring: int = 1 << 30) -> None:
        n_new = keys.shape[2]
        at = self._arrays.write_columns(self.lengths, n_new, ring)
        for name, new in (("keys", keys), ("values", values)):
            index = mx.broadcast_to(at, new.shape)
            setattr(self, name, mx.put_along_axis(getattr(self, name), index, new, axis=2))
        self.keep([n + n_new for n in self.lengths])


class RaggedKVCache(RaggedCache):
    """Plain attention."""

    @classmethod
    def of(cls, layer: Any, arrays: IndexArrays | None = None) -> RaggedKVCache:
        """From a right-justified BatchKVCache, which is copied."""
        padding = [int(p) for p in layer.left_padding.tolist()]
        lengths = [layer._idx - p for p in padding]
        width = max(lengths)

        def aligned(a: mx.array) -> mx.array:
            index = (mx.arange(width)[None] + mx.array(padding)[:, None])[:, None, :, None]
            return mx.take_along_axis(a, mx.minimum(index, layer._idx - 1), axis=2)

        lone = sys.modules[type(layer).__module__].KVCache
        keys, values = aligned(layer.keys), aligned(layer.values)
        return cls(keys, values, lengths, lone=lone, arrays=arrays)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        width = self._width(keys.shape[2])
        self._grow(width)
        self._write(keys, values)
        return self.keys[..., :width, :], self.values[..., :width, :]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For models whose later layers share the keys and values of an earlier one."""
        width = self.size()
        return self.keys[..., :width, :], self.values[..., :width, :]

    def _width(self, n_new: int) -> int:
        """Columns that a step of `n_new` tokens sees."""
        width = self.size() + n_new
        return self._arrays.visible.width(width) if n_new > 1 else width

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        columns = mx.arange(self._width(N))
        newest = (self.offset[:, None] + mx.arange(N))[:, None, :, None]
        mask = columns <= newest
        if window_size is not None:
            mask = mask & (columns > newest - window_size)
        return self._arrays.visible.mask(mask, self.keys.dtype) if N > 1 else mask

    def place(self, other: Any, seat: int) -> None:
        n = other.size()
        self._grow(n)
        self.keys[seat : seat + 1, :, :n] = other.keys[..., :n, :]
        self.values[seat : seat + 1, :, :n] = other.values[..., :n, :]
        self.keep([n if i == seat else m for i, m in enumerate(self.lengths)])

    def extend(self, other: Any) -> None:
        more = other if isinstance(other, RaggedKVCache) else RaggedKVCache.of(other)
        width = max(self.keys.shape[2], more.keys.shape[2])
        self._grow(width)
        more._grow(width)
        width = max(self.keys.shape[2], more.keys.shape[2])
        for name in ("keys", "values"):
            both = [padded(getattr(c, name), width) for c in (self, more)]
            setattr(self, name, mx.concatenate(both))
        self.keep([*self.lengths, *more.lengths])

    def extract(self, seat: int) -> Any:
        lone = self._lone()
        n = self.lengths[seat]
        lone.keys = mx.contiguous(self.keys[seat : seat + 1, :, :n])
        lone.values = mx.contiguous(self.values[seat : seat + 1, :, :n])
        lone.offset = n
        return lone

    def _grow(self, width: int) -> None:
        if width > self.keys.shape[2]:
            width = rounded_up(width, block=STEP)
            self.keys, self.values = (padded(a, width) for a in (self.keys, self.values))


class RaggedRing(RaggedCache):
    """Attention within a window. The ring is longer than the window by more than a step writes, so that
    rejected tokens have not overwritten any that are still seen.

    A row's token t is here if it was in the ring that the row came from, and no later one is in its
    column:    # [max(floors[i], ends[i] - length), lengths[i])
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        lengths: Sequence[int],
        *,
        lone: Any,
        max_size: int,
        floors: Sequence[int],
        arrays: IndexArrays | None = None,
    ) -> None:
        """floors: each row's first token. The last one is before lengths[i]."""
        super().__init__(keys, values, lengths, lone=lone, arrays=arrays)
        self.max_size = max_size
        self.floors = list(floors)
        self.ends = list(lengths)
        """The end of what was written of each row, rejected tokens and padding included."""

    @classmethod
    def of(cls, lone: Sequence[Any], arrays: IndexArrays | None = None) -> RaggedRing:
        """From the RotatingKVCaches of its rows."""
        max_size = int(lone[0].max_size)
        length = max_size + 2 * MAX_FEED

        def ring(layer: Any, name: str) -> mx.array:
            a = layer._temporal_order(getattr(layer, name))
            n = min(int(layer.offset), max_size)
            a = a[:, :, a.shape[2] - n :]
            at = mx.arange(layer.offset - n, layer.offset) % length
            blank = mx.zeros((*a.shape[:2], length, a.shape[3]), dtype=a.dtype)
            index = mx.broadcast_to(at[None, None, :, None], a.shape)
            return mx.put_along_axis(blank, index, a, axis=2)

        keys, values = (mx.concatenate([ring(c, n) for c in lone]) for n in ("keys", "values"))
        lengths = [int(c.offset) for c in lone]
        floors = [n - min(n, max_size) for n in lengths]
        made = type(lone[0])
        return cls(
            keys, values, lengths, lone=made, max_size=max_size, floors=floors, arrays=arrays
        )

    def column_of(self, token: int) -> int:
        """The column of a row's token, if it has not been overwritten."""
        return int(token % self.keys.shape[2])

    def first_held(self, seat: int) -> int:
        """A row's oldest token that has not been overwritten."""
        return max(self.floors[seat], self.ends[seat] - int(self.keys.shape[2]))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._write(keys, values, ring=self.keys.shape[2])
        self.ends = list(map(max, self.ends, self.lengths))
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        length = self.keys.shape[2]
        window = min(window_size or self.max_size, self.max_size)
        end = self.offset[:, None] + N
        # The newest token that a column may hold once these N are written; negative: none yet.
        holds = end - 1 - (end - 1 - mx.arange(length)[None]) % length
        holds = holds[:, None, None, :]
        newest = (self.offset[:, None] + mx.arange(N))[:, None, :, None]
        mask = (holds >= 0) & (holds <= newest) & (holds > newest - window)
        return self._arrays.visible.mask(mask, self.keys.dtype) if N > 1 else mask

    def place(self, other: Any, seat: int) -> None:
        ring = RaggedRing.of([other])
        self.keys[seat : seat + 1], self.values[seat : seat + 1] = ring.keys, ring.values
        self.floors[seat], self.ends[seat] = ring.floors[0], ring.ends[0]
        self.keep([ring.lengths[0] if i == seat else n for i, n in enumerate(self.lengths)])

    def filter(self, rows: Sequence[int]) -> None:
        super().filter(rows)
        self.floors = [self.floors[i] for i in rows]
        self.ends = [self.ends[i] for i in rows]

    def extend(self, other: Any) -> None:
        more = other
        if not isinstance(other, RaggedRing):
            more = RaggedRing.of([other.extract(i) for i in range(len(other.offset))])
        self.keys = mx.concatenate([self.keys, more.keys])
        self.values = mx.concatenate([self.values, more.values])
        self.floors += more.floors
        self.ends += more.ends
        self.keep([*self.lengths, *more.lengths])

    def extract(self, seat: int) -> Any:
        lone = self._lone(self.max_size)
        n = self.lengths[seat]
        at = mx.arange(max(n - self.max_size, 0), n) % self.keys.shape[2]
        lone.keys = self.keys[seat : seat + 1, :, at]
        lone.values = self.values[seat : seat + 1, :, at]
        lone.offset, lone._idx = n, min(n, self.max_size)
        return lone


def rounded_up(n_tokens: int, *, block: int) -> int:
    return -(-n_tokens // block) * block


def padded(a: mx.array, width: int) -> mx.array:
    """(rows, heads, columns, width), padded to at least `width` columns."""
    more = width - a.shape[2]
    return mx.pad(a, [(0, 0), (0, 0), (0, more), (0, 0)]) if more > 0 else a
