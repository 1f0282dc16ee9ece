"""Windows that wait until it is known which of them are worth writing.

A resume needs the windows of the last few blocks before it, and a conversation is resumed at its end.
While a request computes a prompt and its reply, its end moves on, and nobody will resume at most of the
blocks behind it. So the windows of a chain are written when its request ends, or after HOLD_S, and only
those near its end then; those near points where other prompts may branch off are marked, and do not
wait. All others are written when they leave memory.

    |  block  |  block  |  block  |  block  |  block  | end
                                  |<------ window --->|     written: what overlaps it

Owner: the engine thread, through a tier's spill queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from firn.cache.parts import Part
from firn.cache.tree import CheckpointKind, Record, Tree

HOLD_S = 5.0
"""A crash in the middle of a long prompt or reply should lose no more than seconds."""
LOOK_EVERY_S = 0.25


class HeldWindows:
    def __init__(self, tree: Tree, window: int) -> None:
        """window: how many tokens before a resume point the model needs."""
        self._tree = tree
        self._window = window
        self._since: dict[Record, float] = {}
        self._look_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._since)

    def takes(self, record: Record) -> bool:
        """Whether the record should wait here."""
        return record.part is Part.WINDOW and not _is_branch_point(record)

    def add(self, record: Record, now: float) -> None:
        self._since.setdefault(record, now)

    def take_due(self, now: float) -> Iterator[tuple[Record, float]]:
        """Those to be written now, each with the time since which it has waited. Where one has waited
        for long, the newest are written, too: it may have been passed in the meantime."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        is_late = any(now - since >= HOLD_S for since in self._since.values())
        for record, since in list(self._since.items()):
            if is_late or not record.node.n_leases or _is_branch_point(record):
                yield from self._take(record, since)

    def take_all(self) -> Iterator[tuple[Record, float]]:
        for record, since in list(self._since.items()):
            yield from self._take(record, since)

    def _take(self, record: Record, since: float) -> Iterator[tuple[Record, float]]:
        del self._since[record]
        is_here = record.arrays is not None and self._tree.is_current(record)
        if is_here and not self.is_passed(record):
            yield record, since

    def is_passed(self, record: Record) -> bool:
        """Whether its conversation has gone on so far that only a branch would need this record."""
        if record.part is Part.PAGES or _is_branch_point(record):
            return False
        n_tokens = self._window if record.part is Part.WINDOW else 1
        return self._tree.goes_on(record.node, n_tokens)


def _is_branch_point(record: Record) -> bool:
    """Whether other prompts may resume here; or this one may, after its last reply was changed."""
    if record.kind >= CheckpointKind.LATTICE:
        return True
    state = record.node.records.get(Part.STATE)
    return (
        record.part is Part.WINDOW and state is not None and state.kind > CheckpointKind.PROMPT_END
    )
