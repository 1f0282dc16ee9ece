"""What requests get from the cache: reuse, choices, neighbours, lifetimes, pins, small budgets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import pytest

from firn.cache.admin import control as admin
from firn.core.errors import BadRequest
from firn.core.events import Admitted
from firn.core.ports import Delivery, EngineLoad
from firn.core.values import CacheControl, Namespace, Sampling
from tests.cache.lab import (
    DENSE,
    HYBRID,
    SHAPES,
    WINDOWED,
    LabEngine,
    Shape,
    check_tree,
    prompt_of,
    records_of,
    tree,
)
from tests.hash_engine import Outcome
from tests.hash_runner import prompt_of as words
from tests.hash_runner import reply_to

EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
TOKEN_EXACT = pytest.mark.parametrize(
    "shape",
    [s for s in SHAPES.values() if not s.state],
    ids=[n for n, s in SHAPES.items() if not s.state],
)
BLOCK = 8
WARM = Sampling(temperature=1.0, seed=5)


def ask(lab: LabEngine, ids: list[int], n_reply: int = 8, **options: object) -> Outcome:
    outcome = lab.submit(ids, n_reply, **options).wait()
    outcome.check()
    return outcome


# --- reuse ---------------------------------------------------------------------------------


@TOKEN_EXACT
def test_reuse_is_exact_to_the_token(shape: Shape) -> None:
    """Whatever two prompts share is reused, wherever it ends: around every block boundary."""
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ids = words(1, 60)
        ask(lab, ids)
        for n in range(1, 60):
            other = [*ids[:n], (ids[n] + 1) % 251, *words(n, 9)]
            assert ask(lab, other, control=CacheControl(write=False)).n_cached == n
        lab.check()


@EACH
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64])
def test_a_prompt_sent_again_recomputes_one_token(shape: Shape, n: int) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ids = words(1, n)
        ask(lab, ids)
        n_before = lab.runner.n_prefilled
        assert ask(lab, ids).n_cached == n - 1
        assert lab.runner.n_prefilled == n_before, "the last token makes the logits, in decode"
        (admission,) = ask(lab, ids).of(Admitted)
        assert admission.why == "" or n == 1
        lab.check()


@EACH
def test_a_growing_conversation_computes_each_token_once(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ids = words(1, 30)
        for turn in range(8):
            ids += ask(lab, ids, 11).tokens() + words(100 + turn, 13)
        n_replies = 8 * 11
        assert lab.runner.n_prefilled <= len(ids) - n_replies
        lab.check()


@EACH
def test_sampling_and_lengths_change_nothing_about_reuse(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ids = words(1, 50)
        ask(lab, ids, 3)
        for sampling in (WARM, Sampling(temperature=0.5, top_k=3, seed=1)):
            assert ask(lab, ids, 9, sampling=sampling).n_cached == 49
        reply = lab.submit(ids, 30).wait().tokens()
        assert ask(lab, ids, 30, eos=[reply[4]]).n_cached == 49


def test_reading_and_writing_can_be_switched_off() -> None:
    with LabEngine(DENSE, cache=tree(DENSE, block=BLOCK)) as lab:
        ids = words(1, 50)
        ask(lab, ids, control=CacheControl(write=False))
        assert records_of(lab.tree) == []
        ask(lab, ids)
        before = len(records_of(lab.tree))
        unread = ask(lab, ids, control=CacheControl(read=False))
        assert unread.n_cached == 0
        assert unread.of(Admitted)[0].why == "reading off"
        assert len(records_of(lab.tree)) == before
        lab.check()


def test_namespaces_share_nothing() -> None:
    with LabEngine(HYBRID, cache=tree(HYBRID, block=BLOCK)) as lab:
        ids = words(1, 50)
        for name in ("alice", "bob", ""):
            assert ask(lab, ids, namespace=name).n_cached == 0
        for name in ("alice", "bob", ""):
            assert ask(lab, ids, namespace=name).n_cached == 49
        lab.check()


# --- choices -------------------------------------------------------------------------------


@EACH
def test_each_choice_leaves_its_own_branch(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ids = words(1, 45)
        outcome = ask(lab, ids, 20, n=3, sampling=WARM)
        replies = [outcome.tokens(i) for i in range(3)]
        assert len({tuple(r) for r in replies}) == 3
        n_before = lab.runner.n_prefilled
        for reply in replies:
            assert ask(lab, ids + reply + words(9, 5)).n_cached == 65
        assert lab.runner.n_prefilled - n_before == 3 * 4
        again = ask(lab, ids, 20, n=3, sampling=WARM)
        assert [again.tokens(i) for i in range(3)] == replies
        assert again.n_cached == 44
        lab.check()


def test_a_stopped_choice_leaves_what_it_has_said() -> None:
    cache = tree(WINDOWED, block=BLOCK)
    with LabEngine(WINDOWED, cache=cache) as lab:
        ids = words(1, 45)
        gate = lab.hold()
        outcome = lab.submit(ids, 4000, n=2, sampling=WARM)
        gate.set()
        while len(outcome.tokens(1)) < 30:
            lab.between_steps()
        for choice in (0, 1):
            lab.engine.stop_choice(outcome.job.id, choice)
        outcome.wait()
        for choice in (0, 1):
            said = outcome.tokens(choice)
            assert ask(lab, ids + said[:25] + words(9, 5)).n_cached >= 70
        lab.check()


# --- neighbours ----------------------------------------------------------------------------


@EACH
def test_two_identical_prompts_at_once_compute_each_token_once(shape: Shape) -> None:
    """One takes over what the other has just committed; with states, at checkpoints only."""
    with LabEngine(shape, cache=tree(shape, block=BLOCK), chunk=16) as lab:
        ids = words(1, 321)
        gate = lab.hold()
        both = [lab.submit(ids, 5, boundaries=[160]) for _ in range(2)]
        gate.set()
        for outcome in both:
            outcome.wait().check()
        if not shape.state:
            assert lab.runner.n_prefilled == 320
        else:
            assert lab.runner.n_prefilled < 640
        lab.check()


@EACH
def test_many_prompts_with_one_prefix_at_once(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK), chunk=16) as lab:
        system = words(1, 240)
        gate = lab.hold()
        crowd = [lab.submit(system + words(i, 20), 6, boundaries=[240]) for i in range(2, 8)]
        gate.set()
        for outcome in crowd:
            outcome.wait().check()
        alone = 6 * (240 + 19)
        if not shape.state:
            assert lab.runner.n_prefilled <= 240 + 6 * 19 + 6 * BLOCK
        assert lab.runner.n_prefilled < alone
        lab.check()


@EACH
@pytest.mark.parametrize("n_sessions", [12])
def test_sessions_that_come_and_go_at_once(shape: Shape, n_sessions: int) -> None:
    """Each session has its own fact: an answer from another session's past is wrong."""
    rng = random.Random(3)
    cache = tree(shape, block=BLOCK, limit_nbytes=12_000 if shape.state else 5_000)
    with LabEngine(shape, cache=cache, chunk=16, max_rows=5) as lab:
        system = words(1, 40)
        sessions = [[*system, i, *words(500 + i, 20)] for i in range(n_sessions)]
        for _ in range(4):
            order = rng.sample(range(n_sessions), n_sessions)
            gate = lab.hold()
            asked = {
                i: lab.submit(sessions[i], 9, boundaries=[40, len(sessions[i])]) for i in order
            }
            gate.set()
            for i, outcome in asked.items():
                outcome.wait().check()
                sessions[i] += outcome.tokens() + words(rng.randrange(10_000), 6)
            lab.check()
        assert sum(cache.stats.evictions.values())
        assert cache.stats.n_tokens_cached > 0
        assert not cache.stats.faults


