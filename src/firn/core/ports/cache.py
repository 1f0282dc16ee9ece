"""The prefix cache as the engine thread drives it.

No method raises, and none changes an answer: a fault inside is a counted miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from firn.core.events import Admitted
from firn.core.ports.runner import LiveRow, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, Namespace, Prompt


class Cursor(Protocol):
    """One request at the cache: restore, advance before a chunk, commit after it; fork for each choice,
    whose reply is committed as it grows; close at the end."""

    @property
    def admission(self) -> Admitted:
        """What the cache has done for its prompt so far."""
        ...

    @property
    def n_expected(self) -> int:
        """Tokens of its prompt that need no computing if no load fails, including those being
        loaded."""
        ...

    @property
    def racing(self) -> bool:
        """Whether a load is under way that would let it skip a part of its prompt."""
        ...

    def should_wait(self, *, busy: bool) -> bool:
        """Whether the load will end so soon that no chunk should be started.

        busy: other requests are decoding.
        """
        ...

    def restore(self) -> Restored | None:
        """What can be copied into a new row right now; None: nothing."""
        ...

    def advance(self, n_tokens: int) -> Restored | None:
        """A longer prefix than these tokens, if another request or a load has brought one."""
        ...

    def filled(self, row: LiveRow) -> None:
        """A row was made of what was restored or advanced to last."""
        ...

    def not_filled(self, error: Exception) -> None:
        """No row could be made of it. This ends the cursor."""
        ...

    def stops(self) -> Sequence[int]:
        """Ascending positions where a prefill chunk should end so that state can be kept there."""
        ...

    def commit_due(self, n_tokens: int) -> bool:
        """Whether to commit once the row holds this many tokens."""
        ...

    def commit(self, row: LiveRow) -> None:
        """Store what the row has finished since the last commit."""
        ...

    def fork(self, reply: Sequence[int]) -> Cursor:
        """A choice's own cursor from here on. reply: its token list, which will grow."""
        ...

    def hand_over(self, row: LiveRow) -> None:
        """End the request, and keep what was stored, while the row goes on for another cursor."""
        ...

    def close(self, row: LiveRow | None) -> None:
        """End the request: store its tail if a row is given, release its leases. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class NullCursor:
    """A cursor that neither reads nor writes: of a request that the cache has nothing to do with."""

    admission: Admitted = Admitted(0, reason=Reason(Cause.NO_CACHE))
    n_expected: int = 0
    racing: bool = False

    def should_wait(self, *, busy: bool) -> bool:
        return False

    def restore(self) -> Restored | None:
        return None

    def advance(self, n_tokens: int) -> Restored | None:
        return None

    def filled(self, row: LiveRow) -> None:
        pass

    def not_filled(self, error: Exception) -> None:
        pass

    def stops(self) -> Sequence[int]:
        return ()

    def commit_due(self, n_tokens: int) -> bool:
        return False

    def commit(self, row: LiveRow) -> None:
        pass

    def fork(self, reply: Sequence[int]) -> NullCursor:
        return self

    def hand_over(self, row: LiveRow) -> None:
        pass

    def close(self, row: LiveRow | None) -> None:
        pass


class EngineLoad(Enum):
    """What the engine is busy with."""

    NONE = 0
    DECODING = 1
    PREFILLING = 2
    """A request is waiting for its first token, and none for its next."""
    BOTH = 3

    @property
    def prefilling(self) -> bool:
        return self in (EngineLoad.PREFILLING, EngineLoad.BOTH)


class EngineCache(Protocol):
    """The cache as the engine drives it: a cursor for each request, in the loop, and with its
    measurements."""

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Cursor:
        """Find which part of the prompt is stored and start to load it. No I/O on this thread."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Copies everything committed inside in one go, if that is faster on the device. May be
        nested."""
        ...

    def tick(self, load: EngineLoad) -> None:
        """Between two steps: process what was read, spill records. Does less under load."""
        ...

    @property
    def settled(self) -> bool:
        """Whether a tick without requests has nothing left to do."""
        ...

    def set_room(self, nbytes: int) -> None:
        """Keep records within this much device memory: live requests need the rest."""
        ...

    def confirm(self) -> None:
        """The device reported no fault in what was committed so far: it may be spilled.

        Once this has been called, every later commit must be confirmed before it is spilled.
        """
        ...

    def discard_unconfirmed(self) -> None:
        """Forget what was committed since the last confirmation, in every tier."""
        ...

    def take_fault(self) -> Exception | None:
        """The last fault since the previous call that counted as a miss and may be the device's."""
        ...

    def close(self) -> None: ...

    @property
    def prefill(self) -> PrefillSpeed:
        """How fast prompts are computed: the engine teaches it, and cuts its chunks by it. The cache
        decides by it whether loading beats computing."""
        ...

    def observe_restore(self, restored: Restored, seconds: float) -> None:
        """Filling a row took this long, not counting the load."""
        ...
