"""Cuts records out of a row: blocks, tails and states. Takes time in proportion to the new tokens.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from firn.cache.arrays.payload import Payload, evaluate, gathers, joined
from firn.cache.copies import Copies, CopyOrder
from firn.cache.cursor import CacheCursor, Committed, WindowPiece
from firn.cache.layout import Layout
from firn.cache.memory.rows import LEAST_BLOCKS, RowPages
from firn.cache.parts import Part
from firn.cache.planning.match import ANYWHERE, Match, has_parts
from firn.cache.records import Records
from firn.cache.tree import CheckpointKind, Node, Record, Root
from firn.core.ports import LiveRow
from firn.core.values import PackedTokens

USED_EVERY_S = 60.0
"""How often a chain that is being computed is marked as used: its records may be written before it
ends."""


class Committer:
    """The only writer of `Committed`."""

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
        self._piece_tokens = layout.piece_tokens(self._block)

    # --- a cursor's position ---------------------------------------------------------------

    def begin(self, root: Root, *, writes: bool) -> Committed:
        """Nothing is committed yet."""
        self._tree.lease(root)
        return Committed(root, writes)

    def fork(self, cursor: CacheCursor) -> Committed:
        """For a choice that goes on from here: the row is the choice's from now on."""
        old = cursor.committed
        self._tree.lease(old.node)
        old.pages = None
        return Committed(
            old.node,
            cursor.writes,
            branches=list(old.branches),
            pieces=list(old.pieces),
            n_saved=old.n_saved,
            copies=old.copies,
        )

    def expect(self, cursor: CacheCursor, due: dict[int, CheckpointKind]) -> None:
        """Keep states, and write windows, at these positions of the prompt."""
        committed, needs = cursor.committed, self._needs
        if needs.state:
            committed.due = due
        if needs.window:
            committed.branches = [
                p for p, kind in due.items() if needs.state or kind > CheckpointKind.PROMPT_END
            ]

    def jump(self, cursor: CacheCursor, match: Match, window: Payload | None) -> None:
        """The row is to begin at this match. window: what is restored of its last block's."""
        committed = cursor.committed
        whole = [s.node for s in match.segments if s.n_tokens == self._block]
        if whole and whole[-1].end > committed.node.end:
            self._tree.move_lease(committed.node, whole[-1])
            committed.node = whole[-1]
        committed.n_saved = committed.node.end
        if self._piece_tokens and window is not None and match.n_tokens > committed.node.end:
            committed.pieces = [WindowPiece(committed.node.end, match.n_tokens, window)]
            committed.n_saved = match.n_tokens
        committed.due = {p: kind for p, kind in committed.due.items() if p > match.n_tokens}

    def is_in(self, cursor: CacheCursor, pages: RowPages | None) -> None:
        """The cursor's records are in this row from now on; None: in none."""
        cursor.committed.pages = pages

    def stop(self, cursor: CacheCursor) -> None:
        """Commit no more for this request: a fault has left a hole."""
        cursor.committed.writes = False

    def is_due(self, cursor: CacheCursor, n_tokens: int) -> bool:
        every = self._piece_tokens or self._block
        return cursor.writes and n_tokens - cursor.committed.n_saved >= every

    # --- committing ------------------------------------------------------------------------

    def commit(self, cursor: CacheCursor, row: LiveRow) -> None:
        """Commit whole blocks, then a state if one is due at this position."""
        committed = cursor.committed
        with self._all_or_nothing(cursor) as new:
            self._save_piece(committed, row)
            end = min(row.n_tokens, cursor.request.n_known)
            if self._exact_chunk:
                end -= end % self._exact_chunk
            start = committed.node.end
            cutter = RowCutter(self._layout, row, start, end - (end - start) % self._block)
            while committed.writes and committed.node.end + self._block <= end:
                if not self._commit_block(cursor, cutter, new):
                    break
            if self.keeps_pages_in_rows:
                committed.pages = self._records.rows.of(row, self._layout, chain=committed.node)
            kind = committed.due.pop(row.n_tokens, None)
            if kind is not None and committed.writes:
                self._commit_state(cursor, row, kind, new)
        self._keep_windows(committed)

    def commit_tail(self, cursor: CacheCursor, row: LiveRow) -> None:
        """Commit the tokens after the last whole block, so that reuse is exact to the token."""
        if not cursor.writes or row.n_tokens > cursor.request.n_known:
            return
        with self._all_or_nothing(cursor) as new:
            if self._needs.state:
                self._commit_state(cursor, row, CheckpointKind.REPLY_END, new)
            elif row.n_tokens > cursor.committed.node.end:
                self._commit_tail(cursor, row, new)

    def _commit_tail(self, cursor: CacheCursor, row: LiveRow, new: list[Record]) -> None:
        node = cursor.committed.node
        tokens = cursor.request.packed(node.end, row.n_tokens)
        longer = node.children.extensions(*tokens)
        n_tokens = row.n_tokens - node.end
        cover = next((other for other in longer if self._covers(other, n_tokens)), None)
        if cover is not None:
            self._records.extend_life(cover, cursor.request.control.ttl_s)
            return
        tail = self._tree.child(node, *tokens)
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
        if new:
            order = cursor.committed.copies = CopyOrder(new)
            self._copies.compute(order)

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
        committed, start = cursor.committed, cursor.committed.node.end
        tokens = cursor.request.packed(start, start + self._block)
        node = self._tree.child(committed.node, *tokens)
        with self._leased(node):
            if not self._store(cursor, node, cutter, new):
                return False
            self._supersede(node)
            self._tree.move_lease(committed.node, node)
            committed.node = node
        committed.pieces = [p for p in committed.pieces if p.end > node.end]
        committed.n_saved = max(committed.n_saved, node.end)
        return True

    def _commit_state(
        self, cursor: CacheCursor, row: LiveRow, kind: CheckpointKind, new: list[Record]
    ) -> None:
        """Keep the state at the row's position, with the pages of its unfinished block."""
        last, n = cursor.committed.node, row.n_tokens
        node = last
        if n != last.end:
            node = self._tree.child(last, *cursor.request.packed(last.end, n))
        if node.parent is None:
            return
        cutter = self._cutter_of(node, row)
        with self._leased(node):
            if node is not last and not self._store(cursor, node, cutter, new):
                return
            if not _is_held(node, Part.STATE):
                self._records.keep(node, Part.STATE, cutter.cut(Part.STATE, 0, n), kind, new)

    def _store(self, cursor: CacheCursor, node: Node, cutter: RowCutter, new: list[Record]) -> bool:
        """Store the node's pages and window, unless memory has them. False: there is no room."""
        self._tree.use(node, every_s=USED_EVERY_S)
        for part in self._needs.by_block:
            if part is Part.PAGES and self._stays_in_row(cursor):
                self._keep_in_row(node, cutter, new)
            elif not _is_held(node, part):
                if part is Part.WINDOW and self._piece_tokens:
                    arrays = _join_pieces(cursor.committed.pieces, node.start, node.end)
                else:
                    arrays = cutter.cut(part, node.start, node.end)
                if not self._records.keep(node, part, arrays, CheckpointKind.TURN, new):
                    cursor.committed.writes = False
                    return False
        self._records.extend_life(node, cursor.request.control.ttl_s)
        return True

    def _stays_in_row(self, cursor: CacheCursor) -> bool:
        """Whether pages stay in the row: only if it is long, or one launch can cut all of them."""
        is_long = cursor.request.n_known >= LEAST_BLOCKS * self._block
        return self.keeps_pages_in_rows and (is_long or gathers())

    def _keep_in_row(self, node: Node, cutter: RowCutter, new: list[Record]) -> None:
        if not self._token_nbytes:
            self._token_nbytes = cutter.cut(Part.PAGES, node.start, node.start + 1).nbytes
        pages = self._records.rows.of(cutter.row, self._layout)
        record = self._records.keep_in_row(node, pages, node.n_tokens * self._token_nbytes)
        if record.arrays is pages:
            new.append(record)

    def _save_piece(self, committed: Committed, row: LiveRow) -> None:
        if not self._piece_tokens or row.n_tokens <= committed.n_saved:
            return
        view = row.view()
        cut = self._layout.cut(Part.WINDOW, view.layers, view.at, committed.n_saved, row.n_tokens)
        evaluate([cut])
        committed.pieces.append(WindowPiece(committed.n_saved, row.n_tokens, cut))
        committed.n_saved = row.n_tokens

    def _keep_windows(self, committed: Committed) -> None:
        """Have the windows written before the points that are committed by now."""
        while committed.branches:
            position = committed.branches[0]
            # A state inside a block has a tail of its own, with the window's last part.
            first = position - position % self._block
            if committed.node.end < (first if self._needs.state else position):
                return
            branch = committed.branches.pop(0)
            self._records.keep_window(committed.node, branch, CheckpointKind.BRANCH)

    def _covers(self, node: Node, n_tokens: int) -> bool:
        """Whether a prompt could resume inside this node as well as in a tail of `n_tokens` tokens.

        If the node is that tail, memory must have it, even if a tier has it: it was just computed.
        """
        if node.n_tokens == n_tokens:
            return all(_is_held(node, part) for part in self._needs.by_block)
        return has_parts(node, self._needs.by_block, ANYWHERE)

    def _supersede(self, node: Node) -> None:
        """Forget tails that this node contains, unless they hold a state."""
        assert node.parent is not None
        tokens = PackedTokens(node.tokens)
        for tail in list(node.parent.children.prefixes(tokens, 0, len(tokens) - 1)):
            if Part.STATE in tail.records or tail.n_leases or tail.n_pins:
                continue
            if not len(tail.children) and tail.expires_at <= node.expires_at:
                self._records.forget(tail)


def _is_held(node: Node, part: Part) -> bool:
    """Whether memory has this part of the node, and keeps it."""
    record = node.records.get(part)
    return record is not None and record.arrays is not None and not record.leaving


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
