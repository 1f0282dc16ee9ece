"""Which record a tier gets next, and when: writing must not slow down what the engine is busy with.

    idle            as fast as the queue takes them, so long as no results are waiting
    rows decode     two at a time, as often as the pace allows (pace.py)
    a prompt waits  what has waited for long; the rest of the time belongs to the first token

Owner: the engine thread, through a tier's desk.
"""

from __future__ import annotations

from collections import deque

from firn.cache.storage.held import HeldWindows
from firn.cache.storage.pace import WritePace
from firn.cache.tree import Record, Tree
from firn.core.ports import EngineLoad

BUSY_SHARE = 0.02
"""Share of the engine's time that spilling may take while requests run."""
MAX_CREDIT_S = 0.05
"""Cap on how much unused spilling time may be saved up."""
MAX_PENDING_WRITES = 2
"""Pending writes while rows decode: one is being written, the next one is ready."""
PATIENCE_S = 2.0
"""How long a record waits to be spilled while a request waits for its first token."""


class SpillQueue:
    def __init__(self, tree: Tree, window: int, now: float) -> None:
        self._queue: deque[tuple[Record, float]] = deque()
        """Each record with the time from which its wait is counted."""
        self._held = HeldWindows(tree, window)
        self._credit_s = MAX_CREDIT_S
        self._pace = WritePace()
        self._last_tick = now

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, record: Record) -> bool:
        return any(waiting is record for waiting, _ in self._queue)

    def add(self, record: Record, now: float, *, holds: bool) -> None:
        """holds: a window waits until it is known to be of use."""
        if holds and self._held.takes(record):
            self._held.add(record, now)
        else:
            self._queue.append((record, now))

    def add_first(self, record: Record, now: float) -> None:
        """Write it before all others, as if it had waited for long."""
        self._queue.appendleft((record, now - PATIENCE_S))

    @property
    def first(self) -> Record:
        return self._queue[0][0]

    @property
    def holds_any(self) -> bool:
        return bool(self._held)

    def drop_first(self) -> None:
        self._queue.popleft()

    def is_passed(self, record: Record) -> bool:
        """Whether only those who go back in a conversation would need it."""
        return self._held.is_passed(record)

    def release_due(self, now: float) -> None:
        """Queue the windows that are to be written now."""
        self._queue.extend(self._held.take_due(now))

    def release_all(self) -> None:
        self._queue.extend(self._held.take_all())

    # --- when ------------------------------------------------------------------------------

    def tick(self, load: EngineLoad, now: float, *, is_writing: bool) -> None:
        """Between two steps of the engine."""
        elapsed, self._last_tick = now - self._last_tick, now
        self._credit_s = min(self._credit_s + BUSY_SHARE * elapsed, MAX_CREDIT_S)
        if load is EngineLoad.DECODING:
            self._pace.tick(now, is_writing=is_writing)
        else:
            self._pace.disturbed()

    def may_write(self, load: EngineLoad, now: float, *, n_pending: int) -> bool:
        """Whether the first record may be handed over now. n_pending: writes under way."""
        if load is EngineLoad.NONE:
            return True
        waited_s = now - self._queue[0][1]
        if self._credit_s <= 0:
            return False
        if load.prefilling:
            return waited_s >= PATIENCE_S
        return n_pending < MAX_PENDING_WRITES and self._pace.may_write(waited_s)

    def spent(self, seconds: float) -> None:
        """Handing a record over took the engine this long."""
        self._credit_s -= seconds
