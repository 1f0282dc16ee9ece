"""How many drafted tokens are tried: as many as pay on the machine, whatever it is."""

from __future__ import annotations

import pytest

from firn.backends import named
from firn.core.measure import N_SURE
from firn.models.decode.batch import Group, Row, StepInFlight, TakenTokens
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.decode.steps import PlainInFlight
from firn.models.decode.verify import Verification
from firn.models.speculation import gate
from firn.models.speculation.gate import Allowance, Unlimited
from firn.models.speculation.odds import ExpectedTokens, Odds
from firn.models.speculation.step_clock import StepClock
from firn.models.speculation.step_times import N_AGED, StepShape, StepTimes
from tests.models.speculation.simulated import NO_PICKS

CPU, CUDA = PLAIN_PROFILE, named("cuda").profile.steps
WIDTHS = CPU.widths
LONG = 1000
"""Steps after which whatever is not measured any more is forgotten."""


def measured(prices: dict[int, float], *, n_rows: int = 1, profile: StepProfile = CPU) -> StepTimes:
    """Times of a machine on which a step of each width takes as long as `prices` plain ones."""
    times = StepTimes(profile)
    for _ in range(9):
        times.observe_plain(n_rows, 0.5)
        for width, price in prices.items():
            times.observe_wide(n_rows, StepShape(width), 0.5 * price)
    return times


def best_width(
    times: StepTimes,
    rows: list[ExpectedTokens],
    *,
    n_seats: int = 1,
    is_asked: bool = False,
) -> int:
    return gate.best_width(
        times, rows, Unlimited(gate.MOST), n_seats=n_seats, is_asked=is_asked
    ).width


def wide(group: Group, width: int) -> Verification:
    return Verification(group, tuple(group.seats), ((),), None, NO_PICKS, (), width)


FLAT = {w: 1.0 + 0.01 * (w - 1) for w in WIDTHS[1:]}
STEEP = {w: float(w) for w in WIDTHS[1:]}
KEEN = ExpectedTokens.of([0.95] * 16)
WEAK = ExpectedTokens.of([0.01] * 16)


def test_without_drafts_there_is_nothing_to_try() -> None:
    assert best_width(measured(FLAT), [ExpectedTokens()]) == 1


def test_nothing_is_tried_before_plain_steps_are_measured() -> None:
    times = StepTimes(CPU)
    assert best_width(times, [KEEN]) == 1
    for _ in range(N_SURE):
        times.observe_plain(1, 0.5)
    assert best_width(times, [KEEN]) > 1
    assert best_width(times, [KEEN] * 2, n_seats=2) == 1, "of two rows nothing is known"


def test_sure_drafts_are_tried_where_width_is_cheap_and_not_where_it_is_dear() -> None:
    assert best_width(measured(FLAT), [KEEN]) == WIDTHS[-1]
    assert best_width(measured(STEEP), [KEEN]) == 1


def test_drafts_are_as_long_as_they_stay_right() -> None:
    times = measured({w: 1.0 + 0.1 * (w - 1) for w in WIDTHS[1:]})
    widths = [best_width(times, [ExpectedTokens.of([p] * 16)]) for p in (0.05, 0.3, 0.6, 0.9, 0.99)]
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert 1 < widths[2] < widths[4]


def test_what_the_change_to_drafts_and_back_takes_longer_is_the_price_of_drafts() -> None:
    """Single steps with drafts between plain ones, the first of which follow nothing in flight."""
    now, times, allowance = 0.0, StepTimes(CPU), Allowance()
    clock = StepClock(times, allowance, lambda: now)
    row = Row([], 100, limit=1 << 30, pending=[1])
    group = row.group = Group([row], [], NO_PICKS.tokens)
    for i in range(30):
        steps: list[tuple[float, StepInFlight]] = [
            (5.0, PlainInFlight((row,), NO_PICKS, is_pipelined=True)),
            (6.0, wide(group, 2)),
            (8.0, PlainInFlight((row,), NO_PICKS)),
        ]
        for seconds, step in steps[:1] if i < N_SURE else steps:
            now += seconds
            clock.read(group, [TakenTokens(row, (1,), (None,))], step)
    assert times.plain_s(1) == 5.0
    assert times.price(1, 2) == pytest.approx((6.0 + 3.0) / 5.0)
    assert allowance.steps == -gate.CREDIT


