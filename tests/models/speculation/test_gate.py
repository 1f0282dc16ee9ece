"""How many drafted tokens are tried: as many as pay on the machine, whatever it is."""

from __future__ import annotations

import pytest

from firn.backends import named
from firn.models.decode.batch import Group, Row
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.decode.steps import PlainInFlight
from firn.models.speculation import gate
from firn.models.speculation.draft_odds import ExpectedTokens, Odds
from firn.models.speculation.gate import Allowance
from firn.models.speculation.step_clock import StepClock
from firn.models.speculation.step_times import (
    CLEAR_GAIN,
    MAX_PREPARING,
    N_DOUBTFUL,
    N_FRESH,
    N_PLAIN,
    N_STALE,
    N_SURE,
    N_UNSEEN,
    StepTimes,
)
from tests.models.speculation.simulated import NO_PICKS

CPU, CUDA = PLAIN_PROFILE, named("cuda").profile.steps
WIDTHS = CPU.widths


def measured(
    prices: dict[int, float], *, n_rows: int = 1, profile: StepProfile = CPU, change: float = 0.0
) -> StepTimes:
    """Times of a machine on which a step of each width takes as long as `prices` plain ones."""
    times = StepTimes(profile)
    for _ in range(9):
        times.saw_plain(n_rows, 0.5)
        times.saw_episode(n_rows, 2, 0.5 * change)
        for width, price in prices.items():
            times.saw_wide(n_rows, width, 0.5 * price)
    return times


def only(times: StepTimes, width: int, price: float) -> None:
    """For a while, all steps are this wide, and gain a lot."""
    times.expect(1, CLEAR_GAIN)
    for _ in range(N_FRESH):
        times.saw_wide(1, width, 0.5 * price)


def best_width(
    times: StepTimes, rows: list[ExpectedTokens], *, n_seats: int = 1, step_in_flight: bool = False
) -> int:
    return gate.best_width(
        times, rows, n_seats=n_seats, widths=WIDTHS, step_in_flight=step_in_flight
    ).width


FLAT = {w: 1.0 + 0.01 * (w - 1) for w in WIDTHS[1:]}
STEEP = {w: float(w) for w in WIDTHS[1:]}
KEEN = ExpectedTokens.of([0.95] * 16)


def test_without_drafts_there_is_nothing_to_try() -> None:
    assert best_width(measured(FLAT), [ExpectedTokens()]) == 1


def test_nothing_is_tried_before_plain_steps_are_measured() -> None:
    times = StepTimes(CPU)
    assert best_width(times, [KEEN]) == 1
    for _ in range(3):
        times.saw_plain(1, 0.5)
    assert best_width(times, [KEEN]) > 1
    assert best_width(times, [KEEN] * 2, n_seats=2) == 1, "of two rows nothing is known"


def test_sure_drafts_are_tried_where_width_is_cheap_and_not_where_it_is_dear() -> None:
    assert best_width(measured(FLAT), [KEEN]) == 17
    assert best_width(measured(STEEP), [KEEN]) == 1


def test_drafts_are_as_long_as_they_stay_right() -> None:
    times = measured({w: 1.0 + 0.1 * (w - 1) for w in WIDTHS[1:]})
    widths = [best_width(times, [ExpectedTokens.of([p] * 16)]) for p in (0.05, 0.3, 0.6, 0.9, 0.99)]
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert 1 < widths[2] < widths[4]


def test_a_step_in_flight_is_given_up_only_for_more_than_that_costs() -> None:
    times, some = (
        measured(dict.fromkeys(WIDTHS[1:], 1.5), change=2.0),
        ExpectedTokens.of([0.5] * 16),
    )
    assert best_width(times, [some], step_in_flight=False) > 1, "2 tokens for 1.5"
    assert best_width(times, [some], step_in_flight=True) == 1, (
        "2 tokens for 1.5, and 1 for the change"
    )
    assert best_width(times, [KEEN], step_in_flight=True) > 1


def test_rows_without_drafts_pay_for_those_with_some() -> None:
    times = measured({w: 1.0 + 0.3 * (w - 1) for w in WIDTHS[1:]}, n_rows=4)
    idle = ExpectedTokens()
    assert best_width(times, [KEEN, idle, idle, idle], n_seats=4) == 1
    assert best_width(times, [KEEN] * 4, n_seats=4) > 1


def test_tokens_that_must_be_fed_again_leave_less_room_for_drafts() -> None:
    expected = ExpectedTokens.of([0.9] * 16, n_pending=5)
    assert expected.tokens(5) == 1.0
    assert expected.tokens(7) == pytest.approx(1 + 0.9 + 0.81)
    assert best_width(measured(FLAT), [expected]) in (9, 17)
    assert best_width(measured(FLAT), [ExpectedTokens.of([0.9] * 16, n_pending=17)]) == 1


def test_prices_lie_between_those_that_were_measured() -> None:
    times = measured({5: 2.0, 9: 6.0})
    assert times.price(1, 5) == pytest.approx(2.0)
    assert times.price(1, 3) == pytest.approx(1.5)
    assert times.price(1, 9) < times.price(1, 17)
    assert times.price(3, 5) > times.price(3, 1) == 1.0, "of other numbers of rows nothing is known"


