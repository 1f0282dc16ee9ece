"""No prefix cache: with --disable-prefix-cache, and for models with a layer that no codec knows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from firn.core.events import Admitted
from firn.core.ports import EngineLoad, LiveRow, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, Namespace, Prompt


@dataclass(frozen=True, slots=True)
class BlankCursor:
    """A cursor that neither reads nor writes."""

    admission: Admitted = Admitted(0, reason=Reason(Cause.NO_CACHE))
    racing: bool = False
    n_expected: int = 0

    def should_wait(self, *, busy: bool) -> bool:
        return False

    def commit_due(self, n_tokens: int) -> bool:
        return False


class CacheOff:
    """Implements core.ports.PrefixCache: every lookup misses, nothing is stored.

    why: the reason, for /health and stats.
    """

    def __init__(self, why: str = "switched off") -> None:
        self.why = why
        self.prefill = PrefillSpeed()

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> BlankCursor:
        return BlankCursor()

    def restore(self, cursor: BlankCursor) -> Restored | None:
        return None

    def advance(self, cursor: BlankCursor, n_tokens: int) -> Restored | None:
        return None

    def filled(self, cursor: BlankCursor, row: LiveRow) -> None:
        pass

    def not_filled(self, cursor: BlankCursor, error: Exception) -> None:
        pass

    def stops(self, cursor: BlankCursor) -> Sequence[int]:
        return ()

    def commit(self, cursor: BlankCursor, row: LiveRow) -> None:
        pass

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fork(self, cursor: BlankCursor, reply: Sequence[int]) -> BlankCursor:
        return cursor

    def close_cursor(self, cursor: BlankCursor, row: LiveRow | None) -> None:
        pass

    def blank(self) -> BlankCursor:
        return BlankCursor()

    def confirm(self) -> None:
        pass

    def discard_unconfirmed(self) -> None:
        pass

    def take_fault(self) -> None:
        return None

    def set_room(self, nbytes: int) -> None:
        pass

    def tick(self, load: EngineLoad) -> None:
        pass

    @property
    def settled(self) -> bool:
        return True

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