def test_rows_without_drafts_pay_for_those_with_some() -> None:
    times = measured({w: 1.0 + 0.3 * (w - 1) for w in WIDTHS[1:]}, n_rows=4)
    idle = ExpectedTokens()
    assert best_width(times, [KEEN, idle, idle, idle], n_seats=4) == 1
    assert best_width(times, [KEEN] * 4, n_seats=4) > 1


def test_tokens_that_must_be_fed_again_leave_less_room_for_drafts() -> None:
    expected = ExpectedTokens.of([0.9] * 16, n_pending=5)
    assert expected.tokens(5) == 1.0
    assert expected.tokens(7) == pytest.approx(1 + 0.9 + 0.81)
    assert best_width(measured(FLAT), [expected]) in WIDTHS[-2:]
    assert best_width(measured(FLAT), [ExpectedTokens.of([0.9] * 16, n_pending=16)]) == 1


def test_the_price_of_a_width_that_was_not_measured_fits_those_that_were() -> None:
    times = measured({5: 2.0, 9: 6.0})
    assert times.price(1, 5) == pytest.approx(2.0)
    assert times.price(1, 3) < 2.0
    assert times.price(1, 17) > 6.0
    assert times.price(3, 5) > times.price(3, 1) == 1.0, "of other numbers of rows nothing is known"
    assert measured({9: 1.1}).price(1, 5) < 1.2 < measured({}).price(1, 5)
    assert times.price(1, 5, is_asked=True) == times.price(1, 5)


def test_steps_that_are_padded_cost_what_they_are_padded_to() -> None:
    times = measured({4: 1.15, 16: 1.2}, profile=CUDA)
    assert [times.price(1, w) for w in (2, 4, 9, 16)] == pytest.approx([1.15, 1.15, 1.2, 1.2])
    assert best_width(times, [ExpectedTokens.of([0.8] * 16)]) == 16


def test_prices_follow_a_machine_that_becomes_slower() -> None:
    times = measured({9: 2.0})
    for _ in range(9):
        times.observe_plain(1, 1.5)
    assert times.price(1, 9) == 1.0, "what is known of wide ones is of another moment: it is tried"
    for _ in range(9):
        times.observe_wide(1, StepShape(9), 4.5)
    assert times.price(1, 9) == pytest.approx(3.0)


def test_single_slow_steps_say_nothing() -> None:
    times = measured({9: 1.5})
    for _ in range(4):
        charged = times.observe_wide(1, StepShape(9), 50.0)
        assert charged == pytest.approx(1.5)
    for _ in range(3):
        times.observe_plain(1, 50.0)
    assert times.plain_s(1) == pytest.approx(0.5)


def test_a_quick_change_to_drafts_and_back_counts_as_no_gain() -> None:
    """It costs something or nothing: a gain would pay for bad drafts."""
    now, times = 0.0, measured(FLAT)
    clock = StepClock(times, Allowance(), lambda: now)
    row = Row([], 100, limit=1 << 30, pending=[1])
    group = row.group = Group([row], [], NO_PICKS.tokens)
    for _ in range(20):
        for seconds, step in ((0.6, wide(group, 2)), (0.1, PlainInFlight((row,), NO_PICKS))):
            now += seconds
            clock.read(group, [], step)
    assert times.price(1, 2) == pytest.approx(1.2)


def test_drafts_that_were_dear_are_tried_again_after_a_while() -> None:
    times = measured(dict.fromkeys(WIDTHS[1:], 30.0))
    assert best_width(times, [KEEN]) == 1
    for _ in range(LONG):
        times.observe_plain(1, 0.5)
    assert best_width(times, [KEEN]) > 1


@pytest.mark.parametrize(("used", "other"), [(16, 32), (16, 4)])
def test_another_width_is_tried_again_beside_one_that_is_cheap(used: int, other: int) -> None:
    """Its measurements are of a bad moment, which goes unnoticed while another one is in use."""
    times = measured({used: 1.2, other: 4.0}, profile=CUDA)
    before = times.price(1, other)
    for _ in range(LONG):
        times.observe_wide(1, StepShape(used), 0.5 * 1.2)
    assert before == pytest.approx(4.0)
    assert times.price(1, other) < 2.0
    for _ in range(N_SURE):
        times.observe_wide(1, StepShape(other), 0.5 * 4.0)
    assert times.price(1, other) == pytest.approx(4.0), "now it is known"


