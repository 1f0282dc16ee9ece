"""Jobs through the real engine thread, on a runner whose tokens depend on all tokens before them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.core.errors import InvalidValue, NeverFits, QueueFull
from firn.core.events import Admitted, ChoiceDone, JobDone, Prefilled, Token
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, PictureSpan, Prompt, RequestId, Sampling
from firn.engine import EngineParts
from tests.dict_cache import DictCache
from tests.hash_engine import WAIT_S, HashEngine, Outcome
from tests.hash_runner import VOCAB_SIZE, Faults, HashRow, prompt_of, reply_to

# --- one job -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 40])
def test_a_job_yields_the_models_tokens(length: int) -> None:
    with HashEngine(chunk=8) as lab:
        outcome = lab.submit(prompt_of(length, length), 20).wait()
        outcome.check()
        assert lab.leftovers() == {}


def test_events_come_in_order() -> None:
    with HashEngine(chunk=4) as lab:
        prompt = prompt_of(1, 10)
        outcome = lab.submit(prompt, 3).wait()
    tokens = [Token(0, t) for t in reply_to(prompt, 3)]
    assert outcome.events == [
        Admitted(0, reason=Reason(Cause.NO_CACHE)),
        Prefilled(4, 10),
        Prefilled(9, 10),
        *tokens,
        ChoiceDone(0, "length"),
        JobDone(),
    ]


def test_the_last_prompt_token_makes_the_first_logits() -> None:
    with HashEngine(chunk=8) as lab:
        lab.submit(prompt_of(2, 20), 4).wait().check()
        assert lab.runner.prefills == [(0, 8), (8, 19)]


def test_replies_that_end_in_one_step_leave_together() -> None:
    """A group that shrank row by row would be copied each time."""
    left: list[int] = []
    faults = Faults(leave=lambda rows: left.append(len(rows)))
    with HashEngine(faults, max_rows=8) as lab:
        gate = lab.hold()
        outcomes = [lab.submit(prompt_of(i, 6), 5, n=2) for i in range(3)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
    assert max(left) > 1
    assert sum(left) >= 6


def test_an_end_token_ends_the_reply() -> None:
    prompt = prompt_of(3, 12)
    reply = reply_to(prompt, 30)
    eos = reply[11]
    with HashEngine() as lab:
        outcome = lab.submit(prompt, 30, eos=[eos, 9999]).wait()
    assert outcome.tokens() == reply[: reply.index(eos) + 1]
    assert outcome.reason() == "stop"


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    prompt = prompt_of(4, 12)
    reply = reply_to(prompt, 6)
    assert reply[5] not in reply[:5]
    with HashEngine() as lab:
        assert lab.submit(prompt, 6, eos=[reply[5]]).wait().reason() == "stop"


def test_choices_share_one_prefill() -> None:
    warm = Sampling(temperature=1.0, seed=7)
    with HashEngine(chunk=8) as lab:
        outcome = lab.submit(prompt_of(5, 33), 12, n=3, sampling=warm).wait()
        outcome.check()
        assert lab.runner.prefills == [(0, 8), (8, 16), (16, 24), (24, 32)]
        assert len({tuple(outcome.tokens(i)) for i in range(3)}) == 3
        assert lab.leftovers() == {}


def test_greedy_choices_agree() -> None:
    with HashEngine() as lab:
        outcome = lab.submit(prompt_of(6, 9), 12, n=4).wait()
        outcome.check()
        assert len({tuple(outcome.tokens(i)) for i in range(4)}) == 1


def test_choices_end_one_by_one() -> None:
    """Each choice ends at its own end token, and the job with the last of them."""
    warm = Sampling(temperature=1.0, seed=1)
    eos = range(0, VOCAB_SIZE, 8)
    with HashEngine() as lab:
        outcome = lab.submit(prompt_of(7, 9), 60, n=6, sampling=warm, eos=eos).wait()
        outcome.check()
    lengths = {len(outcome.tokens(i)) for i in range(6)}
    assert len(lengths) > 2
    assert outcome.events.index(JobDone()) == len(outcome.events) - 1


# --- many jobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("group_rows", [1, 2, 100])
@pytest.mark.parametrize("cached", [False, True])
def test_jobs_that_come_and_go_do_not_touch_each_other(group_rows: int, cached: bool) -> None:
    """With groups of one row, as for models whose layers cannot batch."""
    rng = random.Random(group_rows)
    roots = [prompt_of(i, 60) for i in range(4)]
    cache = DictCache() if cached else None
    with HashEngine(cache=cache, max_rows=7, group_rows=group_rows) as lab:
        outcomes = []
        for i in range(120):
            prompt = rng.choice(roots)[: rng.randint(1, 60)] + prompt_of(i, rng.randint(0, 9))
            sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=i)
            eos = rng.sample(range(VOCAB_SIZE), 4)
            outcomes.append(
                lab.submit(prompt, rng.randint(1, 25), sampling=sampling, n=rng.choice([1, 1, 3]),
                           eos=eos)
            )  # fmt: skip
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
        assert lab.runner.largest_group <= min(7, group_rows)
        assert (sum(o.n_cached for o in outcomes) > 0) == cached


jobs = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=12
)


@given(jobs, st.integers(1, 5), st.integers(1, 16), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_mixture_of_jobs_gives_each_its_own_tokens(
    mixture: list[tuple[int, int, int]], max_rows: int, chunk: int, cached: bool
) -> None:
    cache = DictCache() if cached else None
    with HashEngine(cache=cache, max_rows=max_rows, chunk=chunk) as lab:
        outcomes = [
            lab.submit(prompt_of(length % 3, length), n_reply, n=min(n, max_rows))
            for length, n_reply, n in mixture
        ]
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
        assert lab.runner.largest_group <= max_rows


def test_requests_are_admitted_in_the_order_they_came() -> None:
    admitted: list[RequestId] = []

    def watch(batch: object) -> None:
        admitted.extend(r for r, e in batch if isinstance(e, Admitted))  # type: ignore[attr-defined]

    with HashEngine(max_rows=2, publish=watch) as lab:
        outcomes = [lab.submit(prompt_of(i, 5 + i % 7), 3 + i % 5) for i in range(30)]
        for outcome in outcomes:
            outcome.wait()
    assert admitted == [o.job.id for o in outcomes]


def test_decoders_step_between_any_two_chunks() -> None:
    steps: list[str] = []
    arrivals: list[Outcome] = []

    def launch(rows: list[HashRow]) -> None:
        steps.append("step")
        if len(steps) == 10:  # a long prompt arrives while another job decodes
            arrivals.append(lab.submit(prompt_of(2, 101), 2))

    faults = Faults(prefill=lambda row, chunk: steps.append("chunk"), launch=launch)
    with HashEngine(faults, chunk=4) as lab:
        lab.submit(prompt_of(1, 1), 200).wait().check()
        arrivals[0].wait().check()
    assert steps.count("chunk") == 25
    assert "chunk chunk" not in " ".join(steps)


def with_pictures(seed: int, length: int, *spans: tuple[int, int]) -> Prompt:
    ids = np.array(prompt_of(seed, length), dtype=np.int64)
    placed = tuple(PictureSpan(a, b, bytes([i])) for i, (a, b) in enumerate(spans))
    return Prompt(ids, picture_spans=placed, picture_inputs=spans)


def test_decoders_step_between_any_two_pictures() -> None:
    """However many small pictures a chunk has."""
    steps: list[str] = []
    arrivals: list[Outcome] = []
    spans = [(i, i + 2) for i in range(0, 60, 3)]

    def launch(rows: list[HashRow]) -> None:
        steps.append("step")
        if len(steps) == 10:
            arrivals.append(lab.submit(with_pictures(2, 61, *spans), 2))

    faults = Faults(
        read_picture=lambda index: steps.append("picture"),
        prefill=lambda row, chunk: steps.append("chunk"),
        launch=launch,
    )
    with HashEngine(faults, chunk=32) as lab:
        lab.submit(prompt_of(1, 1), 200).wait().check()
        arrivals[0].wait().check()
    assert steps.count("picture") == len(spans), "one that two chunks share is read once"
    seen = " ".join(steps)
    assert "picture picture" not in seen
    assert "picture chunk" not in seen


def test_pictures_before_the_resume_point_are_not_read() -> None:
    read: list[int] = []
    with HashEngine(Faults(read_picture=read.append), cache=DictCache(), chunk=8) as lab:
        prompt = with_pictures(3, 40, (2, 6), (20, 24))
        lab.submit(prompt, 2).wait().check()
        lab.submit(prompt, 2).wait().check()
    assert read == [0, 1]


def test_a_fault_of_a_picture_ends_its_request_only() -> None:
    def fault(index: int) -> None:
        raise ValueError("the vision tower failed")

    with HashEngine(Faults(read_picture=fault), chunk=8) as lab:
        other = lab.submit(prompt_of(1, 20), 40)
        bad = lab.submit(with_pictures(2, 40, (2, 6)), 2).wait()
        assert bad.error is not None
        other.wait().check()
        assert lab.leftovers() == {}


# --- the prefix cache's port ---------------------------------------------------------------


def test_a_prompt_and_its_reply_are_reused_from_the_cache() -> None:
    cache = DictCache()
    prompt = prompt_of(9, 50)
    with HashEngine(cache=cache, chunk=8) as lab:
        first = lab.submit(prompt, 10).wait()
        first.check()
        assert first.n_cached == 0
        again = lab.submit(prompt, 10).wait()
        again.check()
        assert again.n_cached == 49, "one token is left to make the logits"
        turn = lab.submit([*prompt, *first.tokens(), 5, 6, 7], 10).wait()
        turn.check()
        assert turn.n_cached >= 59, "the reply was stored as well"
        assert lab.leftovers() == {}
        assert cache.room_nbytes == lab.budget.capacity_nbytes
    assert cache.closed
    assert lab.runner.closed


def test_namespace_and_cache_control_reach_the_cache() -> None:
    prompt = prompt_of(10, 40)
    with HashEngine(cache=DictCache()) as lab:
        silent = CacheControl(write=False)
        assert lab.submit(prompt, 4, namespace="a", control=silent).wait().n_cached == 0
        assert lab.submit(prompt, 4, namespace="a").wait().n_cached == 0
        assert lab.submit(prompt, 4, namespace="b").wait().n_cached == 0
        deaf = CacheControl(read=False)
        assert lab.submit(prompt, 4, namespace="a", control=deaf).wait().n_cached == 0
        assert lab.submit(prompt, 4, namespace="a").wait().n_cached == 39


def test_a_prompt_takes_over_what_its_neighbour_reads() -> None:
    """Two equal prompts at the same time: the second continues from the first one's chunks."""
    prompt = prompt_of(11, 400)
    with HashEngine(cache=DictCache(), chunk=8) as lab:
        gate = lab.hold()
        both = [lab.submit(prompt, 5), lab.submit(prompt, 5)]
        gate.set()
        for outcome in both:
            outcome.wait().check()
        n_read = sum(end - start for start, end in lab.runner.prefills)
        assert n_read < 2 * 399
        assert lab.leftovers() == {}


