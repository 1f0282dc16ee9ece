"""What a record of this model consists of: which codec serves each layer, and what a resume needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firn.cache.arrays.host import try_fetching
from firn.cache.arrays.payload import (
    Cells,
    Payload,
    Views,
    by_layer,
    evaluate_filled,
    gathered,
    gathers,
    n_at_once,
    stacked,
    try_gathering,
)
from firn.cache.codecs import Arrays, Buffers, LayerCodec, codec_for, leaves
from firn.cache.codecs.pages import KVCodec, quantising
from firn.cache.codecs.vlm import VlmKVCodec
from firn.cache.parts import Needs, Part
from firn.core.errors import TokensNotHeld
from firn.core.ports import MAX_STEP_TOKENS, At, LayerCache

QUANTISABLE = (KVCodec, VlmKVCodec)


@dataclass(frozen=True, slots=True)
class Layout:
    """One codec for each layer, in the order of the flattened layer list."""

    codecs: tuple[LayerCodec, ...]
    text: str
    """Describes every layer; a part of the root key."""
    window: int
    smallest_window: int

    @classmethod
    def of(
        cls, layers: Sequence[LayerCache], *, kv_bits: int = 0, kv_group_size: int = 64
    ) -> Layout:
        """Raises UnknownCacheLayer when a layer cannot be restored.

        kv_bits: quantise records of plain attention to this many bits; 0: keep them as they are.
        """
        flat = leaves(layers)
        codecs = tuple(codec_for(layer) for layer in flat)
        if kv_bits:
            codecs = tuple(
                quantising(x, bits=kv_bits, group_size=kv_group_size)
                if type(c) in QUANTISABLE
                else c
                for c, x in zip(codecs, flat, strict=True)
            )
        pairs = list(zip(codecs, flat, strict=True))
        windows = [c.reach(x) for c, x in pairs if c.part is Part.WINDOW]
        text = ",".join(str(c.describe(x)) for c, x in pairs)
        return cls(codecs, text, max(windows, default=0), min(windows, default=0))

    def piece_tokens(self, block: int) -> int:
        """How many tokens of a row the window layers must be cut at once; 0: whole blocks.

        A ring overwrites its oldest tokens. A step may feed a row MAX_STEP_TOKENS, and those of one
        that is unread are settled when its group changes, before the next commit; two plain steps
        may be in flight as well. What was not cut before that must still be in a ring that keeps no
        more than its window.
        """
        spare = MAX_STEP_TOKENS + 2
        if not 0 < self.smallest_window < block + spare:
            return 0
        return max(self.smallest_window - spare, 1)

    def needs(self, *, grid: int = 1) -> Needs:
        parts = {c.part for c in self.codecs}
        return Needs(Part.PAGES in parts, self.window, Part.STATE in parts, grid)

    def cut(
        self, part: Part, layers: Sequence[LayerCache], at: At, start: int, end: int
    ) -> Payload:
        """One part of all layers, for tokens [start, end) of a row: lazy copies.

        Only settled tokens, and only those that the layers still hold; else raises TokensNotHeld.
        """
        cut = self._gathered(part, layers, at, [(start, end)])
        return cut[0] if cut else stacked(self.views(part, layers, at, start, end))

    def cut_pieces(
        self, part: Part, layers: Sequence[LayerCache], at: At, bounds: Sequence[tuple[int, int]]
    ) -> list[Payload]:
        """Like `cut`, for several pieces."""
        cut = self._gathered(part, layers, at, bounds)
        return cut or [stacked(self.views(part, layers, at, *piece)) for piece in bounds]

    def _gathered(
        self, part: Part, layers: Sequence[LayerCache], at: At, bounds: Sequence[tuple[int, int]]
    ) -> list[Payload] | None:
        """The pieces, cut by one kernel; None where there is none for it."""
        for start, end in bounds:
            _check_settled(part, at, start, end)
        cells = self._cells(layers, at, bounds) if part is Part.PAGES else None
        return gathered(cells) if cells is not None else None

    def _cells(
        self, layers: Sequence[LayerCache], at: At, bounds: Sequence[tuple[int, int]]
    ) -> Cells | None:
        """The cells of these tokens, if they are in the same columns of all layers' buffers."""
        if not gathers() or not self.can_keep_pages_in_rows:
            return None
        pairs = list(self._buffers(layers))
        first = {buffers.first_column(layer, at) for buffers, layer in pairs}
        if len(first) != 1:
            return None
        column = first.pop()
        taken = [buffers.take(layer) for buffers, layer in pairs]
        return Cells(taken, at.index, [(column + start, column + end) for start, end in bounds])

    def prepare(self, layers: Sequence[LayerCache]) -> None:
        """Compile the kernels for cutting and spilling, where there are any. The layers must hold a
        token."""
        at = At(0, 1)
        cells = self._cells(layers, at, [(0, 1)])
        if cells is not None:
            try_gathering(cells.layers)
        for part in {codec.part for codec in self.codecs}:
            try_fetching(self.cut(part, layers, at, 0, 1))

    def views(
        self, part: Part, layers: Sequence[LayerCache], at: At, start: int, end: int
    ) -> list[Arrays]:
        """Like `cut`, but by layer, and as views where the codec can make them."""
        _check_settled(part, at, start, end)
        pairs = zip(self.codecs, leaves(layers), strict=True)
        return [c.cut(layer, at, start, end) for c, layer in pairs if c.part is part]

    def fill(
        self,
        part: Part,
        layers: Sequence[LayerCache],
        payloads: Sequence[Payload | Views],
        n_tokens: int,
    ) -> None:
        """Fill the layers of one part from the payloads of consecutive blocks."""
        pairs = zip(self.codecs, leaves(layers), strict=True)
        mine = [(codec, layer) for codec, layer in pairs if codec.part is part]
        at_once = n_at_once(payloads)
        for i, pieces in enumerate(by_layer(payloads, at_once=at_once)):
            codec, layer = mine[i]
            codec.fill(layer, pieces, n_tokens)
            if at_once > 1 and (i + 1) % at_once == 0:
                evaluate_filled([layer for _, layer in mine[i + 1 - at_once : i + 1]])

    @property
    def can_keep_pages_in_rows(self) -> bool:
        """Whether pages may stay in the row that computed them."""
        pages = [c for c in self.codecs if c.part is Part.PAGES]
        return bool(pages) and all(c.buffers is not None for c in pages)

    def is_lone(self, layers: Sequence[LayerCache]) -> bool:
        """Whether these layers belong to one row, not to a group."""
        return all(buffers.is_lone(layer) for buffers, layer in self._buffers(layers))

    def take(self, layers: Sequence[LayerCache]) -> list[Arrays]:
        """The page buffers of a lone row, without a copy."""
        return [buffers.take(layer) for buffers, layer in self._buffers(layers)]

    def give(self, layers: Sequence[LayerCache], taken: Sequence[Arrays], n_tokens: int) -> None:
        """Make a new row's layers hold the first `n_tokens` tokens of buffers that were taken."""
        pairs = self._buffers(layers)
        for (buffers, layer), arrays in zip(pairs, taken, strict=True):
            buffers.give(layer, arrays, n_tokens)

    def _buffers(self, layers: Sequence[LayerCache]) -> Iterator[tuple[Buffers, LayerCache]]:
        for codec, layer in zip(self.codecs, leaves(layers), strict=True):
            if codec.part is Part.PAGES and codec.buffers is not None:
                yield codec.buffers, layer

    def row_cost(self, layers: Sequence[LayerCache]) -> tuple[int, int]:
        """(bytes per token, fixed bytes) of a live row. The layers must hold at least a token."""
        pairs = list(zip(self.codecs, leaves(layers), strict=True))
        return sum(c.token_nbytes(x) for c, x in pairs), sum(c.fixed_nbytes(x) for c, x in pairs)


def _check_settled(part: Part, at: At, start: int, end: int) -> None:
    """Tokens of an unread step may be taken back, and a state is only where its row is."""
    is_settled = 0 <= start <= end <= at.n_tokens
    if part is Part.STATE:
        is_settled = end == at.n_tokens and not at.n_unread
    if not is_settled:
        raise TokensNotHeld(start, end, first=0, n_tokens=at.n_tokens)