# --- small budgets -------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("limit", [0, 1, 63, 200, 700])
def test_a_budget_too_small_for_one_prompt_still_serves_it(shape: Shape, limit: int) -> None:
    cache = tree(shape, block=BLOCK, limit_nbytes=limit)
    with LabEngine(shape, cache=cache) as lab:
        for _ in range(2):
            ask(lab, words(1, 200), 30, boundaries=[100])
            ask(lab, words(2, 20), 3)
        assert cache.records.memory.nbytes <= limit
        assert not cache.stats.faults
        lab.check()


@EACH
def test_thirty_sessions_in_room_for_six(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ask(lab, words(0, 80), 10, boundaries=[40])
        one = lab.tree.records.memory.nbytes
    cache = tree(shape, block=BLOCK, limit_nbytes=6 * one)
    rng = random.Random(11)
    with LabEngine(shape, cache=cache, max_rows=8) as lab:
        sessions = [words(i, 40) for i in range(30)]
        for i in rng.choices(range(30), k=90):
            sessions[i] = sessions[i][-150:] if len(sessions[i]) > 200 else sessions[i]
            outcome = ask(lab, sessions[i], 10, boundaries=[40])
            sessions[i] += outcome.tokens() + words(rng.randrange(9999), 5)
            assert cache.records.memory.nbytes <= 6 * one
        assert sum(cache.stats.evictions.values())
        assert cache.stats.n_tokens_cached
        lab.check()


def test_what_was_evicted_is_committed_again() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        ids = words(1, 100)
        ask(lab, ids)
        for room in (300, 40, 0):
            lab.between_steps(partial(cache.set_room, room))
            lab.between_steps(partial(cache.set_room, 1 << 40))
            n_held = ask(lab, ids, control=CacheControl(write=False)).n_cached
            assert n_held <= room // 8
            ask(lab, ids)
            assert ask(lab, ids).n_cached == 99
            lab.check()


# --- lifetimes -----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@EACH
def test_what_has_a_lifetime_ends_with_it(shape: Shape) -> None:
    clock = Clock()
    cache = tree(shape, block=BLOCK, clock=clock)
    with LabEngine(shape, cache=cache) as lab:
        ids = words(1, 50)
        mortal = CacheControl(ttl_s=60.0)
        ask(lab, ids, control=mortal)
        clock.now = 59.0
        assert ask(lab, ids, control=CacheControl(write=False)).n_cached == 49
        clock.now = 60.0
        assert ask(lab, ids, control=mortal).n_cached == 0
        clock.now = 200.0
        lab.between_steps(partial(cache.tick, EngineLoad.NONE))
        assert records_of(cache) == []
        lab.check()


@EACH
def test_writing_again_prolongs_a_life_and_reading_does_not(shape: Shape) -> None:
    clock = Clock()
    cache = tree(shape, block=BLOCK, clock=clock)
    with LabEngine(shape, cache=cache) as lab:
        ids = words(1, 50)
        ask(lab, ids, control=CacheControl(ttl_s=60.0))
        clock.now = 50.0
        ask(lab, ids, control=CacheControl(ttl_s=60.0))
        clock.now = 100.0
        assert ask(lab, ids, control=CacheControl(write=False)).n_cached >= 48
        clock.now = 111.0
        assert ask(lab, ids, control=CacheControl(write=False)).n_cached == 0
        lab.check()


@EACH
@pytest.mark.parametrize("mortal_first", [True, False])
@pytest.mark.parametrize("n_more", [-20, 0, 1, 11])
def test_what_was_to_stay_outlives_what_was_not(
    shape: Shape, mortal_first: bool, n_more: int
) -> None:
    """One of the two has no lifetime: what it wrote stays, whichever came first and is longer."""
    clock = Clock()
    cache = tree(shape, block=BLOCK, clock=clock)
    ids = words(1, 50)
    whole = ids + reply_to(ids, 1) + words(2, 10)
    requests = [(ids, None), (whole[: 50 + n_more], 60.0)]
    with LabEngine(shape, cache=cache) as lab:
        for prompt, ttl in reversed(requests) if mortal_first else requests:
            ask(lab, prompt, 1, control=CacheControl(ttl_s=ttl))
        clock.now = 100.0
        assert ask(lab, ids, control=CacheControl(write=False)).n_cached == 49
        lab.check()


def test_a_lifetime_ends_while_the_prefix_is_in_use() -> None:
    clock = Clock()
    cache = tree(DENSE, block=BLOCK, clock=clock)
    with LabEngine(DENSE, cache=cache) as lab:
        ids = words(1, 50)
        ask(lab, ids, control=CacheControl(ttl_s=60.0))
        gate = lab.hold()
        user = lab.submit(ids + words(2, 40), 200, control=CacheControl(ttl_s=60.0))
        gate.set()
        while not user.tokens():
            lab.between_steps()
        clock.now = 1000.0
        lab.between_steps(partial(cache.tick, EngineLoad.NONE))
        lab.between_steps(partial(check_tree, cache))
        user.wait().check()
        lab.between_steps(partial(cache.tick, EngineLoad.NONE))
        lab.check()


# --- pins and clearing ---------------------------------------------------------------------


@EACH
def test_a_pinned_prefix_survives_whatever_comes(shape: Shape) -> None:
    clock = Clock()
    cache = tree(shape, block=BLOCK, limit_nbytes=12_000, clock=clock)
    with LabEngine(shape, cache=cache) as lab:
        ids = words(1, 50)
        ask(lab, ids, 1, control=CacheControl(ttl_s=60.0))
        pin = partial(admin.pin, cache, prompt_of(ids), Namespace(""), cap_nbytes=1 << 30)
        answer = lab.between_steps(pin)
        assert answer["pinned_tokens"] == 49
        assert answer["pinned_bytes"] == admin.pinned_nbytes(cache) > 0
        clock.now = 100.0
        for i in range(2, 40):
            ask(lab, words(i, 60), 4)
        assert sum(cache.stats.evictions.values())
        lab.between_steps(partial(cache.set_room, 0))
        lab.between_steps(partial(cache.set_room, 1 << 40))
        assert ask(lab, ids, 1, control=CacheControl(write=False)).n_cached == 49
        unpin = partial(admin.unpin, cache, prompt_of(ids), Namespace(""))
        assert lab.between_steps(unpin)["pinned_bytes"] == 0
        lab.between_steps(partial(cache.set_room, 0))
        assert records_of(cache) == []
        lab.check()


def test_pinning_has_a_cap_and_says_so() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        for i in (1, 2):
            ask(lab, words(i, 48), 1)
        pin = partial(admin.pin, cache, cap_nbytes=500)
        assert lab.between_steps(lambda: pin(prompt_of(words(1, 48)), Namespace("")))
        with pytest.raises(BadRequest, match="the limit is 500"):
            lab.between_steps(lambda: pin(prompt_of(words(2, 48)), Namespace("")))
        assert lab.between_steps(lambda: pin(prompt_of(words(1, 48)), Namespace("")))
        assert admin.pinned_nbytes(cache) <= 500
        lab.check()


def test_a_pinned_tail_is_not_replaced_by_a_longer_one() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        ids = words(1, 45)
        ask(lab, ids[:44], 1)
        lab.between_steps(
            partial(admin.pin, cache, prompt_of(ids[:44]), Namespace(""), cap_nbytes=1 << 30)
        )
        ask(lab, ids, 1)
        lab.between_steps(partial(cache.set_room, 0))
        lab.between_steps(partial(cache.set_room, 1 << 40))
        assert ask(lab, ids, 1, control=CacheControl(write=False)).n_cached >= 43


def test_unpinning_keeps_what_a_longer_pin_shares() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        ids = words(1, 65)
        ask(lab, ids, 1)
        for n in (33, 65):
            lab.between_steps(
                partial(admin.pin, cache, prompt_of(ids[:n]), Namespace(""), cap_nbytes=1 << 30)
            )
        lab.between_steps(partial(admin.unpin, cache, prompt_of(ids[:33]), Namespace("")))
        lab.between_steps(partial(cache.set_room, 0))
        lab.between_steps(partial(cache.set_room, 1 << 40))
        assert ask(lab, ids, 1, control=CacheControl(write=False)).n_cached == 64
        lab.check()


@EACH
def test_clearing_forgets_everything_and_disturbs_nobody(shape: Shape) -> None:
    cache = tree(shape, block=BLOCK)
    clears: list[Future[int]] = []

    def clear_in_the_midst(batch: Sequence[Delivery]) -> None:
        """Runs on the engine thread: the call is made before the next step."""
        if user is not None and not clears and user.tokens():
            clears.append(lab.engine.call(lambda _: clear()))

    def clear() -> int:
        admin.clear(cache)
        check_tree(cache)
        assert user is not None
        return len(user.tokens())

    user: Outcome | None = None
    with LabEngine(shape, cache=cache, publish=clear_in_the_midst) as lab:
        ids = words(1, 50)
        for name in ("alice", "bob"):
            ask(lab, ids, namespace=name)
        freed = lab.between_steps(partial(admin.clear, cache, Namespace("alice")))
        assert freed["freed_bytes"] > 0
        assert ask(lab, ids, namespace="alice", control=CacheControl(write=False)).n_cached == 0
        assert ask(lab, ids, namespace="bob").n_cached == 49
        gate = lab.hold()
        user = lab.submit(ids + words(3, 30), 300, namespace="bob")
        gate.set()
        user.wait().check()
        assert clears[0].result(60) < 300, "in the midst of its reply"
        whole = ids + words(3, 30) + user.tokens()
        n_cached = ask(lab, whole + words(4, 3), namespace="bob").n_cached
        assert n_cached == 0, "what was cleared away does not come back by who was at it"
        assert ask(lab, whole + words(4, 9), namespace="bob").n_cached >= len(whole)
        lab.between_steps(partial(admin.clear, cache))
        assert records_of(cache) == []
        lab.check()
