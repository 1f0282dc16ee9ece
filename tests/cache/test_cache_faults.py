"""Any fault inside the cache is a counted miss: the answers stay right, and nothing stays leased.

A script reads, grows, branches, evicts and forks. In each run, one call to a codec or inside the
cache is made to fail: of each function, up to N_OF_EACH of its calls.

Slow: the script runs some dozens of times for each kind of layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from firn.cache import commit, copies
from firn.cache.admin import control as admin
from firn.cache.arrays import payload
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.core.ports import Cursor
from firn.core.values import CacheControl, Namespace, Sampling
from tests.cache.lab import (
    ALL_KINDS,
    DENSE,
    HYBRID,
    WINDOW_AND_STATE,
    LabEngine,
    LabLayer,
    LabRow,
    Shape,
    check_tree,
    n_leases,
    records_of,
    tree,
)
from tests.cache.lab import SHAPES as lab_shapes
from tests.cache.lab import prompt_of as lab_prompt
from tests.hash_engine import Outcome
from tests.hash_runner import Faults, HashRow, prompt_of

CALLS = {
    "memory": ("added", "make_room", "let_go"),
    "tree": ("child", "prune", "use"),
    "ledger": ("add", "hold", "release", "forget"),
    "records": ("keep", "used", "extend_life", "forget"),
    "index": ("forget", "remove_lost"),
}


class Injected(Exception):
    pass


class Saboteur:
    """Counts the calls of everything in CALLS and of the codecs; the `at`-th one raises."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.n_calls = 0
        self.where: list[str] = []
        self.armed = True

    def call(self, where: str) -> None:
        if not self.armed:
            return
        self.n_calls += 1
        self.where.append(where)
        if self.n_calls - 1 == self.at:
            raise Injected(f"call {self.at}: {where}")

    def sabotage(self, cache: PrefixCache) -> None:
        records = cache.records
        owners = {
            "memory": records.memory,
            "tree": records.tree,
            "ledger": records.ledger,
            "records": records,
            "index": records.index,
        }
        for owner, names in CALLS.items():
            for name in names:
                self._wrap(owners[owner], name, f"{owner}.{name}")

    def _wrap(self, owner: Any, name: str, label: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.call(label)
            return real(*args, **kwargs)

        setattr(owner, name, call)


def script(lab: LabEngine) -> list[Outcome]:
    """Requests in a fixed order, so that the same calls are made in the same order each time."""
    said: list[Outcome] = []

    def ask(ids: list[int], n_reply: int = 12, **options: Any) -> Outcome:
        outcome = lab.submit(ids, n_reply, **options).wait()
        said.append(outcome)
        return outcome

    first = prompt_of(1, 45)
    reply = ask(first, boundaries=[20, 40]).tokens()
    ask(first)
    ask(first + reply + prompt_of(2, 10), n=2, sampling=Sampling(temperature=1.0, seed=4))
    ask(first[:27] + prompt_of(3, 20), boundaries=[20])
    ask(prompt_of(4, 30), control=CacheControl(ttl_s=5.0))
    gate = lab.hold()
    together = [lab.submit(prompt_of(5, 40), 6) for _ in range(2)]
    gate.set()
    said.extend(o.wait() for o in together)
    ask(first)
    return said


def cache_of(shape: Shape) -> PrefixCache:
    return tree(shape, block=8, limit_nbytes=2400 if shape.state else 800)


def calls_of(shape: Shape) -> dict[str, list[int]]:
    """The numbers of the calls that the script makes, by what is called."""
    saboteur = Saboteur()
    shape = replace(shape, fault=saboteur.call)
    cache = cache_of(shape)
    saboteur.sabotage(cache)
    with LabEngine(shape, cache=cache) as lab:
        for outcome in script(lab):
            outcome.check()
        saboteur.armed = False
        assert sum(cache.stats.evictions.values()), "the script must make the pool evict"
        assert not cache.stats.faults
        lab.check()
    numbers: dict[str, list[int]] = {}
    for number, where in enumerate(saboteur.where):
        numbers.setdefault(where, []).append(number)
    return numbers


SHAPES = {"dense": DENSE, "hybrid": HYBRID, "all kinds": ALL_KINDS, "no pages": WINDOW_AND_STATE}


BOOKS = {
    "memory.added",
    "memory.let_go",
    "ledger.hold",
    "ledger.release",
    "ledger.forget",
    "tree.prune",
}
BOOKS |= {"tree.use", "records.forget", "records.used", "index.forget", "index.remove_lost"}
"""Calls that make half of an entry in the books: if one fails, only the books are wrong."""
N_OF_EACH = 3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_some_calls_of_every_function_fail(shape: Shape, caplog: pytest.LogCaptureFixture) -> None:
    calls = calls_of(shape)
    assert {"cut", "fill", "memory.make_room", "tree.child", "ledger.add"} <= set(calls)
    some = [at for numbers in calls.values() for at in numbers[:: len(numbers) // N_OF_EACH + 1]]
    for at in some:
        saboteur = Saboteur(at)
        broken = replace(shape, fault=saboteur.call)
        cache = cache_of(broken)
        saboteur.sabotage(cache)
        caplog.clear()
        with LabEngine(broken, cache=cache) as lab:
            said = script(lab)
            saboteur.armed = False
            where = saboteur.where[at]
            for outcome in said:
                outcome.check()
            assert sum(cache.stats.faults.values()) == 1, where
            assert sum("the cache failed" in r.message for r in caplog.records) == 1, where
            assert lab.between_steps(partial(n_leases, cache)) == 0, where
            assert lab.leftovers() == {}, where
            assert lab.n_deaths == 0, where
            if where not in BOOKS:
                lab.between_steps(partial(check_tree, cache))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("where", ["cut", "fill"])
def test_a_codec_that_always_fails_costs_the_reuse_and_nothing_else(
    shape: Shape, where: str
) -> None:
    def fault(at: str) -> None:
        if at == where:
            raise Injected(at)

    broken = replace(shape, fault=fault)
    cache = cache_of(broken)
    with LabEngine(broken, cache=cache) as lab:
        for outcome in script(lab):
            outcome.check()
            assert outcome.n_cached == 0
        assert cache.stats.faults
        assert not cache.stats.hits, "what could not be filled was no hit"
        assert cache.stats.n_tokens_cached == sum(cache.stats.tokens_by_tier.values()) == 0
        lab.check()
        if where == "cut":
            assert records_of(cache) == []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_records_that_could_not_be_computed_are_not_kept(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device runs out of memory when copies are evaluated: by then they are in the tree."""
    fails = [False]

    def evaluate(payloads: Any) -> None:
        if fails[0]:
            raise RuntimeError("out of memory")
        payload.evaluate(payloads)

    for module in (commit, copies):
        monkeypatch.setattr(module, "evaluate", evaluate)
    cache = tree(shape, block=8)
    with LabEngine(shape, cache=cache, chunk=64) as lab:
        ids = prompt_of(1, 45)
        lab.submit(ids[:20], 8).wait().check()
        before = set(lab.between_steps(partial(records_of, cache)))
        fails[0] = True
        lab.submit(ids, 8).wait().check()
        assert sum(cache.stats.faults.values()) == 2, (
            "it may have been a late fault of the device, so the request is computed again, once"
        )
        lab.check()
        assert set(lab.between_steps(partial(records_of, cache))) <= before
        fails[0] = False
        lab.submit(ids, 8).wait().check()
        assert lab.submit(ids, 8).wait().n_cached == 44
        lab.check()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("where", ["extend_life", "reused", "used"])
def test_a_jump_that_fails_leaves_the_request_where_it_was(
    shape: Shape, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later commits are stored at its own position, not where it would have jumped to."""
    cache, ids = tree(shape, block=8), prompt_of(1, 65)
    prompt = replace(lab_prompt(ids), boundaries=(20, 44))

    def opened() -> tuple[Cursor, LabRow]:
        cursor = cache.open(prompt, Namespace(""), CacheControl())
        assert cursor.restore() is None
        return cursor, LabRow(LabLayer([[]], shape))

    def read(cursor: Cursor, row: LabRow, end: int) -> None:
        for stop in sorted({*range(8, end + 1, 8), *(p for p in cursor.stops() if p < end)}):
            row.consume(ids[row.n_tokens : stop])
            cursor.commit(row)

    def fail(*args: object) -> None:
        raise Injected(where)

    (late, late_row), (first, first_row) = opened(), opened()
    read(first, first_row, 64)
    with monkeypatch.context() as broken:
        broken.setattr(cache.records, where, fail)
        assert late.advance(0) is None
    assert cache.stats.faults == {"advance": 1}
    read(late, late_row, 24)
    check_tree(cache)
    for cursor, row in ((late, late_row), (first, first_row)):
        cursor.close(row)
    check_tree(cache)
    assert n_leases(cache) == 0


# --- evicted between lookup and use --------------------------------------------------------


ALL_SHAPES = pytest.mark.parametrize("shape", lab_shapes.values(), ids=lab_shapes)


@ALL_SHAPES
@pytest.mark.parametrize("n", [40, 43])
def test_evicted_between_match_and_fill(shape: Shape, n: int) -> None:
    """Leases hold the chain; an eviction despite them is noticed, never filled with other data."""
    cache = tree(shape, block=8)
    squeeze = [False]

    def start(restored: Any) -> None:
        if restored is not None and squeeze[0]:
            cache.set_room(0)
            cache.set_room(1 << 40)

    with LabEngine(shape, Faults(start=start), cache=cache) as lab:
        ids = prompt_of(1, n)
        lab.submit(ids, 8).wait().check()
        squeeze[0] = True
        outcome = lab.submit(ids + prompt_of(2, 9), 8).wait()
        outcome.check()
        squeeze[0] = False
        assert outcome.n_cached > 0 or sum(cache.stats.faults.values()) == 1
        lab.submit(ids + prompt_of(3, 9), 8).wait().check()
        lab.check()


def test_leases_hold_pages_between_match_and_fill() -> None:
    cache = tree(DENSE, block=8)
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(prompt_of(1, 41), 1).wait().check()
    cursor = cache.open(lab_prompt(prompt_of(1, 45)), Namespace(""), CacheControl())
    restored = cursor.restore()
    assert restored is not None
    assert restored.n_tokens == 41
    cache.records.memory.shrink_to(0)
    assert [r.node.end for r in records_of(cache)] == [8, 16, 24, 32, 40], "the whole blocks"
    layer = LabLayer([[]], DENSE)
    restored.fill([layer])
    assert layer.rows[0] == prompt_of(1, 41), "and what was matched of the next one"
    cursor.close(None)
    assert n_leases(cache) == 0
    cache.records.memory.shrink_to(0)
    assert records_of(cache) == []


# --- parts that disagree -------------------------------------------------------------------


@pytest.mark.parametrize("part", list(Part))
def test_a_part_that_was_evicted_shortens_the_match_of_all(part: Part) -> None:
    """Attention and recurrent state agree on the position, or it is a miss."""
    cache = tree(ALL_KINDS, block=8)
    ids = prompt_of(1, 60)
    with LabEngine(ALL_KINDS, cache=cache) as lab:
        for n in (30, 45, 60):
            lab.submit(ids[:n], 4, boundaries=[n - 3]).wait().check()
        while records := [r for r in records_of(cache) if r.part is part]:
            deepest = max(records, key=lambda r: r.node.end)
            lab.between_steps(partial(cache.records._evict, deepest))
            outcome = lab.submit(ids, 4, control=CacheControl(write=False)).wait()
            outcome.check()
            assert not cache.stats.faults
            lab.check()
        assert outcome.n_cached == 0


# --- cancelled at random -------------------------------------------------------------------


class Crowd:
    """Clients that go away, or stop a choice, at random moments of the engine's work."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.open: list[Outcome] = []
        self.cancelled: set[str] = set()
        self.lab: LabEngine | None = None
        self.faults = Faults(
            start=self.maybe, prefill=self.maybe, finish_chunk=self.maybe, launch=self.maybe,
            collect=self.maybe, join=self.maybe,
        )  # fmt: skip

    def maybe(self, *_: object) -> None:
        if self.lab is not None and self.open and self.rng.random() < 0.06:
            outcome = self.open.pop(self.rng.randrange(min(len(self.open), 8)))
            if self.rng.random() < 0.85:
                self.cancelled.add(outcome.job.id)
                self.lab.cancel(outcome)
            else:
                choice = self.rng.randrange(outcome.job.n)
                self.lab.engine.stop_choice(outcome.job.id, choice)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cancels_at_random_moments_leave_no_lease(shape: Shape) -> None:
    crowd = Crowd(seed=3)
    rng = random.Random(1)
    cache = tree(shape, block=8, limit_nbytes=20_000)
    n_right = 0
    with LabEngine(shape, crowd.faults, cache=cache, max_rows=6, chunk=8) as lab:
        crowd.lab = lab
        for _ in range(4):
            gate = lab.hold()
            outcomes = []
            for i in range(70):
                ids = prompt_of(rng.randrange(5), rng.randint(1, 60))
                outcomes.append(
                    lab.submit(
                        ids + prompt_of(100 + rng.randrange(3), rng.randint(1, 5)),
                        rng.randint(1, 20),
                        n=rng.choice([1, 1, 2, 3]),
                        sampling=Sampling(temperature=1.0, seed=i),
                        boundaries=[len(ids)],
                        namespace=rng.choice(["a", "b"]),
                        control=CacheControl(ttl_s=rng.choice([None, None, 30.0])),
                    )
                )
            crowd.open[:] = outcomes
            gate.set()
            for outcome in outcomes:
                while outcome.job.id not in crowd.cancelled and not outcome.finished.wait(0.001):
                    pass
            lab.between_steps(crowd.open.clear)
            lab.check()
            for outcome in outcomes:
                for choice in range(outcome.job.n):
                    said = outcome.tokens(choice)
                    assert said == outcome.expected(choice)[: len(said)]
                    n_right += len(said)
        lab.between_steps(partial(admin.clear, cache))
        assert records_of(cache) == []
        assert not any(len(r.children) for r in cache.records.tree.roots())
        assert not cache.stats.faults
    assert len(crowd.cancelled) > 100
    assert n_right > 750


def test_a_cancelled_request_leaves_blocks_that_can_be_used() -> None:
    gone: list[Outcome] = []
    n_chunks = [0]

    def prefill(row: HashRow, chunk: object) -> None:
        n_chunks[0] += 1
        if n_chunks[0] == 3:
            lab.cancel(gone[0])

    for shape in lab_shapes.values():
        n_chunks[0] = 0
        gone.clear()
        with LabEngine(shape, Faults(prefill=prefill), cache=tree(shape, block=8), chunk=16) as lab:
            gate = lab.hold()
            ids = prompt_of(1, 200)
            gone.append(lab.submit(ids, 20))
            gate.set()
            while n_chunks[0] < 3:
                lab.between_steps()
            again = lab.submit(ids, 4).wait()
            again.check()
            assert again.n_cached == 48
            lab.check()
