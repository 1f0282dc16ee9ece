"""How many tokens are tried: what pays on this machine, whatever machine it is."""

from __future__ import annotations

import random

import pytest

from firn.models import gate
from firn.models.gate import MIN_GAIN, WIDTHS, Hope, Odds, StepTimes


def measured(cost: dict[int, float], *, n_rows: int = 1, n: int = 30) -> StepTimes:
    """A machine on which a step of this width takes so long."""
    times = StepTimes()
    for _ in range(n):
        for width, seconds in cost.items():
            times.saw(n_rows, width, seconds)
    return times


def best_width(times: StepTimes, hopes: list[Hope], *, n_seats: int) -> int:
    return gate.best_width(times, hopes, n_seats=n_seats).width


FLAT = {w: 1.0 + 0.01 * (w - 1) for w in WIDTHS}
STEEP = {w: float(w) for w in WIDTHS}


def test_without_guesses_there_is_nothing_to_try() -> None:
    assert best_width(measured(FLAT), [Hope()], n_seats=1) == 1


def test_sure_guesses_are_tried_where_width_is_cheap_and_not_where_it_is_dear() -> None:
    hope = Hope.of([0.95] * 16)
    assert best_width(measured(FLAT), [hope], n_seats=1) == 17
    assert best_width(measured(STEEP, n=60), [hope], n_seats=1) == 1


def test_the_length_goes_by_how_long_guesses_hold() -> None:
    times = measured({w: 1.0 + 0.1 * (w - 1) for w in WIDTHS})
    widths = [
        best_width(times, [Hope.of([p] * 16)], n_seats=1) for p in (0.05, 0.3, 0.6, 0.9, 0.99)
    ]
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert 1 < widths[2] < widths[4]


def test_rows_that_guess_nothing_pay_for_those_that_do() -> None:
    times = measured({w: 1.0 + 0.3 * (w - 1) for w in WIDTHS}, n_rows=4)
    keen, idle = Hope.of([0.9] * 16), Hope()
    assert best_width(times, [keen, idle, idle, idle], n_seats=4) == 1
    assert best_width(times, [keen] * 4, n_seats=4) > 1


def test_what_must_be_fed_again_leaves_less_to_guess() -> None:
    hope = Hope.of([0.9] * 16, n_pending=5)
    assert hope.tokens(5) == 1.0
    assert hope.tokens(7) == pytest.approx(1 + 0.9 + 0.81)
    assert best_width(measured(FLAT), [hope], n_seats=1) in (9, 17)
    assert best_width(measured(FLAT), [Hope.of([0.9] * 16, n_pending=17)], n_seats=1) == 1


def test_times_lie_between_those_that_were_measured() -> None:
    times = measured({1: 1.0, 5: 2.0, 9: 6.0})
    assert times.of(1, 5) == pytest.approx(2.0, rel=0.05)
    assert times.of(1, 3) == pytest.approx(1.5, rel=0.05)
    assert times.of(1, 9) < times.of(1, 17)
    assert times.of(3, 5) > times.of(3, 1), "of other numbers of rows nothing is known yet"


def test_times_follow_a_machine_that_becomes_slower() -> None:
    times = measured({1: 1.0, 9: 2.0})
    for _ in range(50):
        times.saw(1, 1, 3.0)
    assert times.of(1, 1) == pytest.approx(3.0, rel=0.1)
    assert times.of(1, 9) > 4.0, "as does what was not measured anew"


def test_slow_steps_do_not_rule_out_drafts_for_ever() -> None:
    times = measured({1: 1.0, 9: 1.5})
    hope = Hope.of([0.9] * 16)
    times.saw(1, 9, 30.0)
    assert best_width(times, [hope], n_seats=1) > 1, "one is no proof"
    for _ in range(40):
        times.saw(1, 9, 30.0)
    assert best_width(times, [hope], n_seats=1) != 9
    for _ in range(2000):
        times.forgive(1)
        times.saw(1, 1, 1.0)
    assert best_width(times, [hope], n_seats=1) > 1


def test_steps_that_compile_their_kernels_say_nothing() -> None:
    """On a GPU the first ones of every width take a hundred times as long."""
    times = StepTimes()
    for _ in range(20):
        times.saw(1, 1, 1.0)
    hope = Hope.of([0.8] * 16)
    for width in WIDTHS[1:]:
        for seconds in (100.0, 40.0, 1.2, 1.2, 30.0, 1.2):
            times.saw(1, width, seconds)
    assert times.of(1, 17) < 1.8
    assert best_width(times, [hope], n_seats=1) >= 9


def test_guesses_that_take_time_must_be_worth_it() -> None:
    times, hope = measured(FLAT), Hope.of([0.7] * 8)

    def best(draft_s: float) -> int:
        found = gate.best_width(times, [hope], n_seats=1, draft_s=lambda w: draft_s * (w - 1))
        return found.width

    assert best(0.0) > best(0.2) > 1
    assert best(2.0) == 1


def test_slow_guesses_are_asked_for_again_after_a_while() -> None:
    times = gate.DraftTimes()
    times.saw(1, 100.0)
    assert times.of(1) == 0.0, "the first is no measure"
    times.saw(1, 1.0)
    times.saw(1, 50.0)
    assert 1.0 < times.of(1) < 1.5
    assert times.of(4) == times.of(1)
    for _ in range(300):
        times.forgive()
    assert times.of(1) < 0.1


def test_odds_are_learnt_and_forgotten() -> None:
    odds = Odds()
    assert odds.of((0, 3), 0.5) == 0.5
    for _ in range(100):
        odds.saw((0, 3), True)
    assert odds.of((0, 3), 0.5) > 0.9
    for _ in range(1000):
        odds.saw((0, 3), False)
    assert odds.of((0, 3), 0.5) < 0.1
    assert odds.of((0, 4), 0.5) == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_on_random_guesses_the_gate_loses_nothing(seed: int) -> None:
    """A drafter that is right one time in twenty, on any machine: all in all at most 2% slower."""
    rng = random.Random(seed)
    slope = rng.choice([0.02, 0.09, 0.3])
    times, odds = StepTimes(), Odds()
    spent = n_tokens = 0.0
    for _ in range(3000):
        guess = [rng.random() < 0.05 for _ in range(16)]
        hope = Hope.of([odds.of((0, 0), 0.5)] * 16)
        width = best_width(times, [hope], n_seats=1)
        if width == 1:
            times.forgive(1)
        seconds = 1.0 + slope * (width - 1)
        times.saw(1, width, seconds)
        spent += seconds
        n_right = next((i for i, right in enumerate(guess[: width - 1]) if not right), width - 1)
        n_tokens += 1 + n_right
        odds.saw((0, 0), guess[0])
    assert n_tokens / spent > 0.98
    assert MIN_GAIN > 1.0
