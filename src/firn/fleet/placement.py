"""Which models to load, unload or close next: a pure function of all models' states.

To make room, idle models that are not pinned are unloaded, least recently used first, after a
minimum stay, and only for a model that has proven that it can be loaded. If requests alternate
between models that do not fit together, an idle model stays a while longer: at most as long as
loading it again would take, so that waiting costs at most twice the optimum, and half as long each
time that this was for nothing. A model that is never idle stays for a turn. Then it is closed: new
requests for it wait, running replies finish, and the other model is loaded. A reply is never cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from firn.fleet.memory import Room

NEVER = math.inf


class ModelState(Enum):
    """As /v1/models shows them."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    """Told to end, but its memory is not free yet."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model's present state. All times are from the same clock; NEVER: there is no such time.

    need_nbytes: its memory while it is loaded. n_active: running replies. waiting_since: when the
    oldest waiting request arrived, or when the model became due for loading without one (it is
    pinned, or its process died). load_s: how long loading took, or may take. not_before: the
    earliest next start after a failure. displaced_at: when it last made room for another model.
    is_proven: whether it can be loaded, as far as that is known without its weights. hold_share: how
    much of a hold is worth trying; it halves with each one in which no request came.
    """

    name: str
    state: ModelState = ModelState.UNLOADED
    pinned: bool = False
    need_nbytes: int = 0
    n_active: int = 0
    waiting_since: float = NEVER
    loaded_at: float = NEVER
    last_used: float = NEVER
    expires_at: float = NEVER
    load_s: float = 5.0
    not_before: float = 0.0
    displaced_at: float = -NEVER
    is_proven: bool = True
    hold_share: float = 1.0

    @property
    def is_idle(self) -> bool:
        return self.n_active == 0 and self.waiting_since == NEVER

    @property
    def holds_memory(self) -> bool:
        return self.state is not ModelState.UNLOADED


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """min_stay_s: the least time that a model stays loaded. A turn lasts `turn_loads` times as long
    as loading takes, within bounds. contest_s: a model that made room and receives a request within
    this time is contested. hold_max_s: how long an idle model may keep a contested place."""

    min_stay_s: float = 2.0
    turn_loads: float = 10.0
    turn_min_s: float = 10.0
    turn_max_s: float = 120.0
    contest_s: float = 60.0
    hold_max_s: float = 15.0

    def turn_s(self, model: ModelView) -> float:
        return min(max(self.turn_loads * model.load_s, self.turn_min_s), self.turn_max_s)


Reason = Literal["idle", "room"]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """check: models to try without their weights, before others are unloaded for them. close: models
    that accept no new requests for now. contested: pairs (waiting, loaded) that take turns.
    held_in_vain: unloaded models that were held for requests that did not come. replan_at: when to
    plan again if nothing happens earlier."""

    check: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    unload: tuple[tuple[str, Reason], ...] = ()
    close: tuple[str, ...] = ()
    contested: tuple[tuple[str, str], ...] = ()
    held_in_vain: tuple[str, ...] = ()
    replan_at: float = NEVER


def make_plan(
    models: Sequence[ModelView], room: Room, rules: PlacementRules, *, now: float
) -> FleetPlan:
    planner = _Planner(models, room, rules, now)
    planner.expire()
    planner.unload_excess()
    for wanted in sorted(_wanted(models), key=lambda v: v.waiting_since):
        if wanted.not_before > now:
            planner.replan(at=wanted.not_before)
        elif not planner.place(wanted):
            break  # first come, first served: no other model may take the room that is being made
    return planner.plan()


def _wanted(models: Sequence[ModelView]) -> list[ModelView]:
    return [v for v in models if v.state is ModelState.UNLOADED and v.waiting_since < NEVER]


class _Planner:
    """Builds one plan."""

    def __init__(
        self, models: Sequence[ModelView], room: Room, rules: PlacementRules, now: float
    ) -> None:
        self._models, self._room, self._rules, self._now = models, room, rules, now
        self._used_nbytes = sum(v.need_nbytes for v in models if v.holds_memory)
        self._free_nbytes = room.free_nbytes
        self._leaving = {v.name for v in models if v.state is ModelState.DRAINING}
        self._check: list[str] = []
        self._load: list[str] = []
        self._unload: list[tuple[str, Reason]] = []
        self._close: list[str] = []
        self._contested: list[tuple[str, str]] = []
        self._held_in_vain: list[str] = []
        self._next_at = NEVER

    def plan(self) -> FleetPlan:
        return FleetPlan(
            tuple(self._check),
            tuple(self._load),
            tuple(self._unload),
            tuple(self._close),
            tuple(self._contested),
            tuple(self._held_in_vain),
            self._next_at,
        )

    def replan(self, *, at: float) -> None:
        """Request another plan at this time or earlier."""
        if at > self._now:
            self._next_at = min(self._next_at, at)

    def expire(self) -> None:
        for v in self._models:
            if v.state is ModelState.LOADED and v.is_idle and not v.pinned:
                if v.expires_at <= self._now:
                    self._unload_model(v, "idle")
                else:
                    self.replan(at=v.expires_at)

    def unload_excess(self) -> None:
        """If models use more memory than expected, unload idle ones until the rest fits."""
        over = self._used_nbytes - self._freed_nbytes() - self._room.budget_nbytes
        for v in self._idle():
            if over <= 0:
                return
            if self._may_unload_at(v, None) <= self._now:
                self._unload_model(v, "room")
                over -= v.need_nbytes

    def place(self, wanted: ModelView) -> bool:
        """Load it, or make room for it. False: room is being made, and what is free now is part of it.

        While nothing can be unloaded yet, models that fit next to the loaded ones need not wait.
        """
        missing_nbytes = wanted.need_nbytes - min(
            self._room.budget_nbytes - self._used_nbytes, self._free_nbytes
        )
        if missing_nbytes <= 0:
            self._load.append(wanted.name)
            self._used_nbytes += wanted.need_nbytes
            self._free_nbytes -= wanted.need_nbytes
            return True
        missing_nbytes -= self._freed_nbytes()
        if missing_nbytes <= 0:
            return False
        if not wanted.is_proven:  # nothing is unloaded for a model that cannot be loaded
            self._check.append(wanted.name)
            return True
        return not self._make_room(wanted, missing_nbytes)

    def _make_room(self, wanted: ModelView, missing_nbytes: float) -> bool:
        """Unload or close others. True: there will be enough memory once they have ended."""
        ready = [v for v in self._idle() if self._may_unload_at(v, wanted) <= self._now]
        chosen = _first_that_free(ready, missing_nbytes)
        if chosen is not None:
            for v in chosen:
                self._unload_model(v, "room")
                if self._is_contested(wanted):
                    self._held_in_vain.append(v.name)
            return True
        # Idle models are not enough: also close those whose turn is over, if that will be enough.
        others = [v for v in self._models if self._is_unloadable(v) and v not in ready]
        over = [v for v in others if self._turn_ends_at(v, wanted) <= self._now]
        over.sort(key=lambda v: v.last_used)
        chosen = _first_that_free([*ready, *over], missing_nbytes)
        if chosen is not None:
            for v in chosen:
                self._note_contest(wanted, v)
                if v.n_active == 0:
                    self._unload_model(v, "room")
                else:
                    self._close.append(v.name)
        for v in others:
            if v.is_idle:
                self.replan(at=self._may_unload_at(v, wanted))
            self.replan(at=self._turn_ends_at(v, wanted))
            if self._is_contested(wanted):
                self._note_contest(wanted, v)
        return chosen is not None

    def _idle(self) -> list[ModelView]:
        idle = [v for v in self._models if self._is_unloadable(v) and v.is_idle]
        return sorted(idle, key=lambda v: v.last_used)

    def _is_unloadable(self, v: ModelView) -> bool:
        return v.state is ModelState.LOADED and not v.pinned and v.name not in self._leaving

    def _may_unload_at(self, v: ModelView, wanted: ModelView | None) -> float:
        """When an idle model may be unloaded."""
        hold_s = 0.0
        if wanted is not None and self._is_contested(wanted):
            hold_s = min(v.load_s, self._rules.hold_max_s) * v.hold_share
        return max(v.loaded_at + self._rules.min_stay_s, v.last_used + hold_s)

    def _is_contested(self, wanted: ModelView) -> bool:
        """Whether it recently made room for another model and has requests again."""
        return wanted.waiting_since - wanted.displaced_at < self._rules.contest_s

    def _turn_ends_at(self, v: ModelView, wanted: ModelView) -> float:
        return max(v.loaded_at, wanted.waiting_since) + self._rules.turn_s(v)

    def _note_contest(self, wanted: ModelView, v: ModelView) -> None:
        if (wanted.name, v.name) not in self._contested:
            self._contested.append((wanted.name, v.name))

    def _unload_model(self, v: ModelView, reason: Reason) -> None:
        self._unload.append((v.name, reason))
        self._leaving.add(v.name)

    def _freed_nbytes(self) -> int:
        """Memory of models that are being unloaded."""
        return sum(v.need_nbytes for v in self._models if v.name in self._leaving)


def _first_that_free(models: Sequence[ModelView], missing_nbytes: float) -> list[ModelView] | None:
    """The first models that together free this much; None: all of them are not enough."""
    chosen: list[ModelView] = []
    for v in models:
        if missing_nbytes <= 0:
            break
        chosen.append(v)
        missing_nbytes -= v.need_nbytes
    return chosen if missing_nbytes <= 0 else None