def test_a_request_waits_for_what_is_being_read_and_holds_nobody_up() -> None:
    cache = DictCache(racing=True, patient=True)
    with HashEngine(cache=cache, max_rows=2) as lab:
        slow = lab.submit(prompt_of(14, 30), 5)
        lab.between_steps()
        cache.racing = cache.patient = False
        for i in range(5):
            lab.submit(prompt_of(i, 30), 5).wait().check()
        assert slow.events == []
        assert lab.engine.health().n_prefilling == 1

        def arrived() -> None:
            cache.cursors[0].racing = cache.cursors[0].patient = False

        lab.between_steps(arrived)
        slow.wait().check()
        assert lab.leftovers() == {}


def test_a_request_that_races_is_computed_while_nobody_else_is() -> None:
    cache = DictCache(racing=True)
    with HashEngine(cache=cache) as lab:
        lab.submit(prompt_of(14, 300), 5).wait().check()
        assert lab.leftovers() == {}


def test_a_request_that_races_takes_no_chunk_from_one_that_does_not() -> None:
    cache = DictCache(racing=True)
    with HashEngine(cache=cache, chunk=16) as lab:
        gate = lab.hold()
        racing = lab.submit(prompt_of(14, 300), 1)
        lab.engine.call(lambda _: setattr(cache, "racing", False))
        other = lab.submit(prompt_of(15, 160), 1)
        gate.set()
        racing.wait().check()
        other.wait().check()
        assert lab.runner.prefills[:9] == [(i * 16, i * 16 + 16) for i in range(9)]
        assert lab.runner.prefills[10][0] == 0, "the one that races comes after it"


