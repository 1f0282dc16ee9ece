"""The prefix cache as the engine thread drives it.

No method raises, and none changes an answer: a fault inside is a counted miss. A cursor is a
handle: the cache makes it, the engine passes it back. Each cache has cursors of its own class, so
the ports are generic in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol, TypeVar

from firn.core.events import Admitted
from firn.core.ports.runner import LiveRow, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.values import CacheControl, Namespace, Prompt


class Cursor(Protocol):
    """One request's position in the tree of known prefixes."""

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

    def commit_due(self, n_tokens: int) -> bool:
        """Whether to commit once the row holds this many tokens."""
        ...


C = TypeVar("C", bound=Cursor)


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


class PrefixCache(Protocol[C]):
    """The cache as the engine drives it: for each request, in the loop, and with its measurements."""

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> C:
        """Find which part of the prompt is stored and start to load it. No I/O on this thread."""
        ...

    def restore(self, cursor: C) -> Restored | None:
        """What can be copied into a new row right now; None: nothing."""
        ...

    def advance(self, cursor: C, n_tokens: int) -> Restored | None:
        """A longer prefix than these tokens, if another request or a load has brought one."""
        ...

    def filled(self, cursor: C, row: LiveRow) -> None:
        """A row was made of what was restored or advanced to last."""
        ...

    def not_filled(self, cursor: C, error: Exception) -> None:
        """No row could be made of it. This ends the cursor."""
        ...

    def stops(self, cursor: C) -> Sequence[int]:
        """Ascending positions where a prefill chunk should end so that state can be kept there."""
        ...

    def commit(self, cursor: C, row: LiveRow) -> None:
        """Store what the row has finished since the last commit."""
        ...

    def fork(self, cursor: C, reply: Sequence[int]) -> C:
        """A choice's own cursor from here on. reply: its token list, which will grow."""
        ...

    def close_cursor(self, cursor: C, row: LiveRow | None) -> None:
        """End the request: store its tail if a row is given, release its leases. Idempotent."""
        ...

    def blank(self) -> C:
        """A cursor that neither reads nor writes."""
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

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        """Filling a row took this long, not counting the load."""
        ...
