"""The gate's gains and losses on simulated machines: good drafts pay, others cost nothing."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from firn.backends import named
from firn.models.decode.step_profile import PLAIN_PROFILE
from firn.models.speculation.speculator import MAX_DRAFT
from tests.models.speculation.simulated import Machine, gain

CPU, CUDA = PLAIN_PROFILE, named("cuda").profile.steps

MACHINES: dict[str, tuple[int, Machine]] = {
    # Launches take up the step: preparing one while the device computes another gains nothing.
    "H200, 1 row": (1, Machine(0.0005, 0.0065, {16: 1.5, 32: 1.6}, CUDA, 2e-5)),
    "H200, 8 rows": (8, Machine(0.0005, 0.0165, {16: 1.1, 32: 1.5}, CUDA, 2e-5)),
    # A GPU of the same kind with a fast host: a step waits for the device.
    "fast host, 1 row": (1, Machine(0.002, 0.0064, {16: 1.2, 32: 1.4}, CUDA, 2e-5)),
    # Steps go ahead: the host builds the next one while the device computes.
    "ahead, 1 row": (
        1,
        Machine(0.0042, 0.0043, {4: 1.1, 8: 1.15, 16: 1.4, 32: 2}, CUDA, 2e-5, goes_ahead=True),
    ),
    "ahead, 8 rows": (
        8,
        Machine(0.0048, 0.005, {4: 1.15, 8: 1.5, 16: 2, 32: 2.6}, CUDA, 2e-5, goes_ahead=True),
    ),
    "CPU, 1 row": (1, Machine(0.0005, 0.03, {2: 1.1, 9: 1.7, 17: 2.6}, CPU, 4e-5)),
    "CPU, 4 rows": (4, Machine(0.0008, 0.05, {2: 1.6, 9: 6.0, 17: 11.0}, CPU, 4e-5)),
    "CPU, 8 rows": (8, Machine(0.001, 0.08, {2: 1.8, 9: 9.0, 17: 17.0}, CPU, 4e-5)),
    "Metal, 4 bits, 1 row": (
        1,
        Machine(
            0.001, 0.012, {2: 1.2, 5: 1.6, 9: 2.4, 17: 4.0}, named("metal").profile.steps, 4e-5
        ),
    ),
}
every_machine = pytest.mark.parametrize("name", MACHINES)


@every_machine
@pytest.mark.parametrize("right", [0.0, 0.05, 0.15])
def test_text_that_cannot_be_predicted_costs_nothing(name: str, right: float) -> None:
    """The first 300 tokens of a server included: at most 2%, and a little more with bad luck."""
    n_rows, machine = MACHINES[name]
    gains = [gain(machine, n_rows, right, seed=seed) for seed in range(5)]
    assert statistics.median(gains) > 0.98
    assert min(gains) > 0.96


@every_machine
def test_drafts_that_are_good_for_a_while_cost_nothing_afterwards(name: str) -> None:
    """Right for 40 tokens, then never again: at most 2% is lost in all."""
    n_rows, machine = MACHINES[name]
    assert gain(machine, n_rows, lambda n: 0.95 if n < 40 else 0.0) > 0.98


@every_machine
def test_unpredictable_text_costs_nothing_on_a_busy_machine(name: str) -> None:
    n_rows, machine = MACHINES[name]
    noisy = dataclasses.replace(machine, noise=6.0)
    assert gain(noisy, n_rows, 0.1, n_tokens=1500) > 0.97


def attainable(machine: Machine, right: float) -> float:
    """The gain of the best width if everything is known from the start."""
    gains = [1.0]
    for width in machine.profile.widths[1:]:
        tokens = sum(right**i for i in range(width))
        step_s = machine.device(machine.profile.shape(width), random.Random(0))
        goes_ahead = machine.goes_ahead and 2 * width - 1 <= MAX_DRAFT  # else its text is too short
        step_s = max(step_s, machine.host_s) if goes_ahead else step_s + machine.host_s
        gains.append(tokens * max(machine.host_s, machine.device_s) / step_s)
    return max(gains)


@every_machine
@pytest.mark.parametrize("right", [0.5, 0.8, 0.95, 1.0])
def test_most_of_what_there_is_to_gain_is_gained(name: str, right: float) -> None:
    """The first 300 tokens of a server, and then 1,200 more."""
    n_rows, machine = MACHINES[name]
    best = attainable(machine, right)
    assert gain(machine, n_rows, right) > max(0.6 * best, 0.98)
    assert gain(machine, n_rows, right, n_before=1, n_replies=4) > max(0.7 * best, 0.98)


@pytest.mark.parametrize(
    ("name", "right", "goal"),
    [
        ("H200, 8 rows", 0.5, 1.5),
        ("H200, 8 rows", 0.8, 2.5),
        ("H200, 8 rows", 1.0, 5.0),
        ("H200, 1 row", 1.0, 5.0),
        ("CPU, 1 row", 0.95, 2.0),
    ],
)
def test_good_drafts_reach_the_speed_they_should(name: str, right: float, goal: float) -> None:
    n_rows, machine = MACHINES[name]
    assert gain(machine, n_rows, right, n_before=1) > goal


@pytest.mark.parametrize(("right", "goal"), [(0.5, 1.3), (0.8, 2.5)])
def test_slow_steps_now_and_then_shut_no_drafts_out(right: float, goal: float) -> None:
    """Every tenth step takes four times as long, plain or wide: that says nothing about drafts."""
    machine = Machine(0.0005, 0.0065, {8: 1.3, 16: 1.3, 32: 1.4}, CUDA, 2e-5, noise=3.0)
    gains = [gain(machine, 1, right, n_before=1, n_replies=3, seed=s) for s in range(7)]
    assert statistics.median(gains) > goal
    assert min(gains) > 0.95


@pytest.mark.parametrize("right", [0.5, 0.8])
def test_widths_whose_first_steps_are_slow_are_found(right: float) -> None:
    """They are built and traced, and read one by one: while a wider, fast one is in use, they would
    look expensive forever."""
    n_rows, machine = MACHINES["ahead, 8 rows"]
    slow = dataclasses.replace(machine, first_s=0.008)
    for seed in range(3):
        of_first = gain(machine, n_rows, right, n_before=1, n_replies=3, seed=seed)
        assert gain(slow, n_rows, right, n_before=4, n_replies=3, seed=seed) > 0.9 * of_first


@pytest.mark.parametrize("n_rows", [1, 4])
def test_plain_steps_of_a_slow_moment_make_no_drafts_look_good(n_rows: int) -> None:
    """The first steps of a reply are slow, while its prompt is stored: 1.8 tokens for 1.85 plain
    steps would look like a gain of 40% for the rest of it."""
    machine = Machine(0.0005, 0.005, {2: 1.4, 17: 6.0}, CPU, draft_s=0.00225)
    slow = dataclasses.replace(machine, slowness=lambda now: 1.6 if now % 2.0 < 0.2 else 1.0)
    gains = [gain(slow, n_rows, 0.8, n_replies=4, seed=seed) for seed in range(5)]
    assert statistics.median(gains) > 0.98
    assert min(gains) > 0.96


@pytest.mark.parametrize("decide_s", [1e-5, 1e-4, 1e-3])
def test_a_drafter_that_is_never_right_costs_little_however_long_it_takes_to_decide(
    decide_s: float,
) -> None:
    machine = Machine(0.0005, 0.005, {2: 1.4, 17: 6.0}, CPU, draft_s=0.001, decide_s=decide_s)
    host_bound = dataclasses.replace(machine, host_s=0.005, device_s=0.0005)
    for each in (machine, host_bound):
        assert gain(each, 4, 0.0, n_tokens=1000) > 0.97


@pytest.mark.parametrize("look_s", [1e-5, 1e-4, 1e-3])
def test_looking_in_vain_for_long_shuts_no_drafts_out(look_s: float) -> None:
    """However long it takes, and nothing is known of any width yet when drafts begin to be right."""
    machine = Machine(0.0005, 0.005, {2: 1.1, 17: 2.0}, CPU, look_s=look_s)
    assert gain(machine, 4, -1.0, n_tokens=1000) > 0.98
    assert gain(machine, 4, lambda n: 0.95 if n > 1000 else -1.0, n_tokens=4000) > 1.5


@pytest.mark.parametrize(("right", "goal"), [(0.5, 1.4), (0.8, 2.2)])
def test_a_host_whose_speed_changes_shuts_no_drafts_out(right: float, goal: float) -> None:
    """Everything takes up to twice as long, by a factor that changes every twenty steps or so."""
    n_rows, machine = MACHINES["ahead, 8 rows"]
    gains = []
    for seed in range(7):
        rng = random.Random(seed)
        slow = [1.0 + rng.random() for _ in range(100)]
        noisy = dataclasses.replace(machine, slowness=lambda now, s=slow: s[int(now / 0.1) % 100])  # type: ignore[misc]
        gains.append(gain(noisy, n_rows, right, n_before=1, n_replies=4, seed=seed))
    assert statistics.median(gains) > goal
    assert min(gains) > 0.85 * goal


@pytest.mark.parametrize("seed", range(12))
def test_no_machine_and_no_text_lose_more_than_two_percent(seed: int) -> None:
    """Whatever steps cost, and however long drafts are right and wrong in turn."""
    rng = random.Random(seed)
    dear = rng.choice([0.02, 0.1, 0.5, 1.0])
    machine = Machine(
        host_s=rng.uniform(0.0002, 0.004),
        device_s=rng.uniform(0.002, 0.05),
        wide={w: 1.0 + rng.random() * 0.3 + dear * (w - 1) for w in (2, 4, 8, 16, 32)},
        profile=rng.choice([CPU, CUDA]),
        noise=rng.choice([0.0, 3.0]),
        goes_ahead=rng.random() < 0.3,
    )
    period, best = rng.randrange(5, 80), rng.random()

    def right(n: int) -> float:
        return best if n // period % 2 else 0.0

    assert gain(machine, rng.choice([1, 4, 8]), right, n_tokens=1500, seed=seed) > 0.98


def test_what_steps_cost_is_worth_learning() -> None:
    """On machines that are unlike their profile: flatter or steeper, by a factor of ten or more."""
    learned, believed = [], []
    for seed in range(12):
        rng = random.Random(seed)
        flat, dear = rng.choice([0.0, 0.3, 0.8]), rng.choice([0.0, 0.02, 0.1, 0.5])
        wide = {w: 1.0 + flat + dear * (w - 1) for w in (2, 4, 8, 16, 32)}
        profile = CUDA if dear > 0.05 else CPU
        machine, n_rows = (
            Machine(0.001, rng.uniform(0.005, 0.05), wide, profile),
            rng.choice([4, 8]),
        )
        for gains, learns in ((learned, True), (believed, False)):
            gains.append(
                gain(machine, n_rows, 0.8, n_before=1, n_replies=3, seed=seed, learns=learns)
            )
    assert statistics.mean(learned) > 1.1 * statistics.mean(believed)
    assert min(learned) > 0.95
