"""No prefix cache: what --disable-prefix-cache and models with unknown layers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.core.events import Admitted
from firn.core.ports import LiveRow, Load, Restored
from firn.core.values import CacheControl, Namespace, Prompt


@dataclass(frozen=True, slots=True)
class BlankTrail:
    """A trail that neither reads nor writes."""

    found: Admitted = Admitted(0, reason="no cache")
    racing: bool = False
    n_near: int = 0

    def waits(self, *, busy: bool) -> bool:
        return False

    def wants(self, n_tokens: int) -> bool:
        return False


class CacheOff:
    """Every lookup is a miss, every commit is nothing. `why`: the reason, for /health and stats."""

    def __init__(self, why: str = "switched off") -> None:
        self.why = why

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> BlankTrail:
        return BlankTrail()

    def restore(self, trail: BlankTrail) -> Restored | None:
        return None

    def advance(self, trail: BlankTrail, n_tokens: int) -> Restored | None:
        return None

    def stops(self, trail: BlankTrail) -> Sequence[int]:
        return ()

    def commit(self, trail: BlankTrail, row: LiveRow) -> None:
        pass

    def fork(self, trail: BlankTrail, reply: Sequence[int]) -> BlankTrail:
        return trail

    def close_trail(self, trail: BlankTrail, row: LiveRow | None) -> None:
        pass

    def blank(self) -> BlankTrail:
        return BlankTrail()

    def confirm(self) -> None:
        pass

    def doubt(self) -> None:
        pass

    def set_room(self, nbytes: int) -> None:
        pass

    def tick(self, load: Load) -> None:
        pass

    @property
    def settled(self) -> bool:
        return True

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        pass

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
