"""Writes while rows decode: their share of the time depends on how much they slow a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from firn.cache.storage.pace import LEAST_STEPS, LONG_STEPS, MAX_COST, MAX_WAIT_S, WritePace

STEP_S = 0.01


@dataclass
class Machine:
    """Decodes step after step, and writes whenever it may."""

    slowdown: float
    waited_s: float = 0.0
    lag: int = 0
    """Steps for which writing continues after the last record was handed over."""
    stall_every: int = 0
    """One in this many steps with a write takes as long as ten; 0: none does."""
    pace: WritePace = field(default_factory=WritePace)
    now: float = 0.0
    is_writing: bool = False
    n_steps: int = 0
    n_writing: int = 0
    n_left: int = 0

    def run(self, n_steps: int) -> Machine:
        for _ in range(n_steps):
            self.now += STEP_S * (self.slowdown if self.is_writing else 1.0)
            self.n_steps += 1
            self.n_writing += self.is_writing
            if self.stall_every and self.is_writing and self.n_writing % self.stall_every == 0:
                self.now += 9 * STEP_S
            self.pace.tick(self.now, is_writing=self.is_writing)
            may_write = self.pace.may_write(self.waited_s)
            self.n_left = self.lag if may_write else self.n_left - 1
            self.is_writing = may_write or self.n_left >= 0
        return self

    @property
    def cost(self) -> float:
        """By what share decoding has been slowed."""
        return self.now / (self.n_steps * STEP_S) - 1


@pytest.mark.parametrize("slowdown", [1.05, 1.3, 2.0])
def test_decoding_is_hardly_slowed_down(slowdown: float) -> None:
    machine = Machine(slowdown).run(20_000)
    assert 0.7 * MAX_COST < machine.cost < 1.2 * MAX_COST
    assert machine.pace.slowdown == pytest.approx(slowdown)


def test_writes_that_go_on_after_a_spell_are_not_taken_for_steps_alone() -> None:
    machine = Machine(1.3, lag=3 * LEAST_STEPS).run(40_000)
    assert machine.pace.slowdown == pytest.approx(1.3)
    assert machine.cost < 1.2 * MAX_COST


def test_writes_that_hold_up_a_step_now_and_then_are_noticed() -> None:
    machine = Machine(1.0, stall_every=20).run(40_000)  # a median step is not held up
    assert machine.cost < 2 * MAX_COST


def test_writes_that_disturb_nobody_have_most_of_the_time() -> None:
    machine = Machine(1.0).run(4000)
    assert machine.n_writing / machine.n_steps == pytest.approx(
        LONG_STEPS / (LONG_STEPS + LEAST_STEPS), abs=0.05
    )


def test_no_reply_bears_the_cost_of_a_long_spell() -> None:
    machine, n_longest, n = Machine(1.5), 0, 0
    for _ in range(10_000):
        machine.run(1)
        n = n + 1 if machine.is_writing else 0
        n_longest = max(n_longest, n)
    assert n_longest <= LEAST_STEPS + 1


def test_after_a_night_with_nothing_to_write_writing_may_begin() -> None:
    machine = Machine(1.0)
    for _ in range(10_000):
        machine.now += STEP_S
        machine.pace.tick(machine.now, is_writing=False)
    assert machine.pace.may_write(0.0)


def test_what_has_waited_for_long_is_written_more_often() -> None:
    machine = Machine(1.5, waited_s=2 * MAX_WAIT_S).run(20_000)
    assert 0.7 * 4 * MAX_COST < machine.cost < 1.2 * 4 * MAX_COST


def test_a_pause_ends_sooner_for_what_waits_in_it() -> None:
    machine = Machine(2.0)
    while not machine.n_writing:
        machine.run(1)
    while machine.is_writing:
        machine.run(1)
    machine.waited_s = 1000.0
    machine.run(LEAST_STEPS + 1)
    assert machine.is_writing


def test_a_machine_that_changes_is_measured_anew() -> None:
    machine = Machine(2.0).run(5000)
    machine.slowdown = 1.0
    machine.run(20_000)
    before = machine.n_writing
    machine.run(1000)
    assert machine.n_writing - before > 500


def test_what_else_the_engine_does_is_not_taken_for_a_step() -> None:
    machine = Machine(1.0)
    for _ in range(200):
        machine.run(LEAST_STEPS)
        machine.now += 5.0  # a prompt is read
        machine.pace.disturbed()
    assert machine.pace.slowdown == pytest.approx(1.0, abs=0.01)


def test_steps_of_a_spell_that_has_nothing_to_write_do_not_count() -> None:
    machine = Machine(1.5, waited_s=1000.0)
    for _ in range(40):
        while not machine.is_writing:
            machine.run(1)
        machine.is_writing = False  # it has written all there was
        for _ in range(3 * LEAST_STEPS):
            machine.now += STEP_S
            machine.pace.tick(machine.now, is_writing=False)
        machine.is_writing = True
        machine.run(LEAST_STEPS)
    assert machine.pace.slowdown == pytest.approx(1.5)