def test_a_request_can_be_cancelled_while_it_waits_for_a_read() -> None:
    cache = DictCache(racing=True, patient=True)
    with HashEngine(cache=cache) as lab:
        gone = lab.submit(prompt_of(14, 30), 5)
        lab.cancel(gone)
        assert lab.leftovers() == {}
        assert gone.events == []


def test_a_record_that_cannot_be_restored_is_a_miss() -> None:
    cache = DictCache()
    prompt = prompt_of(12, 50)
    with HashEngine(cache=cache) as lab:
        lab.submit(prompt, 4).wait().check()
        cache.corrupt = True
        for _ in range(2):
            again = lab.submit(prompt, 4).wait()
            again.check()
            assert again.n_cached == 0
        assert lab.leftovers() == {}


def test_a_prompt_is_computed_if_its_neighbours_record_cannot_be_restored() -> None:
    cache = DictCache(corrupt=True)
    prompt = prompt_of(13, 100)
    with HashEngine(cache=cache) as lab:
        gate = lab.hold()
        both = [lab.submit(prompt, 5), lab.submit(prompt, 5)]
        gate.set()
        for outcome in both:
            outcome.wait().check()
        assert lab.leftovers() == {}


# --- limits --------------------------------------------------------------------------------


def test_more_choices_than_rows_are_refused() -> None:
    with HashEngine(max_rows=4) as lab:
        error = lab.submit(prompt_of(1, 5), n=5).wait().error
        assert isinstance(error, InvalidValue)
        assert error.param == "n"
        lab.submit(prompt_of(1, 5), n=4).wait().check()
        assert lab.leftovers() == {}


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    with HashEngine(capacity_nbytes=100) as lab:
        with pytest.raises(NeverFits):  # raised immediately, while no stream has begun
            lab.submit(prompt_of(1, 200), 4)
        lab.submit(prompt_of(1, 20), 4).wait().check()
        assert lab.leftovers() == {}


