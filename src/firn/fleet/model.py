"""What the front knows about one model: state, process, leases, waiting requests."""

from __future__ import annotations

import asyncio
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


@dataclass(eq=False)
class Model:
    """One model, loaded or not. Owner: the fleet, on the asyncio thread."""

    spec: ModelSpec
    footprint: Footprint
    changed: Callable[[], None]
    state: ModelState = ModelState.UNLOADED
    child: ModelProcess | None = None
    n_active: int = 0
    n_background: int = 0
    """Replies without a connected client."""
    waiters: list[LoadWaiter] = field(default_factory=list)
    turn_ended: bool = False
    """Its turn is over: new requests wait. See placement.py."""
    unloading: bool = False
    """An unload was requested: new requests wait, and it is unloaded after its running replies."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its process has no more replies to send."""
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens computed for each caller, as reported by its process."""
    unloaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no process."""
    wanted_since: float = NEVER
    """When it became due for loading without a request: it is pinned, or its process died."""
    uses: dict[Namespace, KeyUse] = field(default_factory=dict)
    """By key: it stays loaded as long as any of them wants."""
    load_began: float = 0.0
    load_s: float = 5.0
    loaded_at: float = NEVER
    last_used: float = NEVER
    not_before: float = 0.0
    displaced_at: float = -NEVER
    n_failures: int = 0
    is_proven: bool = False
    """It was loaded, or found sound without its weights, and has not failed since."""
    checker: ModelProcess | None = None
    """The process that finds out."""
    is_checking: bool = False
    hold_share: float = 1.0
    """See placement.py."""
    error: FirnError | None = None
    progress: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What its process reported when it was last loaded, for /v1/models."""
    n_loads: int = 0
    n_unloads: dict[str, int] = field(default_factory=dict)

    @property
    def expires_at(self) -> float:
        if self.state is not ModelState.LOADED or self.spec.pinned or self.n_active:
            return NEVER
        if not self.uses:
            return self.loaded_at + self.spec.keep_alive_s
        return max(use.expires_at for use in self.uses.values())

    def view(self) -> ModelView:
        oldest = min((w.since for w in self.waiters), default=NEVER)
        return ModelView(
            name=self.spec.name,
            state=self.state,
            pinned=self.spec.pinned,
            need_nbytes=self.footprint.nbytes,
            n_active=self.n_active + self.n_background,
            waiting_since=min(oldest, self.wanted_since),
            loaded_at=self.loaded_at,
            last_used=self.last_used,
            expires_at=self.expires_at,
            load_s=self.load_s,
            not_before=self.not_before,
            displaced_at=self.displaced_at,
            is_proven=self.is_proven,
            hold_share=self.hold_share,
        )

    def enter(self) -> ModelLease:
        assert self.child is not None
        self.n_active += 1
        return ModelLease(self, self.child)

    def end_use(self, key_id: Namespace | None, keep_alive_s: float | None) -> None:
        self.n_active -= 1
        self.last_used = time.monotonic()
        if key_id is not None:
            self.note_use(key_id, keep_alive_s)
        self.changed()

    def note_use(self, key_id: Namespace, keep_alive_s: float | None) -> None:
        """keep_alive_s: None: as long as this key said last."""
        before = self.uses.get(key_id)
        stay_s = before.stay_s if before else self.spec.keep_alive_s
        stay_s = stay_s if keep_alive_s is None else keep_alive_s
        self.uses[key_id] = KeyUse(time.monotonic(), stay_s)
        self.changed()
