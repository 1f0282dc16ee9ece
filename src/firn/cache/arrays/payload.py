"""What a record holds of a row: one part of every layer, arrays of one dtype and shape in one stack.

The number of a record's arrays slows a device down, not their size. With stacks, a block of 36
layers is one copy instead of 72; several blocks are cut as one piece, which is then split by
copying, and a row is filled many layers at a time.

    places of 3 layers with two slots      stacks
    (0, 0) (0, 1)                          0: keys, values, keys, values   [4, 1, heads, tokens, width]
    (0, 2) (0, 3)
    (1, 0) None                            1: a state                      [1, 1, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from firn.cache.arrays.transfers import transfers
from firn.cache.codecs import TOKEN_AXIS, Arrays, nbytes_of
from firn.cache.storage.places import Places, places_of
from firn.core.ports import LayerCache

TRIED_ROW, TRIED_COLUMNS, TRIED_BOUNDS = 1, 24, ((0, 5), (5, 6), (9, 21), (23, 24), (2, 4))
"""Cells to test the gather kernel with: more pieces than one launch copies."""


@dataclass(frozen=True, slots=True)
class Payload:
    stacks: tuple[mx.array, ...]
    places: Places

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    @property
    def n_layers(self) -> int:
        return len(self.places)

    def layer(self, i: int) -> Arrays:
        """One layer's arrays: views."""
        return tuple(None if at is None else self.stacks[at[0]][at[1]] for at in self.places[i])

    def tokens(self, start: int, end: int) -> Payload:
        """Tokens [start, end) of pages or a window: views."""
        return Payload(tuple(s[..., start:end, :] for s in self.stacks), self.places)

    def copied(self) -> Payload:
        """A lazy copy."""
        return Payload(tuple(array_copy(s) for s in self.stacks), self.places)

    def joined(self, others: Sequence[Payload]) -> Payload:
        """A lazy copy of its tokens, then theirs. The layers must match."""
        stacks = zip(self.stacks, *(p.stacks for p in others), strict=True)
        return Payload(
            tuple(mx.concatenate(list(some), TOKEN_AXIS) for some in stacks), self.places
        )


@dataclass(frozen=True, slots=True)
class Views:
    """A record's content in place: views of a row's buffers, which must not outlive a call."""

    layers: list[Arrays]

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.layers))

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def layer(self, i: int) -> Arrays:
        return self.layers[i]


@dataclass(frozen=True, slots=True)
class Cells:
    """Columns of one row, in the buffers of all layers: (rows, heads, columns, width)."""

    layers: list[Arrays]
    row: int
    bounds: Sequence[tuple[int, int]]
    """[start, end) of each piece."""


def stacked(layers: Sequence[Arrays]) -> Payload:
    """A lazy copy of these arrays."""
    places, members = _by_kind(layers, lambda a: (a.dtype, *a.shape))
    stacks = (mx.stack(some) if len(some) > 1 else array_copy(some[0][None]) for some in members)
    return Payload(tuple(stacks), places)


def gathers() -> bool:
    """Whether `gathered` can be used here."""
    return transfers().gathers


def gathered(cells: Cells) -> list[Payload] | None:
    """Lazy copies of these cells, one for each piece; one launch copies a few pieces of a whole
    stack. MLX would copy array by array, in 72 launches for 36 layers. None: the kernel cannot copy
    these buffers."""
    bus = transfers()
    places, members = _by_kind(cells.layers, lambda a: (a.dtype, *a.shape))
    # `stacked` would put buffers that differ only in their room into one stack.
    kinds = {(some[0].dtype, some[0].shape[1], some[0].shape[-1]) for some in members}
    if len(kinds) != len(members) or not all(map(bus.can_gather, members)):
        return None
    payloads = []
    for first in range(0, len(cells.bounds), bus.max_pieces):
        some = cells.bounds[first : first + bus.max_pieces]
        stacks = [bus.gather(arrays, cells.row, some) for arrays in members]
        payloads += [Payload(pieces, places) for pieces in zip(*stacks, strict=True)]
    return payloads


def try_gathering(layers: Sequence[Arrays]) -> None:
    """Compile the kernel for buffers like these; disable it if it fails or copies other cells."""
    bus = transfers()
    if not bus.gathers:
        return
    tried = [
        tuple(None if a is None else _tried(a, seed=2 * i + j) for j, a in enumerate(arrays))
        for i, arrays in enumerate(layers)
    ]
    try:
        got = gathered(Cells(tried, TRIED_ROW, TRIED_BOUNDS))
        want = [stacked(_piece(tried, TRIED_ROW, *bounds)) for bounds in TRIED_BOUNDS]
        for a, b in zip(got or want, want, strict=True):
            if not all(map(mx.array_equal, a.stacks, b.stacks)):
                bus.stop_gathering("the gather kernel copied the wrong cells")
    except (RuntimeError, ValueError, TypeError) as e:
        bus.stop_gathering(e)


