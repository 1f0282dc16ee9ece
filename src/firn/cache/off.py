"""No prefix cache: with --disable-prefix-cache, and for models with a layer that no codec knows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from firn.core.ports import EngineLoad, NullCursor, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.values import CacheControl, Namespace, Prompt


class CacheOff:
    """Implements core.ports.EngineCache: every lookup misses, nothing is stored.

    why: the reason, for /health and stats.
    """

    def __init__(self, why: str = "switched off") -> None:
        self.why = why
        self.prefill = PrefillSpeed()

    def own_process(self) -> None:
        pass

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> NullCursor:
        return NullCursor()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

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

    def observe_restore(self, restored: Restored, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass
