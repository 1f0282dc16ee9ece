"""A prefix cache without blocks: whole prefixes of a HashRunner's rows, in a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from firn.cache.off import BlankCursor
from firn.core.events import (
    Admitted,
)
from firn.core.ports import EngineLoad, LiveRow, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.values import (
    CacheControl,
    Namespace,
    Prompt,
)
from tests.hash_runner import GARBAGE, HashLayer

WORTH_A_RESTORE = 8


@dataclass(frozen=True)
class DictPrefix:
    """Implements core.ports.Restored with any function that fills the layers."""

    n_tokens: int
    fill: Callable[[list[HashLayer]], None]
    nbytes: int = 0


@dataclass(eq=False)
class DictCursor:
    namespace: str
    prompt: tuple[int, ...]
    control: CacheControl
    reply: Sequence[int] = ()
    admission: Admitted = Admitted(0)
    racing: bool = False
    n_expected: int = 0
    patient: bool = False
    closed: bool = False
    n_stored: int = 0

    def should_wait(self, *, busy: bool) -> bool:
        return self.patient

    def commit_due(self, n_tokens: int) -> bool:
        return n_tokens - self.n_stored >= WORTH_A_RESTORE

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.reply)


class DictCache:
    """Implements core.ports.PrefixCache: whole prefixes in a dictionary.

    `corrupt`: restoring raises half-way, as a damaged record might.
    """

    def __init__(
        self, *, corrupt: bool = False, racing: bool = False, patient: bool = False
    ) -> None:
        self.store: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.corrupt = corrupt
        self.racing = racing
        self.patient = patient
        """Given to new cursors: whether a record is on its way that is worth waiting for."""
        self.prefill = PrefillSpeed()
        self.cursors: list[DictCursor] = []
        """The open ones, which stand for leases."""
        self.room_nbytes: int | None = None
        self.closed = False
        self._in_doubt: list[tuple[str, tuple[int, ...]]] = []
        self.n_doubted = 0
        self.fault: Exception | None = None

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> DictCursor:
        recipe = prompt.recipe
        owner = f"{namespace}/{recipe}" if recipe else namespace
        cursor = DictCursor(owner, tuple(int(t) for t in prompt.ids), control)
        cursor.racing, cursor.patient = self.racing, self.patient
        self.cursors.append(cursor)
        return cursor

    def restore(self, cursor: DictCursor | BlankCursor) -> Restored | None:
        return self._longest(cursor, 1)

    def advance(self, cursor: DictCursor | BlankCursor, n_tokens: int) -> Restored | None:
        return self._longest(cursor, n_tokens + WORTH_A_RESTORE)

    def _longest(self, cursor: DictCursor | BlankCursor, n_least: int) -> Restored | None:
        if isinstance(cursor, BlankCursor) or not cursor.control.read:
            return None
        for n in range(len(cursor.prompt) - 1, n_least - 1, -1):
            state = self.store.get((cursor.namespace, cursor.prompt[:n]))
            if state is not None:
                cursor.admission = Admitted(n, (("dict", n),))
                cursor.n_stored = n
                return DictPrefix(n, partial(self._fill, state))
        return None

    def _fill(self, state: list[int], layers: list[HashLayer]) -> None:
        if self.corrupt:
            layers[0].rows[0] = [GARBAGE]
            raise ValueError("a damaged record")
        layers[0].rows[0] = list(state)

    def filled(self, cursor: DictCursor | BlankCursor, row: LiveRow) -> None:
        pass

    def not_filled(self, cursor: DictCursor | BlankCursor, error: Exception) -> None:
        self.close_cursor(cursor, None)

    def stops(self, cursor: DictCursor | BlankCursor) -> Sequence[int]:
        return ()

    def commit(self, cursor: DictCursor | BlankCursor, row: LiveRow) -> None:
        if isinstance(cursor, BlankCursor):
            return
        assert not cursor.closed, "a commit after the end"
        n = row.n_tokens
        if cursor.control.write and 0 < n <= len(cursor.tokens):
            view = row.view()
            state = view.layers[0].rows[view.at.index]
            key = cursor.namespace, cursor.tokens[:n]
            if key not in self.store:
                self._in_doubt.append(key)
            self.store[key] = list(state[:n])
            cursor.n_stored = n

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fork(
        self, cursor: DictCursor | BlankCursor, reply: Sequence[int]
    ) -> DictCursor | BlankCursor:
        if isinstance(cursor, BlankCursor):
            return cursor
        forked = DictCursor(cursor.namespace, cursor.prompt, cursor.control, reply)
        forked.n_stored = cursor.n_stored
        self.cursors.append(forked)
        return forked

    def close_cursor(self, cursor: DictCursor | BlankCursor, row: LiveRow | None) -> None:
        if isinstance(cursor, BlankCursor) or cursor.closed:
            return
        if row is not None:
            self.commit(cursor, row)
        cursor.closed = True
        self.cursors.remove(cursor)

    def blank(self) -> BlankCursor:
        return BlankCursor()

    def confirm(self) -> None:
        self._in_doubt.clear()

    def discard_unconfirmed(self) -> None:
        self.n_doubted += 1
        for key in self._in_doubt:
            self.store.pop(key, None)
        self._in_doubt.clear()

    def take_fault(self) -> Exception | None:
        fault, self.fault = self.fault, None
        return fault

    def set_room(self, nbytes: int) -> None:
        self.room_nbytes = nbytes
        if not nbytes:
            self.store.clear()

    def tick(self, load: EngineLoad) -> None:
        pass

    @property
    def settled(self) -> bool:
        return True

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        assert restored.n_tokens > 0
        assert seconds >= 0.0

    def close(self) -> None:
        self.closed = True