def _tried(like: mx.array, *, seed: int) -> mx.array:
    """A small buffer of random numbers."""
    shape = (TRIED_ROW + 1, *like.shape[1:-2], TRIED_COLUMNS, like.shape[-1])
    return mx.random.randint(0, 1 << 15, shape, key=mx.random.key(seed)).astype(like.dtype)


def _piece(layers: Sequence[Arrays], row: int, start: int, end: int) -> list[Arrays]:
    """Views of columns [start, end) of one row."""
    return [
        tuple(None if a is None else a[row : row + 1, :, start:end] for a in arrays)
        for arrays in layers
    ]


def _by_kind(
    layers: Sequence[Arrays], kind: Callable[[mx.array], Hashable]
) -> tuple[Places, list[list[mx.array]]]:
    """The place of each array, and the arrays of each stack: those of one kind."""
    places = places_of(
        tuple(tuple(None if a is None else kind(a) for a in arrays) for arrays in layers)
    )
    members: dict[int, list[mx.array]] = {}
    for slots, arrays in zip(places, layers, strict=True):
        for at, array in zip(slots, arrays, strict=True):
            if at is not None and array is not None:
                members.setdefault(at[0], []).append(array)
    return places, list(members.values())


def array_copy(array: mx.array) -> mx.array:
    """A lazy copy. `mx.contiguous` would not do: it may return a view of the same buffer."""
    return mx.concatenate([array, array[:0]])


def joined(payloads: Sequence[Payload]) -> Payload:
    """A lazy copy of their tokens, one after another. The layers must match."""
    return payloads[0].joined(payloads[1:])


def by_layer(payloads: Sequence[Payload | Views], *, at_once: int) -> Iterator[list[Arrays]]:
    """The pieces of each layer in turn; pieces of `at_once` layers are joined by one operation."""
    alike = [p for p in payloads if isinstance(p, Payload)]
    places = alike[0].places if len(alike) == len(payloads) else ()
    if at_once == 1 or len(alike) == 1 or not places or any(p.places != places for p in alike):
        for i in range(payloads[0].n_layers):
            yield [p.layer(i) for p in payloads]
        return
    for first in range(0, len(places), at_once):
        some, ranges = _some(places, first, first + at_once)
        slices = [Payload(tuple(p.stacks[n][a:b] for n, a, b in ranges), some) for p in alike]
        whole = joined(slices)
        for i in range(whole.n_layers):
            yield [whole.layer(i)]


def _some(places: Places, start: int, end: int) -> tuple[Places, list[tuple[int, int, int]]]:
    """Layers [start, end): their places, and (stack, a, b) for the entries [a, b) they take."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for stack, entry in (at for slots in places[start:end] for at in slots if at is not None):
        first.setdefault(stack, entry)
        last[stack] = entry + 1
    numbers = {stack: i for i, stack in enumerate(first)}
    own = tuple(
        tuple(None if at is None else (numbers[at[0]], at[1] - first[at[0]]) for at in slots)
        for slots in places[start:end]
    )
    return own, [(stack, first[stack], last[stack]) for stack in first]


def evaluate(payloads: Iterable[Payload]) -> None:
    """Compute copies now: a pending one would make the layer's next write copy its whole buffer."""
    _evaluate([stack for payload in payloads for stack in payload.stacks])


def evaluate_layers(layers: Iterable[Arrays]) -> None:
    """Like `evaluate`, for arrays by layer."""
    _evaluate([a for arrays in layers for a in arrays if a is not None])


def _evaluate(arrays: list[mx.array]) -> None:
    if arrays:
        (mx.eval if copies_are_awaited() else mx.async_eval)(arrays)


def copies_are_awaited() -> bool:
    """Whether the engine waits for copies. Not where it would also wait for the decode step in
    flight, which holds the layer's buffers anyway. A fault shows when the engine confirms what was
    committed."""
    return transfers().awaits_copies


def evaluate_filled(layers: Sequence[LayerCache]) -> None:
    """Compute filled layers now, so that what they were joined from can be freed."""
    mx.eval([layer.state for layer in layers])


def n_at_once(payloads: Sequence[Payload | Views]) -> int:
    """How many layers to fill together. One where only the size of a copy matters."""
    most = transfers().fill_nbytes
    nbytes = max(sum(p.nbytes for p in payloads), 1)
    return max(most * payloads[0].n_layers // nbytes, 1)