def test_requests_wait_for_memory_and_do_not_fail() -> None:
    largest = 0

    def watch(rows: list[HashRow]) -> None:
        nonlocal largest
        largest = max(largest, len(rows))

    with HashEngine(Faults(launch=watch), capacity_nbytes=100, max_rows=50) as lab:
        outcomes = [lab.submit(prompt_of(i, 20), 20) for i in range(12)]
        for outcome in outcomes:
            outcome.wait().check()
    assert largest == 2, "two of 41 bytes fit into 100"


def test_a_full_queue_refuses_and_takes_again() -> None:
    with HashEngine(max_queue=3, max_rows=1) as lab:
        gate = lab.hold()
        taken = [lab.submit(prompt_of(i, 5)) for i in range(3)]
        with pytest.raises(QueueFull):
            lab.submit(prompt_of(9, 5))
        assert lab.engine.health().n_waiting == 3
        gate.set()
        for outcome in taken:
            outcome.wait().check()
        lab.submit(prompt_of(9, 5)).wait().check()
        assert lab.leftovers() == {}


def test_without_a_queue_free_rows_still_take_requests() -> None:
    with HashEngine(max_queue=0, max_rows=2) as lab:
        for _ in range(2):
            gate = lab.hold()
            taken = [lab.submit(prompt_of(i, 5)) for i in range(2)]
            with pytest.raises(QueueFull):
                lab.submit(prompt_of(9, 5))
            gate.set()
            for outcome in taken:
                outcome.wait().check()
        assert lab.leftovers() == {}


