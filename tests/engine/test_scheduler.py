"""The scheduler is a pure function, and keeps its promises for any pending work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.core.values import RequestId
from firn.engine.scheduler import PendingWork, Prefilling, StepPlan, Waiting, chunk_end, plan

EMPTY = PendingWork(
    waiting=(), prefilling=(), n_rows=0, max_rows=4, n_decoding=0, free_nbytes=1 << 30, turn=0
)


def waiting_of(sizes: Sequence[tuple[int, int]]) -> tuple[Waiting, ...]:
    return tuple(Waiting(RequestId(str(i)), n_rows, need) for i, (n_rows, need) in enumerate(sizes))


waitings = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), max_size=12).map(waiting_of)
prefillings = st.lists(
    st.tuples(
        st.integers(1, 10_000), st.sampled_from([(False, False), (True, False), (True, True)])
    ),
    max_size=8,
).map(lambda some: tuple(Prefilling(10 + i, n, *race) for i, (n, race) in enumerate(some)))
views = st.builds(
    PendingWork,
    waiting=waitings,
    prefilling=prefillings,
    n_rows=st.integers(0, 10),
    max_rows=st.integers(1, 10),
    n_decoding=st.integers(0, 10),
    free_nbytes=st.integers(-100, 400),
    turn=st.integers(0, 1 << 40),
)


# --- admission -----------------------------------------------------------------------------


def test_an_empty_view_plans_nothing() -> None:
    assert plan(EMPTY) == StepPlan(admit=(), prefill=None, decode=False)


@given(views)
def test_rows_and_bytes_stay_within_their_limits(view: PendingWork) -> None:
    admitted = [w for w in view.waiting if w.id in plan(view).admit]
    n_rows, free = view.n_rows, view.free_nbytes
    for w in admitted:
        alone = n_rows == 0
        n_rows, free = n_rows + w.n_rows, free - w.need_nbytes
        assert alone or (n_rows <= view.max_rows and free >= 0)


@given(views)
def test_admission_is_in_order_of_arrival(view: PendingWork) -> None:
    """Admitted requests are a prefix of the queue: none overtakes another."""
    admit = list(plan(view).admit)
    assert admit == [w.id for w in view.waiting][: len(admit)]


@given(views)
def test_a_request_that_fits_is_admitted(view: PendingWork) -> None:
    admit = plan(view).admit
    taken, left = view.waiting[: len(admit)], view.waiting[len(admit) :]
    n_rows = view.n_rows + sum(w.n_rows for w in taken)
    free = view.free_nbytes - sum(w.need_nbytes for w in taken)
    if left:
        assert n_rows > 0, "an empty engine refuses nobody"
        assert n_rows + left[0].n_rows > view.max_rows or left[0].need_nbytes > free


def test_a_request_that_does_not_fit_holds_back_smaller_ones_after_it() -> None:
    """By rows and by bytes: otherwise a stream of small requests would keep it waiting forever."""
    view = replace(EMPTY, waiting=waiting_of([(3, 0), (1, 0)]), n_rows=2)
    assert plan(view).admit == ()
    view = replace(EMPTY, waiting=waiting_of([(1, 100), (1, 1)]), n_rows=2, free_nbytes=50)
    assert plan(view).admit == ()


def test_an_empty_engine_admits_even_a_request_that_is_too_large() -> None:
    view = replace(EMPTY, waiting=waiting_of([(9, 1 << 40), (1, 0)]))
    assert plan(view).admit == ("0",)


# --- decode and prefill --------------------------------------------------------------------


@given(views)
def test_decoders_step_whenever_there_are_any(view: PendingWork) -> None:
    assert plan(view).decode == (view.n_decoding > 0)


def eligible(view: PendingWork) -> list[Prefilling]:
    """Prompts that do not race; if there are none, those that do and need not wait."""
    alone = [p for p in view.prefilling if not p.racing]
    return alone or [p for p in view.prefilling if not p.should_wait]


@given(views)
def test_some_prompt_gets_a_chunk_whenever_one_is_unread(view: PendingWork) -> None:
    tasks = [p.task for p in eligible(view)]
    chosen = plan(view).prefill
    assert chosen in tasks if tasks else chosen is None


@given(views)
def test_a_prompt_that_races_takes_no_chunk_from_one_that_does_not(view: PendingWork) -> None:
    without = replace(view, prefilling=tuple(p for p in view.prefilling if not p.racing))
    if without.prefilling:
        assert plan(view).prefill == plan(without).prefill


@given(views)
def test_turns_alternate_between_the_oldest_and_the_shortest(view: PendingWork) -> None:
    of = {p.task: p.n_left for p in eligible(view)}
    if of:
        even = plan(replace(view, turn=2 * view.turn)).prefill
        odd = plan(replace(view, turn=2 * view.turn + 1)).prefill
        assert even is not None
        assert of[even] == min(of.values())
        assert odd == eligible(view)[0].task


class Prompts:
    """Prompts that get one chunk per step, as in the engine."""

    def __init__(self, turn: int = 0) -> None:
        self.left: dict[int, int] = {}
        self.served: list[int] = []
        self.oldest: list[int] = []
        """The oldest prompt at each chunk."""
        self.turn = turn

    def arrive(self, task: int, n_chunks: int) -> None:
        self.left[task] = n_chunks

    def step(self) -> None:
        prefilling = tuple(Prefilling(t, n) for t, n in self.left.items())
        chosen = plan(replace(EMPTY, prefilling=prefilling, turn=self.turn)).prefill
        if chosen is None:
            return
        self.turn += 1
        self.oldest.append(next(iter(self.left)))
        self.served.append(chosen)
        self.left[chosen] -= 1
        if not self.left[chosen]:
            del self.left[chosen]


@given(st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=60), st.booleans())
def test_the_oldest_prompt_gets_half_of_all_chunks(
    arrivals: list[list[int]], odd_start: bool
) -> None:
    """Over any run of chunks, whatever arrives meanwhile."""
    world, n = Prompts(turn=int(odd_start)), 0
    for lengths in arrivals:
        for n_chunks in lengths:
            world.arrive(n, n_chunks)
            n += 1
        world.step()
    mine = [served == oldest for served, oldest in zip(world.served, world.oldest, strict=True)]
    for start in range(len(mine)):
        for end in range(start + 1, len(mine) + 1):
            assert sum(mine[start:end]) >= (end - start) // 2


@given(n_short=st.integers(1, 8), before=st.integers(0, 50), others=st.lists(st.integers(1, 400)))
def test_a_short_prompt_is_not_stuck_behind_a_long_one(
    n_short: int, before: int, others: list[int]
) -> None:
    """It waits only for prompts with less left, two chunks for each of theirs and its own."""
    world = Prompts()
    world.arrive(0, 100_000 // 256)
    for i, n_chunks in enumerate(others):
        world.arrive(2 + i, n_chunks)
    for _ in range(before):
        world.step()
    shorter = sum(n for n in world.left.values() if n <= n_short)
    world.arrive(1, n_short)
    n_steps = 0
    while 1 in world.left:
        world.step()
        n_steps += 1
    assert n_steps <= 2 * (n_short + shorter)


def test_a_long_prompt_takes_at_most_twice_as_long() -> None:
    world = Prompts()
    world.arrive(0, 200)
    task = 1
    while 0 in world.left:
        world.arrive(task, 1)  # a short one arrives at every step
        task += 1
        world.step()
    assert len(world.served) <= 2 * 200


# --- where chunks end ----------------------------------------------------------------------

chunks = st.integers(1, 64)
positions = st.integers(0, 1000)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """n_done < n_total, a chunk and ascending stops."""
    n_total = draw(st.integers(1, 1000))
    n_done = draw(st.integers(0, n_total - 1))
    stops = sorted(draw(st.sets(st.integers(0, 1100), max_size=8)))
    return n_done, n_total, draw(chunks), stops


@given(cuts())
def test_a_chunk_makes_progress_and_never_passes_the_end(
    cut: tuple[int, int, int, list[int]],
) -> None:
    n_done, n_total, chunk, stops = cut
    end = chunk_end(n_done, n_total, chunk=chunk, stops=stops)
    assert n_done < end <= n_total
    assert end - n_done <= chunk


@given(cuts())
def test_a_chunk_ends_on_the_grid_at_a_stop_or_at_the_end(
    cut: tuple[int, int, int, list[int]],
) -> None:
    n_done, n_total, chunk, stops = cut
    end = chunk_end(n_done, n_total, chunk=chunk, stops=stops)
    assert end % chunk == 0 or end in stops or end == n_total
    assert not [s for s in stops if n_done < s < end], "a stop was run over"


def cut_points(start: int, n_total: int, *, chunk: int, stops: Sequence[int] = ()) -> list[int]:
    ends = [start]
    while ends[-1] < n_total:
        ends.append(chunk_end(ends[-1], n_total, chunk=chunk, stops=stops))
    return ends


@given(cuts())
def test_every_stop_inside_the_prompt_is_a_cut(cut: tuple[int, int, int, list[int]]) -> None:
    _, n_total, chunk, stops = cut
    ends = cut_points(0, n_total, chunk=chunk, stops=stops)
    assert {s for s in stops if 0 < s < n_total} <= set(ends)
    assert all(b - a <= chunk for a, b in pairwise(ends))


@given(cuts())
def test_the_same_prompt_is_cut_in_the_same_places_wherever_it_resumes(
    cut: tuple[int, int, int, list[int]],
) -> None:
    """At any position, on the grid or off it: what follows is cut as when nothing was restored."""
    n_done, n_total, chunk, stops = cut
    cold = cut_points(0, n_total, chunk=chunk, stops=stops)
    warm = cut_points(n_done, n_total, chunk=chunk, stops=stops)
    assert warm[1:] == [end for end in cold if end > n_done]


@given(cuts(), positions)
def test_a_chunk_that_starts_off_the_grid_ends_on_it(
    cut: tuple[int, int, int, list[int]], n_done: int
) -> None:
    _, n_total, chunk, _ = cut
    if n_done < n_total:
        ends = cut_points(n_done, n_total, chunk=chunk)
        assert all(p % chunk == 0 for p in ends[1:-1])


@given(chunk=st.integers(1, 40), n_total=st.integers(1, 200), n_done=st.integers(0, 199))
def test_without_alignment_the_last_chunk_and_a_half_is_read_at_once(
    chunk: int, n_total: int, n_done: int
) -> None:
    n_done = min(n_done, n_total - 1)
    end = chunk_end(n_done, n_total, chunk=chunk, aligned=False)
    if n_total - n_done <= 1.5 * chunk:
        assert end == n_total
    else:
        assert end == chunk_end(n_done, n_total, chunk=chunk)
    assert 0 < end - n_done <= 1.5 * chunk


@pytest.mark.parametrize(("n_done", "end"), [(0, 96), (96, 101), (16, 32), (90, 101)])
def test_common_chunks_end_at_multiples(n_done: int, end: int) -> None:
    assert chunk_end(n_done, 101, chunk=128, aligned=False, common=32) == end


def test_common_chunks_end_at_stops_and_do_not_apply_to_aligned_ones() -> None:
    assert chunk_end(0, 101, chunk=128, aligned=False, common=32, stops=[40]) == 40
    assert chunk_end(0, 101, chunk=128, aligned=True, common=32) == 101
