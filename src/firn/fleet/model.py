"""What the front knows about one model: its state, its process, its traffic, its attempts to load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from firn.core.errors import FirnError
from firn.core.values import Namespace
from firn.fleet.catalogue import ModelSpec
from firn.fleet.memory import Footprint
from firn.fleet.placement import NEVER, ModelState, ModelView
from firn.fleet.process import ModelProcess

BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key's last use of a model. stay_s: how long it wants the model to stay loaded after it."""

    ended_at: float
    stay_s: float

    @property
    def expires_at(self) -> float:
        return self.ended_at + self.stay_s


@dataclass(eq=False, slots=True)
class ModelLease:
    """The right to use a loaded model. Owned by the request's task, which releases it."""

    model: Model
    child: ModelProcess
    _is_open: bool = True

    def release(self, key_id: Namespace | None, *, keep_alive_s: float | None = None) -> None:
        """key_id: whose use this was; None: it was not used."""
        if self._is_open:
            self._is_open = False
            self.model.end_use(key_id, keep_alive_s)


@dataclass(eq=False, slots=True)
class LoadWaiter:
    since: float
    lease: asyncio.Future[ModelLease]


@dataclass(eq=False, slots=True)
class Traffic:
    """Who uses a model, and who waits for it."""

    n_active: int = 0
    waiters: list[LoadWaiter] = field(default_factory=list)
    last_used: float = NEVER
    uses: dict[Namespace, KeyUse] = field(default_factory=dict)
    """By key: the model stays loaded as long as any of them wants."""

    def note_use(self, key_id: Namespace, *, stay_s: float | None, default_s: float) -> None:
        """stay_s: None: as long as this key said last, or the default."""
        before = self.uses.get(key_id)
        if stay_s is None:
            stay_s = before.stay_s if before else default_s
        self.uses[key_id] = KeyUse(time.monotonic(), stay_s)

    def take_waiters(self) -> list[LoadWaiter]:
        """All that still wait; they are answered now."""
        waiters, self.waiters = self.waiters, []
        return [waiter for waiter in waiters if not waiter.lease.done()]


@dataclass(eq=False, slots=True)
class ModelRun:
    """One process of a model, from the decision to load until it has exited."""

    began: float
    child: ModelProcess | None = None
    """None: it is being started."""
    progress: str = ""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has no more replies to send."""
    n_background: int = 0
    """Replies without a connected client."""
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens computed for each caller, as it has reported."""


@dataclass(eq=False, slots=True)
class LoadAttempts:
    """Whether a model can be loaded, as far as that is known, and when to try again."""

    is_proven: bool = False
    """It was loaded, or found sound without its weights, and has not failed since."""
    checker: ModelProcess | None = None
    """The process that finds out."""
    is_checking: bool = False
    n_failures: int = 0
    not_before: float = 0.0
    error: FirnError | None = None

    def back_off(self) -> float:
        """Seconds until the next attempt."""
        self.n_failures += 1
        delay = min(math.ldexp(BACKOFF_S, self.n_failures - 1), MAX_BACKOFF_S)
        self.not_before = time.monotonic() + delay
        return delay


@dataclass(eq=False)
class Model:
    """One model, loaded or not. Owner: the fleet, on the asyncio thread."""

    spec: ModelSpec
    footprint: Footprint
    changed: Callable[[], None]
    state: ModelState = ModelState.UNLOADED
    run: ModelRun | None = None
    """Its process; None: it has none."""
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no process."""
    traffic: Traffic = field(default_factory=Traffic)
    attempts: LoadAttempts = field(default_factory=LoadAttempts)
    turn_ended: bool = False
    """Its turn is over: new requests wait. See placement.py."""
    unloading: bool = False
    """An unload was requested: new requests wait, and it is unloaded after its running replies."""
    wanted_since: float = NEVER
    """When it became due for loading without a request: it is pinned, or its process died."""
    load_s: float = 5.0
    loaded_at: float = NEVER
    displaced_at: float = -NEVER
    hold_share: float = 1.0
    """See placement.py."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What its process reported when it was last loaded, for /v1/models."""
    n_loads: int = 0
    n_unloads: dict[str, int] = field(default_factory=dict)

    @property
    def child(self) -> ModelProcess | None:
        return self.run.child if self.run else None

    @property
    def is_open(self) -> bool:
        """Whether it may be given requests now."""
        return self.shown_state is ModelState.LOADED

    @property
    def shown_state(self) -> ModelState:
        """One that accepts no more requests is shown as about to end."""
        return ModelState.DRAINING if self.turn_ended or self.unloading else self.state

    @property
    def expires_at(self) -> float:
        traffic = self.traffic
        if self.state is not ModelState.LOADED or self.spec.pinned or traffic.n_active:
            return NEVER
        if not traffic.uses:
            return self.loaded_at + self.spec.keep_alive_s
        return max(use.expires_at for use in traffic.uses.values())

    def view(self) -> ModelView:
        traffic, attempts = self.traffic, self.attempts
        oldest = min((w.since for w in traffic.waiters), default=NEVER)
        return ModelView(
            name=self.spec.name,
            state=self.state,
            pinned=self.spec.pinned,
            need_nbytes=self.footprint.nbytes,
            n_active=traffic.n_active + (self.run.n_background if self.run else 0),
            waiting_since=min(oldest, self.wanted_since),
            loaded_at=self.loaded_at,
            last_used=traffic.last_used,
            expires_at=self.expires_at,
            load_s=self.load_s,
            not_before=attempts.not_before,
            displaced_at=self.displaced_at,
            is_proven=attempts.is_proven,
            hold_share=self.hold_share,
        )

    def enter(self) -> ModelLease:
        assert self.child is not None
        self.traffic.n_active += 1
        return ModelLease(self, self.child)

    def end_use(self, key_id: Namespace | None, keep_alive_s: float | None) -> None:
        self.traffic.n_active -= 1
        self.traffic.last_used = time.monotonic()
        if key_id is not None:
            self.note_use(key_id, keep_alive_s)
        self.changed()

    def note_use(self, key_id: Namespace, keep_alive_s: float | None) -> None:
        """keep_alive_s: None: as long as this key said last."""
        self.traffic.note_use(key_id, stay_s=keep_alive_s, default_s=self.spec.keep_alive_s)
        self.changed()
