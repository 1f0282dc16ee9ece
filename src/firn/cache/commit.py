"""Cuts records out of a row: blocks, tails and states. Takes time in proportion to the new tokens.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from firn.cache.arrays.payload import Payload, evaluate, gathers, joined
from firn.cache.copies import Copies
from firn.cache.cursor import CacheCursor, WindowPiece
from firn.cache.layout import Layout
from firn.cache.memory.rows import LEAST_BLOCKS
from firn.cache.parts import Part
from firn.cache.planning.match import has_parts, is_obtainable
from firn.cache.records import Records
from firn.cache.tree import Mark, Node, Record
from firn.core.ports import LiveRow
from firn.core.values import PackedTokens

USED_EVERY_S = 60.0
"""How often a chain that is being computed is marked as used: its records may be written before it
ends."""


class Committer:
    def __init__(
        self, records: Records, layout: Layout, copies: Copies, *, exact_chunk: int
    ) -> None:
        self._records = records
        self._copies = copies
        self._tree = records.tree
        self._needs = records.needs
        self._layout = layout
        self._block = records.identity.block
        self._exact_chunk = exact_chunk
        self.keeps_pages_in_rows = layout.can_keep_pages_in_rows and not exact_chunk
        """Whether pages stay in the row. Not in exact mode: there the row continues with tokens
        that were not computed in whole chunks, and is not kept."""
        self._token_nbytes = 0
        self.piece_tokens = layout.piece_tokens(self._block)

    @property
    def commit_every(self) -> int:
        """Tokens between two commits."""
        return self.piece_tokens or self._block

    def commit(self, cursor: CacheCursor, row: LiveRow) -> None:
        """Commit whole blocks, then a state if one is due at this position."""
        with self._all_or_nothing(cursor) as new:
            self._commit(cursor, row, new)

    def _commit(self, cursor: CacheCursor, row: LiveRow, new: list[Record]) -> None:
        self._save_pieces(cursor, row)
        end = min(row.n_tokens, cursor.n_known)
        if self._exact_chunk:
            end -= end % self._exact_chunk
        start = cursor.node.end
        cutter = RowCutter(self._layout, row, start, end - (end - start) % self._block)
        while cursor.writes and cursor.node.end + self._block <= end:
            if not self._commit_block(cursor, cutter, new):
                break
        if self.keeps_pages_in_rows:
            cursor.pages = self._records.rows.of(row, self._layout, chain=cursor.node)
        mark = cursor.due.pop(row.n_tokens, None)
        if mark is not None and cursor.writes:
            self._commit_state(cursor, row, mark, new)

    def commit_tail(self, cursor: CacheCursor, row: LiveRow) -> None:
        """Commit the tokens after the last whole block, so that reuse is exact to the token."""
        if not cursor.writes or row.n_tokens > cursor.n_known:
            return
        with self._all_or_nothing(cursor) as new:
            self._commit_tail(cursor, row, new)

    def _commit_tail(self, cursor: CacheCursor, row: LiveRow, new: list[Record]) -> None:
        if self._needs.state:
            self._commit_state(cursor, row, Mark.REPLY_END, new)
        elif row.n_tokens > cursor.node.end:
            tokens = cursor.packed(cursor.node.end, row.n_tokens)
            longer = cursor.node.children.extensions(*tokens)
            n_tokens = row.n_tokens - cursor.node.end
            cover = next((node for node in longer if self._covers(node, n_tokens)), None)
            if cover is not None:
                self._records.extend_life(cover, cursor.control.ttl_s)
                return
            tail = self._tree.child(cursor.node, *tokens)
            with self._leased(tail):
                if self._store(cursor, tail, self._cutter_of(tail, row), new):
                    self._supersede(tail)

    @contextmanager
    def _all_or_nothing(self, cursor: CacheCursor) -> Iterator[list[Record]]:
        """Collect new records and compute their arrays; after a fault none of them is kept."""
        new: list[Record] = []
        try:
            yield new
        except Exception:
            self._records.take_back(new)
            raise

        def done() -> None:
            self._records.committed([r for r in new if r.alive])

        def failed() -> None:
            cursor.writes = False  # its chain has a hole

        self._copies.compute(new, done=done, failed=failed)

    @contextmanager
    def _leased(self, node: Node) -> Iterator[None]:
        """Keep a node while its records are added."""
        self._tree.lease(node)
        try:
            yield
        finally:
            self._records.unlease(node)

    def _cutter_of(self, node: Node, row: LiveRow) -> RowCutter:
        return RowCutter(self._layout, row, node.start, node.end)

    def _commit_block(self, cursor: CacheCursor, cutter: RowCutter, new: list[Record]) -> bool:
        start = cursor.node.end
        node = self._tree.child(cursor.node, *cursor.packed(start, start + self._block))
        with self._leased(node):
            if not self._store(cursor, node, cutter, new):
                return False
            self._supersede(node)
            self._tree.move_lease(cursor.node, node)
            cursor.node = node
        cursor.pieces = [p for p in cursor.pieces if p.end > node.end]
        cursor.n_saved = max(cursor.n_saved, node.end)
        return True

    def _commit_state(
        self, cursor: CacheCursor, row: LiveRow, mark: Mark, new: list[Record]
    ) -> None:
        """Keep the state at the row's position, with the pages of its unfinished block."""
        n = row.n_tokens
        node = cursor.node
        if n != node.end:
            node = self._tree.child(cursor.node, *cursor.packed(cursor.node.end, n))
        if node.parent is None:
            return
        cutter = self._cutter_of(node, row)
        with self._leased(node):
            if node is not cursor.node and not self._store(cursor, node, cutter, new):
                return
            self._keep(node, Part.STATE, partial(cutter.cut, Part.STATE, 0, n), mark, new)

    def _store(self, cursor: CacheCursor, node: Node, cutter: RowCutter, new: list[Record]) -> bool:
        """Store the node's pages and window, unless memory has them. False: there is no room."""
        self._tree.use(node, every_s=USED_EVERY_S)
        for part in self._needs.by_block:
            if part is Part.PAGES and self._stays_in_row(cursor):
                self._keep_in_row(node, cutter, new)
                continue
            cut = partial(self._cut, part, cursor, node, cutter)
            if not self._keep(node, part, cut, Mark.TURN, new):
                cursor.writes = False
                return False
        self._records.extend_life(node, cursor.control.ttl_s)
        return True

    def _keep(
        self,
        node: Node,
        part: Part,
        cut: Callable[[], Payload],
        mark: Mark,
        new: list[Record],
    ) -> bool:
        record = node.records.get(part)
        if record is not None and record.arrays is not None and not record.leaving:
            return True
        arrays = cut()
        record = self._records.keep(node, part, arrays, mark, spared=new)
        if record is not None and record.arrays is arrays:
            new.append(record)
        return record is not None

    def _stays_in_row(self, cursor: CacheCursor) -> bool:
        """Whether pages stay in the row: only if it is long, or one launch can cut all of them."""
        is_long = cursor.n_known >= LEAST_BLOCKS * self._block
        return self.keeps_pages_in_rows and (is_long or gathers())

    def _keep_in_row(self, node: Node, cutter: RowCutter, new: list[Record]) -> None:
        if not self._token_nbytes:
            self._token_nbytes = cutter.cut(Part.PAGES, node.start, node.start + 1).nbytes
        pages = self._records.rows.of(cutter.row, self._layout)
        record = self._records.keep_in_row(node, pages, node.n_tokens * self._token_nbytes)
        if record.arrays is pages:
            new.append(record)

    def _cut(self, part: Part, cursor: CacheCursor, node: Node, cutter: RowCutter) -> Payload:
        if part is Part.WINDOW and self.piece_tokens:
            return _join_pieces(cursor.pieces, node.start, node.end)
        return cutter.cut(part, node.start, node.end)

    def _save_pieces(self, cursor: CacheCursor, row: LiveRow) -> None:
        if not self.piece_tokens or row.n_tokens <= cursor.n_saved:
            return
        view = row.view()
        cut = self._layout.cut(Part.WINDOW, view.layers, view.at, cursor.n_saved, row.n_tokens)
        evaluate([cut])
        cursor.pieces.append(WindowPiece(cursor.n_saved, row.n_tokens, cut))
        cursor.n_saved = row.n_tokens

    def _covers(self, node: Node, n_tokens: int) -> bool:
        """Whether a prompt could resume inside this node as well as in a tail of `n_tokens` tokens.

        If the node is that tail, memory must have it, even if a tier has it: it was just computed.
        """
        available = _stays_in_memory if node.n_tokens == n_tokens else is_obtainable
        return has_parts(node, self._needs.by_block, available)

    def _supersede(self, node: Node) -> None:
        """Forget tails that this node contains, unless they hold a state."""
        assert node.parent is not None
        tokens = PackedTokens(node.tokens)
        for tail in list(node.parent.children.prefixes(tokens, 0, len(tokens) - 1)):
            if Part.STATE in tail.records or tail.n_leases or tail.n_pins:
                continue
            if not len(tail.children) and tail.expires_at <= node.expires_at:
                self._records.forget(tail)