def test_steps_that_are_padded_cost_what_they_are_padded_to() -> None:
    times = measured({4: 1.15, 16: 1.2}, profile=CUDA)
    assert [times.price(1, w) for w in (2, 4, 9, 16)] == pytest.approx([1.15, 1.15, 1.2, 1.2])
    assert best_width(times, [ExpectedTokens.of([0.6] * 16)]) >= 9


def test_prices_follow_a_machine_that_becomes_slower() -> None:
    times = measured({9: 2.0})
    for _ in range(9):
        times.saw_plain(1, 1.5)
    assert times.price(1, 9) == 1.0, (
        "what is known of wide ones is of another moment: they are tried"
    )
    for _ in range(9):
        times.saw_wide(1, 9, 4.5)
    assert times.price(1, 9) == pytest.approx(3.0)


def test_drafts_that_seemed_dear_in_a_slow_moment_are_tried_once_plain_steps_are_as_slow() -> None:
    times = measured(FLAT)
    for _ in range(9):
        for width in FLAT:
            times.saw_wide(1, width, 0.5 * 30.0)
    assert best_width(times, [KEEN]) == 1
    for _ in range(9):
        times.saw_plain(1, 0.5 * 25.0)
    assert best_width(times, [KEEN]) > 1


def test_a_quick_change_to_drafts_and_back_counts_as_no_gain() -> None:
    """A change to drafts and back costs something or nothing: a gain would pay for bad drafts."""
    times = measured(FLAT)
    for _ in range(9):
        assert times.saw_episode(1, 4, -1.0) == 0.0
    assert times.change(1) == 0.0


def test_single_slow_steps_say_nothing() -> None:
    times = measured({9: 1.5})
    for _ in range(4):
        times.saw_wide(1, 9, 50.0)
    assert times.price(1, 9) == pytest.approx(1.5)
    for _ in range(3):
        times.saw_plain(1, 50.0)
    assert times.plain_s(1) == pytest.approx(0.5)


def test_bad_measurements_are_forgotten_bit_by_bit() -> None:
    times = measured(dict.fromkeys(WIDTHS[1:], 30.0))
    assert best_width(times, [KEEN]) == 1
    for _ in range(9 * N_STALE):
        times.passed_over(1)
    assert best_width(times, [KEEN]) > 1


def test_a_wider_step_is_tried_again_beside_a_narrower_one_that_is_cheap() -> None:
    times = measured({16: 1.2, 32: 4.0}, profile=CUDA)
    only(times, 16, 1.2)
    expected = ExpectedTokens.of([0.98] * 31)

    def width(*, explores: bool) -> int:
        best = gate.best_width(times, [expected], n_seats=1, widths=CUDA.widths, explores=explores)
        return best.width

    assert width(explores=False) == 16
    assert width(explores=True) == 32


def test_a_narrower_step_is_tried_again_beside_a_wider_one_that_is_cheap() -> None:
    """Its measurements are of a bad moment, which goes unnoticed while a wider one is in use."""
    times = measured({4: 3.0, 8: 1.05}, profile=CUDA)
    only(times, 8, 1.05)
    expected = ExpectedTokens.of([0.3] * 15)

    def width(*, explores: bool) -> int:
        best = gate.best_width(times, [expected], n_seats=1, widths=CUDA.widths, explores=explores)
        return best.width

    assert width(explores=False) == 8
    assert width(explores=True) == 4
    for _ in range(N_SURE):
        times.saw_wide(1, 4, 0.5 * 3.0)
    assert width(explores=True) == 8, "now it is known"


def test_a_width_that_was_dear_long_ago_is_believed_after_a_few_new_steps() -> None:
    """The first of them waits for the previous step; others are dispatched before that is read."""
    times = measured({4: 3.0, 16: 1.05}, profile=CUDA)
    only(times, 16, 1.05)
    for price in (2.5, 1.0, 1.0):
        times.saw_wide(1, 4, 0.5 * price)
    assert times.price(1, 4) == pytest.approx(1.0)
    times = measured({4: 3.0, 16: 1.05}, profile=CUDA)
    for price in (2.5, 1.0, 1.0):
        times.saw_wide(1, 4, 0.5 * price)
    assert times.price(1, 4) == pytest.approx(3.0), "what was dear just now may be so"


def test_plain_steps_are_measured_again_now_and_then() -> None:
    times = measured(FLAT)
    times.saw_plain(1, 0.5)
    times.expect(1, CLEAR_GAIN)
    for _ in range(N_UNSEEN):
        assert times.knows(1)
        times.saw_wide(1, 9, 0.6)
    for _ in range(N_PLAIN):
        assert best_width(times, [KEEN]) == 1
        times.saw_plain(1, 0.5)
    assert best_width(times, [KEEN]) > 1


def n_believed(times: StepTimes) -> int:
    """The number of wide steps until plain ones are measured again."""
    n = 0
    while times.knows(1):
        times.saw_wide(1, 2, 0.7)
        n += 1
    return n