def test_without_a_queue_busy_rows_refuse_requests() -> None:
    started, release = threading.Event(), threading.Event()

    def watch(*_: object) -> None:
        started.set()
        assert release.wait(WAIT_S)

    with HashEngine(Faults(launch=watch), max_queue=0, max_rows=1) as lab:
        first = lab.submit(prompt_of(1, 5), 3)
        assert started.wait(WAIT_S)
        with pytest.raises(QueueFull):
            lab.submit(prompt_of(2, 5))
        release.set()
        first.wait().check()


def test_a_refused_job_does_not_stay_in_the_queue() -> None:
    with HashEngine(max_queue=1, max_rows=1) as lab:
        for _ in range(5):
            lab.submit(prompt_of(1, 5), n=2).wait()
        lab.submit(prompt_of(1, 5)).wait().check()


# --- asking the engine thread --------------------------------------------------------------


def test_call_runs_on_the_engine_thread() -> None:
    with HashEngine() as lab:

        def ask(parts: EngineParts) -> tuple[str, int]:
            return threading.current_thread().name, parts.limits.max_rows

        assert lab.engine.call(ask).result(WAIT_S) == ("firn-engine", 8)


def test_a_fault_in_a_call_is_raised_to_its_caller() -> None:
    with HashEngine() as lab:
        future = lab.engine.call(lambda parts: parts.nothing_like_it)  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            future.result(WAIT_S)
        lab.submit(prompt_of(1, 5)).wait().check()


def test_a_call_nobody_waits_for_any_more_is_not_run() -> None:
    """A client that hangs up cancels its future, and the engine continues."""
    ran = []
    with HashEngine() as lab:
        gate = lab.hold()
        future = lab.engine.call(ran.append)
        assert future.cancel()
        gate.set()
        lab.submit(prompt_of(1, 5)).wait().check()
    assert ran == []


def test_health_counts_the_requests_of_each_stage() -> None:
    seen = []
    faults = Faults(
        prefill=lambda row, chunk: seen.append(lab.engine.health()),
        launch=lambda rows: seen.append(lab.engine.health()),
    )
    with HashEngine(faults, max_rows=2) as lab:
        gate = lab.hold()
        jobs = [lab.submit(prompt_of(i, 5), 3, n=2) for i in range(4)]
        gate.set()
        for outcome in jobs:
            outcome.wait()
        idle = lab.between_steps(lab.engine.health)
    assert max(h.n_waiting for h in seen) == 3
    assert max(h.n_prefilling for h in seen) == 1
    assert max(h.n_decoding for h in seen) == 2
    assert (idle.alive, idle.n_waiting, idle.n_prefilling, idle.n_decoding) == (True, 0, 0, 0)
    assert 0 <= idle.last_step_age_s < WAIT_S


def test_an_unknown_request_can_be_cancelled_and_stopped() -> None:
    with HashEngine() as lab:
        lab.engine.cancel(RequestId("nobody"))
        lab.engine.stop_choice(RequestId("nobody"), 3)
        outcome: Outcome = lab.submit(prompt_of(1, 5))
        outcome.wait().check()
        lab.cancel(outcome)
        lab.engine.stop_choice(outcome.job.id, 0)
        assert lab.leftovers() == {}
        assert outcome.n_ends == 1