class RowCutter:
    """Cuts payloads out of a row. Where a cut takes many kernels, several blocks are cut as one
    piece, which is then split by copying."""

    def __init__(self, layout: Layout, row: LiveRow, start: int, end: int) -> None:
        """[start, end): the tokens that pages and windows may be cut from."""
        view = row.view()
        self.at = view.at
        self.row = row
        self._layout = layout
        self._layers = view.layers
        self._start, self._end = start, end
        self._whole: dict[Part, Payload] = {}

    def cut(self, part: Part, start: int, end: int) -> Payload:
        is_cheap = part is Part.STATE or (part is Part.PAGES and gathers())
        if is_cheap or (start, end) == (self._start, self._end):
            return self._layout.cut(part, self._layers, self.at, start, end)
        if part not in self._whole:
            cut = self._layout.cut(part, self._layers, self.at, self._start, self._end)
            self._whole[part] = cut
        return self._whole[part].tokens(start - self._start, end - self._start).copied()

    def cut_pages(self, bounds: Sequence[tuple[int, int]]) -> list[Payload]:
        """Several pieces [start, end) of the row's pages."""
        if gathers():
            return self._layout.cut_pieces(Part.PAGES, self._layers, self.at, bounds)
        return [self.cut(Part.PAGES, start, end) for start, end in bounds]


def _join_pieces(pieces: Sequence[WindowPiece], start: int, end: int) -> Payload:
    """The window layers' tokens [start, end), from pieces that cover them."""
    parts: list[Payload] = []
    covered = start
    for piece in pieces:
        if piece.end <= covered or piece.start >= end:
            continue
        first, last = covered - piece.start, min(piece.end, end) - piece.start
        parts.append(piece.layers.tokens(first, last))
        covered = piece.start + last
    if covered != end:
        raise ValueError(f"window pieces end at {covered}, not at {end}")
    return joined(parts) if len(parts) > 1 else parts[0].copied()


def _stays_in_memory(record: Record) -> bool:
    return record.arrays is not None and not record.leaving
