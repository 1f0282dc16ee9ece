"""A simulated machine: the time that its host and its device take for a step, and a clock.

The speculation is the real one; the engine's loop is reduced to a few lines: a plain step stays in
flight while the next is prepared, a step of several tokens is waited for. This shows the gate's
effect on any machine, in tokens per second, without that machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.values import Job, Namespace, Prompt, RequestId, Sampling
from firn.models.decode.batch import Group, Row, TakenTokens
from firn.models.decode.sampling import Picks
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.decode.steps import PlainInFlight
from firn.models.decode.verify import Verification
from firn.models.speculation.drafters import NO_DRAFT, Draft
from firn.models.speculation.odds import ExpectedTokens
from firn.models.speculation.speculator import Speculation
from firn.models.speculation.step_clock import StepClock
from firn.models.speculation.step_times import StepShape, StepTimes

N_FIRST = 5
NO_PICKS = Picks(mx.array([0]), None, None, None)


@dataclass(frozen=True)
class Machine:
    """host_s: time to prepare a step, while the device may be busy with the previous one. wide: the
    device's time for a step of several tokens, by its width, in units of a plain step."""

    host_s: float
    device_s: float
    wide: dict[int, float]
    profile: StepProfile = PLAIN_PROFILE
    lookup_s: float = 0.0
    """The host's time to look for drafts, per row and step."""
    noise: float = 0.0
    """One step in ten takes `1 + noise` times as long."""
    goes_ahead: bool = False
    """Whether steps with drafts are dispatched before the previous step is read."""
    first_s: float = 0.0
    """Extra time of each of the first steps of a width: they are built, and nothing goes ahead."""
    slowness: Callable[[float], float] = lambda now: 1.0
    """The factor by which everything is slowed down, as a function of time."""
    draft_s: float = 0.0
    """Time per drafted token, for all rows together. 0: drafts are free."""
    look_s: float = 0.0
    """The host's time for a free drafter to draft for a row, which the speculation can avoid."""
    decide_s: float = 0.0
    """The host's time to weigh drafts that are not free, per row."""

    def device(self, width: int, rng: random.Random) -> float:
        price = (
            1.0 if width == 1 else float(np.interp(width, list(self.wide), [*self.wide.values()]))
        )
        slow = 1.0 + self.noise * (rng.random() < 0.1)
        return self.device_s * price * slow


class Oracle:
    """Knows a row's text, and drafts each token right with this probability; none if negative."""

    is_free = True

    def __init__(self, right: Callable[[int], float], rng: random.Random) -> None:
        self._right = right
        self._rng = rng
        self._n: dict[Hashable, int] = {}

    def odds(self, kind: int) -> float:
        return 0.5

    def open(self, row: Hashable, job: Job) -> None:
        self._n[row] = 0

    def prepare(self, row: Hashable) -> bool:
        return True

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        self._n[row] += len(tokens)

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        drafts = []
        for row in rows:
            n = self._n[row]
            right, draw = self._right(n), self._rng.random
            tokens = [token if draw() < right else 0 for token in truth(n, n_most)]
            drafts.append(Draft(tuple(tokens), (0,) * n_most) if right >= 0 else NO_DRAFT)
        return drafts

    def close(self, row: Hashable) -> None:
        del self._n[row]

    def end(self) -> None:
        self._n.clear()


class SlowOracle(Oracle):
    """The host takes a while to look for its drafts."""

    def __init__(
        self, right: Callable[[int], float], rng: random.Random, simulation: Simulation
    ) -> None:
        super().__init__(right, rng)
        self._simulation = simulation

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        self._simulation.take(self._simulation.machine.look_s * len(rows))
        return super().draft(rows, n_most)


class CostlyOracle(Oracle):
    """Its drafts take the machine a while."""

    is_free = False

    def __init__(
        self, right: Callable[[int], float], rng: random.Random, simulation: Simulation
    ) -> None:
        super().__init__(right, rng)
        self._simulation = simulation

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        self._simulation.take(self._simulation.machine.draft_s * n_most)
        return super().draft(rows, n_most)


class SlowDecisions(Speculation):
    """The host takes a while to weigh drafts that are not free."""

    simulation: Simulation

    def _expected(self, row: Row, n_pending: int) -> tuple[ExpectedTokens, ExpectedTokens]:
        if self._costly is not None:
            self.simulation.take(self.simulation.machine.decide_s)
        return super()._expected(row, n_pending)


class PriorPrices(StepTimes):
    """Believes of wide steps what the device's profile says."""

    def observe_wide(
        self, n_rows: int, shape: StepShape, seconds: float, *, is_new: bool = False
    ) -> float:
        return max(seconds / self.plain_s(n_rows), 1.0) if self.plain_s(n_rows) else 1.0

    def is_measured(self, n_rows: int, width: int, *, is_asked: bool = False) -> bool:
        return True


TEXT = (*range(1, 1001), *range(1, 1001))


def truth(at: int, n: int) -> tuple[int, ...]:
    """The next `n` tokens of a row's text."""
    return TEXT[at % 1000 : at % 1000 + n]


class Ahead(Verification):
    """Dispatched before the previous step was read. Its drafts begin where that step's do."""