def test_plain_steps_are_believed_for_longer_each_time_they_turn_out_as_believed() -> None:
    """Where drafts gain little, all depends on plain steps, and a few may be of a slow moment."""
    times = measured({2: 1.4})
    times.saw_plain(1, 0.5)
    times.expect(1, 1.1)
    for n in (N_DOUBTFUL, 2 * N_DOUBTFUL, 4 * N_DOUBTFUL):
        assert n_believed(times) == n
        for _ in range(N_PLAIN):
            times.saw_plain(1, 0.45)
    for _ in range(20):
        n_believed(times)
        for _ in range(N_PLAIN):
            times.saw_plain(1, 0.45)
    assert n_believed(times) == N_UNSEEN
    for _ in range(N_PLAIN):
        times.saw_plain(1, 0.3)
    assert times.plain_s(1) == pytest.approx(0.3), "those from before count as one"
    assert n_believed(times) == N_DOUBTFUL


def test_plain_steps_that_seem_dearer_than_wide_ones_are_measured_again_soon() -> None:
    """The first few were slow: a server that trusted them would draft at a loss for a long time."""
    times = StepTimes(CPU)
    for _ in range(N_PLAIN):
        times.saw_plain(1, 2.0)
    weak = ExpectedTokens.of([0.01] * 16)
    for _ in range(N_DOUBTFUL + 1):  # the first alone is not trusted
        times.saw_wide(1, 2, 0.7)
    assert best_width(times, [weak]) == 1
    for _ in range(N_PLAIN + 1):
        times.saw_plain(1, 0.5)
    for _ in range(5):
        times.saw_wide(1, 2, 0.7)
    assert times.price(1, 2) == pytest.approx(1.4)
    assert best_width(times, [weak]) == 1


def test_drafts_that_are_never_right_are_not_tried_because_wide_steps_seem_cheap() -> None:
    """The speed of a busy host changes from second to second."""
    times = measured(dict.fromkeys(WIDTHS[1:], 0.7))
    assert best_width(times, [ExpectedTokens.of([0.01] * 16)]) == 1
    assert best_width(times, [KEEN]) > 1
    assert times.saw_wide(1, 9, 0.35) == 1.0, "nothing is earned by it"
    assert [times.lowest_price(1, w) for w in WIDTHS[1:]] == [1.0] * len(WIDTHS[1:])


def test_wide_steps_that_stay_cheaper_are_not_checked_for_ever() -> None:
    """That can be true, and then plain steps must not be measured every few steps."""
    times, n_measured = StepTimes(CPU), 0
    for _ in range(1000):
        if not times.knows(8):
            n_measured += 1
            times.saw_plain(8, 1.0)
        else:
            times.saw_wide(8, 9, 0.8)
    assert n_measured <= 7 * N_PLAIN


def test_one_slow_step_is_not_charged_to_drafts() -> None:
    times = measured({9: 1.5})
    assert times.saw_wide(1, 9, 50.0) == pytest.approx(1.5)


def test_steps_that_compile_kernels_are_not_measured() -> None:
    """On a GPU the first ones of every width take a hundred times as long."""
    times = StepTimes(CUDA)
    for _ in range(5):
        times.saw_plain(1, 0.01)
    for _ in range(CUDA.n_preparing):
        assert times.saw_wide(1, 16, 3.0) == MAX_PREPARING
    assert not times.is_measured(1, 16)
    assert times.saw_wide(1, 16, 0.012) == pytest.approx(1.2)
    for _ in range(9):
        assert times.saw_wide(1, 16, 3.0, is_new=True) == MAX_PREPARING, "a block of columns later"
    assert times.price(1, 16) < 1.3


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


def test_losses_shut_drafts_out_until_they_are_earned_again() -> None:
    times, allowance = measured(FLAT), Allowance()

    def width() -> int:
        best = gate.best_width(times, [KEEN], n_seats=1, widths=WIDTHS, allowance=allowance)
        return best.width

    assert width() > 1
    allowance.settle(-100.0)
    assert width() == 1
    for _ in range(120):
        allowance.earn()
    assert width() > 1
    for _ in range(1000):
        allowance.settle(5.0)
    allowance.settle(-gate.MOST)
    assert width() == 1, "gains of long ago pay for little"


def test_drafts_that_take_time_must_be_worth_it() -> None:
    times, expected = measured(FLAT), ExpectedTokens.of([0.7] * 8)

    def best(draft_s: float) -> int:
        chosen = gate.best_width(
            times, [expected], n_seats=1, widths=WIDTHS, draft_s=lambda w: 0.5 * draft_s * (w - 1)
        )
        return chosen.width

    assert best(0.0) > best(0.2) > 1
    assert best(2.0) == 1


def test_a_slow_drafter_is_asked_again_after_a_while() -> None:
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


def test_the_first_draft_for_each_number_of_rows_is_no_measure() -> None:
    times = gate.DraftTimes()
    assert not times.saw(1, 100.0)
    assert times.saw(1, 1.0)
    assert not times.saw(4, 100.0)
    assert times.of(4) == times.of(1) == 1.0


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