def n_believed(times: StepTimes, gain: float) -> int:
    """The number of wide steps until plain ones are measured again."""
    times.observe_plain(1, 0.5)
    n = 0
    while times.knows(1):
        times.observe_wide(1, StepShape(2), 0.7)
        times.trust(1, gain)
        n += 1
        assert n < LONG
    for _ in range(N_SURE - 1):
        assert best_width(times, [KEEN]) == 1
        times.observe_plain(1, 0.5)
    assert times.knows(1)
    return n


@pytest.mark.parametrize("gain", [1.05, 1.1, 1.5, 3.0, 10.0])
def test_plain_steps_are_measured_again_at_a_cost_of_half_a_percent(gain: float) -> None:
    """Where drafts gain little, all depends on plain steps, and a few may be of a slow moment."""
    n = n_believed(measured({2: 1.4}), gain)
    assert (N_SURE - 1) * (gain - 1.0) <= 0.005 * n * gain
    assert (N_SURE - 1) * (gain - 1.0) > 0.005 * (n - 1) * gain


def test_plain_steps_of_a_slow_moment_are_found_out() -> None:
    """A server that trusted them would draft at a loss for a long time."""
    times = StepTimes(CPU)
    for _ in range(9):
        times.observe_plain(1, 1.0)
    n = 0
    while times.knows(1):
        times.observe_wide(1, StepShape(2), 0.7)
        times.trust(1, 1.4)
        n += 1
        assert n < LONG
    for _ in range(N_SURE - 1):
        times.observe_plain(1, 0.5)
    assert times.plain_s(1) == pytest.approx(0.5)
    assert best_width(times, [WEAK]) == 1


def test_plain_steps_that_took_longer_than_wide_ones_are_not_believed_for_long() -> None:
    """However much drafts gain by them: most of those kept may have been hiccups."""
    times = measured({16: 0.7})
    times.observe_plain(1, 0.5)
    for _ in range(N_AGED):
        assert times.knows(1)
        times.observe_wide(1, StepShape(16), 0.35)
        times.trust(1, 10.0)
    assert not times.knows(1)
    for _ in range(N_SURE - 1):
        times.observe_plain(1, 0.25)
    assert times.price(1, 16) == pytest.approx(1.4)


def test_drafts_that_are_never_right_are_not_tried_because_wide_steps_seem_cheap() -> None:
    """The speed of a busy host changes from second to second."""
    times = measured(dict.fromkeys(WIDTHS[1:], 0.7))
    assert best_width(times, [WEAK]) == 1
    assert best_width(times, [KEEN]) > 1
    assert times.observe_wide(1, StepShape(9), 0.35) == 1.0, "nothing is earned by it"


def test_steps_that_compile_kernels_are_not_measured() -> None:
    """On a GPU the first ones of every width take a hundred times as long."""
    times = StepTimes(CUDA)
    for _ in range(5):
        times.observe_plain(1, 0.01)
    for _ in range(5):
        assert times.observe_wide(1, StepShape(16), 3.0, is_new=True) < 3.0
    assert not times.is_measured(1, 16)
    for _ in range(N_SURE):
        assert times.observe_wide(1, StepShape(16), 0.012) == pytest.approx(1.2)
    for _ in range(9):
        assert times.observe_wide(1, StepShape(16), 3.0, is_new=True) < 2.0, (
            "a block of columns later"
        )
    assert times.price(1, 16) < 1.3


def test_steps_whose_cost_is_not_known_yet_are_charged_what_they_take() -> None:
    """Each of four widths could lose more than drafts may, otherwise; but a single slow one may be a
    hiccup."""
    times = StepTimes(CUDA)
    for _ in range(5):
        times.observe_plain(1, 0.01)
    prior = times.price(1, 16)
    assert times.observe_wide(1, StepShape(16), 0.5) == pytest.approx(2 * prior)
    assert times.observe_wide(1, StepShape(16), 0.5) == pytest.approx(50.0)
    assert times.observe_wide(1, StepShape(4), 0.5, is_new=True) == pytest.approx(
        2 * prior, rel=0.2
    )