@dataclass
class Simulation:
    machine: Machine
    n_rows: int
    rng: random.Random
    speculation: Speculation | None = None
    now: float = 0.0
    _free_at: float = 0.0
    _done_at: dict[int, float] = field(default_factory=dict)
    _n_steps: Counter[int] = field(default_factory=Counter)
    _n_taken: dict[Row, int] = field(default_factory=dict)
    """Tokens that each row took in the newest step that was read."""

    def run(self, n_tokens: int) -> float:
        """Seconds until every row has `n_tokens` tokens."""
        rows = [Row([], 100, limit=1 << 30, pending=[TEXT[0]]) for _ in range(self.n_rows)]
        group = Group(rows, [], mx.array([0]))
        for row in rows:
            row.group = group
            if self.speculation is not None:
                self.speculation.open(row, a_job())
        said = dict.fromkeys(rows, 0)
        began = self.now
        while min(said.values()) < n_tokens:
            self._step(group, said)
        for row in rows:
            if self.speculation is not None:
                self.speculation.close(row)
        return self.now - began

    def take(self, seconds: float) -> None:
        """Keep the host busy for `seconds`, or longer if the machine is slow now."""
        self.now += seconds * self.machine.slowness(self.now)

    def _step(self, group: Group, said: dict[Row, int]) -> None:
        step = self._next(group, said)
        slowness = self.machine.slowness(self.now)
        self._n_steps[step.width] += 1
        slow_at_first = self.machine.first_s > 0.0 or self.machine.goes_ahead
        step.is_new = slow_at_first and self._is_new(step.width)
        first_s = self.machine.first_s if step.is_new else 0.0
        self.now += (self.machine.host_s + first_s) * slowness
        begun = max(self.now, self._free_at)
        took_s = self.machine.device(step.width, self.rng) * slowness
        self._free_at = self._done_at[id(step)] = begun + took_s
        group.unread.append(step)
        goes_ahead = self.machine.goes_ahead and not self._is_new(step.width)
        waits = isinstance(step, Verification) and not goes_ahead
        while len(group.unread) > (0 if waits else 1):
            self._read(group, group.unread[0], said)
            del self._done_at[id(group.unread.pop(0))]

    def _is_new(self, width: int) -> bool:
        return width > 1 and self._n_steps[width] <= N_FIRST

    def _next(self, group: Group, said: dict[Row, int]) -> PlainInFlight | Verification:
        seats, drafts = tuple(group.seats), None
        if self.speculation is not None:
            self.now += self.machine.lookup_s * len(group.rows)
            last = group.unread[-1] if group.unread else None
            if isinstance(last, Verification):
                ahead = self.speculation.propose_ahead(group, last.width)
                if ahead is not None and self._n_steps[ahead.width] >= N_FIRST:
                    return Ahead(group, seats, ahead.texts, None, NO_PICKS, (), ahead.width)  # type: ignore[arg-type]
                self._read(group, last, said)
            drafts = self.speculation.propose(group, lambda: self._read_all(group, said))
        if drafts is None:
            step_in_flight = any(not s.is_counted for s in group.unread)
            return PlainInFlight(seats, NO_PICKS, step_in_flight)
        width = self.machine.profile.shape(1 + max(map(len, drafts)))
        return Verification(group, seats, tuple(drafts), None, NO_PICKS, (), width)  # type: ignore[arg-type]

    def _read_all(self, group: Group, said: dict[Row, int]) -> None:
        for step in group.unread:
            self._read(group, step, said)

    def _read(self, group: Group, step: Any, said: dict[Row, int]) -> None:
        self.now = max(self.now, self._done_at[id(step)])
        if step.is_counted:
            return
        step.is_counted = True
        taken = []
        drafts = step.drafts if isinstance(step, Verification) else [()] * len(step.rows)
        for row, text in zip(step.rows, drafts, strict=True):
            n, draft = said[row], text
            if isinstance(step, Ahead):
                draft = text[self._n_taken[row] :][: step.width - 1]
            tokens, right = truth(n, len(draft) + 1), 0
            while right < len(draft) and draft[right] == tokens[right]:
                right += 1
            tokens = tokens[: right + 1]
            self._n_taken[row] = len(tokens)
            said[row] += len(tokens)
            row.n_tokens += len(tokens)
            row.pending = [tokens[-1]]
            taken.append(TakenTokens(row, tokens, (None,) * len(tokens), len(draft), right))
        if self.speculation is not None:
            self.speculation.observe(group, taken, step)


def a_job() -> Job:
    return Job(
        id=RequestId("1"),
        prompt=Prompt(np.arange(8)),
        max_tokens=1 << 20,
        sampling=Sampling(temperature=0.0),
        namespace=Namespace(""),
    )


def gain(
    machine: Machine,
    n_rows: int,
    right: float | Callable[[int], float],
    *,
    n_tokens: int = 300,
    n_replies: int = 1,
    n_before: int = 0,
    seed: int = 0,
    learns: bool = True,
) -> float:
    """Tokens per second relative to no speculation. The first `n_before` replies do not count. learns:
    what steps cost, beyond the device's prior."""
    rng = random.Random(seed)
    chance = right if callable(right) else lambda n: right
    simulation = Simulation(machine, n_rows, rng)
    kind = CostlyOracle if machine.draft_s else SlowOracle
    oracle = kind(chance, rng, simulation)
    simulation.speculation = speculation = SlowDecisions(
        oracle, profile=machine.profile, clock=lambda: simulation.now
    )
    speculation.simulation = simulation
    if not learns:
        speculation.times = times = PriorPrices(machine.profile)
        clock, allowance = lambda: simulation.now, speculation.allowance
        speculation.step_clock = StepClock(times, allowance, clock)
    for _ in range(n_before):
        simulation.run(n_tokens)
    with_it = sum(simulation.run(n_tokens) for _ in range(n_replies))
    plain = Simulation(machine, 1, random.Random(seed))  # rows without drafts keep the same pace
    without = sum(plain.run(n_tokens) for _ in range(n_replies))
    return without / with_it
