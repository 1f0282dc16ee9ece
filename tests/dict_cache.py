"""A prefix cache without blocks: whole prefixes of a HashRunner's rows, in a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

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
    """Implements core.ports.Cursor."""

    cache: DictCache
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

    def restore(self) -> Restored | None:
        return self._longest(1)

    def advance(self, n_tokens: int) -> Restored | None:
        return self._longest(n_tokens + WORTH_A_RESTORE)

    def _longest(self, n_least: int) -> Restored | None:
        if not self.control.read:
            return None
        for n in range(len(self.prompt) - 1, n_least - 1, -1):
            state = self.cache.store.get((self.namespace, self.prompt[:n]))
            if state is not None:
                self.admission = Admitted(n, (("dict", n),))
                self.n_stored = n
                return DictPrefix(n, partial(self.cache.fill, state))
        return None

    def filled(self, row: LiveRow) -> None:
        pass

    def not_filled(self, error: Exception) -> None:
        self.close(None)

    def stops(self) -> Sequence[int]:
        return ()

    def commit(self, row: LiveRow) -> None:
        assert not self.closed, "a commit after the end"
        n = row.n_tokens
        if self.control.write and 0 < n <= len(self.tokens):
            view = row.view()
            state = view.layers[0].rows[view.at.index]
            self.cache.put((self.namespace, self.tokens[:n]), list(state[:n]))
            self.n_stored = n

    def fork(self, reply: Sequence[int]) -> DictCursor:
        forked = type(self)(self.cache, self.namespace, self.prompt, self.control, reply)
        forked.n_stored = self.n_stored
        self.cache.cursors.append(forked)
        return forked

    def hand_over(self, row: LiveRow) -> None:
        self.close(None)

    def close(self, row: LiveRow | None) -> None:
        if self.closed:
            return
        if row is not None:
            self.commit(row)
        self.closed = True
        self.cache.cursors.remove(self)


class DictCache:
    """Implements core.ports.EngineCache: whole prefixes in a dictionary.

    `corrupt`: restoring raises half-way, as a damaged record might.
    """

    cursor = DictCursor
    """The class of its cursors, which a test may replace."""

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
        cursor = self.cursor(self, owner, tuple(int(t) for t in prompt.ids), control)
        cursor.racing, cursor.patient = self.racing, self.patient
        self.cursors.append(cursor)
        return cursor

    def put(self, key: tuple[str, tuple[int, ...]], state: list[int]) -> None:
        if key not in self.store:
            self._in_doubt.append(key)
        self.store[key] = state

    def fill(self, state: list[int], layers: list[HashLayer]) -> None:
        if self.corrupt:
            layers[0].rows[0] = [GARBAGE]
            raise ValueError("a damaged record")
        layers[0].rows[0] = list(state)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

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

    def observe_restore(self, restored: Restored, seconds: float) -> None:
        assert restored.n_tokens > 0
        assert seconds >= 0.0

    def close(self) -> None:
        self.closed = True