def test_plain_steps_of_a_new_shape_are_not_measured() -> None:
    now = 0.0
    times = StepTimes(CUDA)
    clock = StepClock(times, Allowance(), lambda: now)
    row = Row([], 100, limit=1 << 30, pending=[1])
    group = Group([row], [], NO_PICKS.tokens)
    for i in range(30):
        now += 9.0 if i % 2 else 5.0
        clock.read(group, [], PlainInFlight((row,), NO_PICKS, is_pipelined=True, is_new=i % 2 == 1))
    assert times.plain_s(1) == 5.0


def test_drafts_do_not_pay_for_the_beginnings_of_replies() -> None:
    """Nothing is in flight when a reply's first steps are launched, as after drafts."""
    now, allowance = 0.0, Allowance()
    clock = StepClock(StepTimes(CPU), allowance, lambda: now)
    for _ in range(20):
        clock.disturbed()
        row = Row([], 100, limit=1 << 30, pending=[1])
        group = Group([row], [], NO_PICKS.tokens)
        for i in range(6):
            now += 9.0 if i < 2 else 5.0
            clock.read(group, [], PlainInFlight((row,), NO_PICKS, is_pipelined=i > 1))
    assert allowance.steps > Allowance().steps


def test_losses_shut_drafts_out_until_they_are_earned_again() -> None:
    allowance, lost, n_plain = Allowance(), 0.0, 0
    while allowance.is_open:
        allowance.add(-0.25)
        lost += 0.25
    while not allowance.is_open:
        allowance.earn()
        n_plain += 1
    assert n_plain >= 0.25 / 0.005 or lost == gate.CREDIT
    for _ in range(1000):
        allowance.add(5.0)
    allowance.add(-gate.MOST)
    assert not allowance.is_open, "gains of long ago pay for little"


def test_what_may_lose_more_than_is_left_is_not_tried() -> None:
    """Nothing is known of any width but its prior."""
    times = measured({})

    def width(steps: float) -> int:
        return gate.best_width(times, [KEEN], Allowance(steps), n_seats=1).width

    assert width(gate.CREDIT) == WIDTHS[-1]
    assert 1 < width(0.5) < WIDTHS[-1]
    assert width(0.01) == 1
    assert gate.best_width(measured(FLAT), [KEEN], Allowance(0.01), n_seats=1).width > 1


def test_however_much_is_lost_drafts_get_another_chance() -> None:
    allowance = Allowance()
    allowance.add(-1e6)
    n_plain = 0
    while not allowance.is_open:
        allowance.earn()
        n_plain += 1
    assert n_plain <= LONG / 2


def test_drafts_that_take_time_must_be_worth_it() -> None:
    """The time to draft is in the time of the step."""
    expected = ExpectedTokens.of([0.7] * 8)

    def best(draft_s: float) -> int:
        times = measured(FLAT)
        for _ in range(9):
            for width, price in FLAT.items():
                times.observe_wide(1, StepShape(width, True), 0.5 * (price + draft_s * (width - 1)))
        return best_width(times, [expected], is_asked=True)

    assert best(0.0) > best(0.2) > 1
    assert best(2.0) == 1


def test_a_slow_drafter_is_asked_again_after_a_while() -> None:
    times = measured(FLAT)
    for width in WIDTHS[1:]:
        for _ in range(N_SURE):
            times.observe_wide(1, StepShape(width, True), 50.0)
    assert best_width(times, [KEEN], is_asked=True) == 1
    for _ in range(LONG):
        times.observe_plain(1, 0.5)
    assert best_width(times, [KEEN], is_asked=True) > 1


def test_odds_are_learnt_and_forgotten() -> None:
    odds = Odds()
    assert odds.of((0, 3), 0.5) == 0.5
    for _ in range(100):
        odds.observe((0, 3), True)
    assert odds.of((0, 3), 0.5) > 0.9
    for _ in range(1000):
        odds.observe((0, 3), False)
    assert odds.of((0, 3), 0.5) < 0.1
    assert odds.of((0, 4), 0.5) == 0.5


def test_odds_of_a_drafter_that_is_not_asked_are_forgotten() -> None:
    odds = Odds()
    for _ in range(100):
        odds.observe((2, 0), False)
        odds.observe((1, 0), False)
    for _ in range(10):
        odds.age(2)
    assert odds.of((2, 0), 0.7) > 0.6
    assert odds.of((1, 0), 0.7) < 0.1, "another one's stay"
