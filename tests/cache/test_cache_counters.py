"""Counters that do not lie: a reference simulator, written here, predicts every one of them.

The simulator knows prompts and replies as plain tuples, and the rules of the design: blocks, tails,
states. It shares no code with the tree; `checkpoints.due` tells it where states are due.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from firn.cache.admin import control as admin
from firn.cache.parts import Part
from firn.cache.planning import checkpoints
from firn.core.events import Admitted
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import (
    ALL_KINDS,
    DENSE,
    HYBRID,
    RECURRENT,
    WINDOWED,
    LabEngine,
    Shape,
    prompt_of,
    records_of,
    tree,
)
from tests.hash_runner import prompt_of as words

BLOCK = 8
Tokens = tuple[int, ...]


def common(a: Tokens, b: Tokens) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@dataclass
class Simulator:
    """One namespace's share of the cache, without a limit."""

    shape: Shape
    nodes: set[Tokens] = field(default_factory=set)
    """Each node as all the tokens up to its end."""
    states: set[Tokens] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    seconds_saved: float = 0.0

    def look_up(self, ids: Tokens, *, read: bool) -> int:
        n_shared = max((common(ids, n) for n in self.nodes), default=0) if read else 0
        limit = min(n_shared, len(ids) - 1)
        n_cached = limit
        if self.shape.state:
            fits = [len(s) for s in self.states if len(s) <= limit and ids[: len(s)] == s]
            n_cached = max(fits, default=0) if read else 0
        self.n_shared = n_shared
        self.counts["lookups"] += 1
        self.counts["tokens.prompt"] += len(ids)
        self.counts["tokens.cached"] += n_cached
        self.seconds_saved += 0.001 * n_cached
        if n_cached:
            self.counts[f"hits.{self._kind(ids, n_cached)}"] += 1
        if n_cached < len(ids) - 1 or not n_cached:
            why = self._why(ids, n_cached, limit, read)
            self.counts[f"{'shortfalls' if n_cached else 'misses'}.{why}"] += 1
        return n_cached

    def _kind(self, ids: Tokens, n_cached: int) -> str:
        if n_cached == len(ids) - 1:
            return "whole"
        longer = [n for n in self.nodes if len(n) > n_cached and n[:n_cached] == ids[:n_cached]]
        return "branching" if longer else "growing"

    def _why(self, ids: Tokens, n_cached: int, limit: int, read: bool) -> str:
        if not read:
            return "reading off"
        if not self.n_shared:
            return "cold"
        if n_cached < limit:
            return "no state checkpoint"
        longer = [n for n in self.nodes if len(n) > self.n_shared]
        return (
            "diverged" if any(n[: self.n_shared] == ids[: self.n_shared] for n in longer) else "new"
        )

    def keep(self, tokens: Tokens, due: Iterable[int]) -> None:
        """The row has read these tokens; a state was due at some places, and at the end."""
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self._keep_node(tokens[:end])
        if self.shape.state:
            for position in [*due, len(tokens)]:
                self._keep_state(tokens[:position])
        elif len(tokens) % BLOCK and not self._covered(tokens):
            self._keep_node(tokens)

    def _keep_state(self, tokens: Tokens) -> None:
        if tokens not in self.nodes:
            self.nodes.add(tokens)
            self._count(tokens)
        if tokens not in self.states:
            self.states.add(tokens)
            self.counts["commits.state"] += 1

    def _keep_node(self, tokens: Tokens) -> None:
        if tokens not in self.nodes:
            self.nodes.add(tokens)
            self._count(tokens)
        start = (len(tokens) - 1) // BLOCK * BLOCK
        for tail in [tokens[:i] for i in range(start + 1, len(tokens))]:
            if tail in self.nodes and tail not in self.states:
                self.nodes.discard(tail)

    def _count(self, tokens: Tokens) -> None:
        for part, has in (("pages", self.shape.pages), ("window", self.shape.window)):
            if has:
                self.counts[f"commits.{part}"] += 1

    def _covered(self, tokens: Tokens) -> bool:
        start = (len(tokens) - 1) // BLOCK * BLOCK
        return any(
            n[: len(tokens)] == tokens and (len(n) - 1) // BLOCK * BLOCK == start
            for n in self.nodes
        )


def seen(stats: dict[str, object]) -> Counter[str]:
    """The cache's own numbers, flattened to the simulator's names."""
    totals: Counter[str] = Counter()
    for name, value in stats.items():
        if isinstance(value, dict):
            for key, n in value.items():
                if isinstance(n, int):
                    totals[f"{name}.{key}"] += n
        elif isinstance(value, int):
            totals[name] += value
    return totals


SHAPES = {
    "dense": DENSE,
    "windowed": WINDOWED,
    "hybrid": HYBRID,
    "recurrent": RECURRENT,
    "all kinds": ALL_KINDS,
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_counter_is_what_the_simulator_says(shape: Shape, seed: int) -> None:
    rng = random.Random(seed)
    cache = tree(shape, block=BLOCK)
    simulators = {name: Simulator(shape) for name in ("alice", "bob")}
    chats: list[Tokens] = []
    with LabEngine(shape, cache=cache, chunk=16) as lab:
        for i in range(90):
            ids = _next_prompt(rng, chats, i)
            name = rng.choice(list(simulators))
            read, write = rng.random() < 0.9, rng.random() < 0.85
            boundaries = sorted({len(ids) // 3, max(len(ids) - 3, 0)} - {0})
            outcome = lab.submit(
                ids,
                rng.randint(1, 20),
                boundaries=boundaries,
                namespace=name,
                control=CacheControl(read=read, write=write),
            ).wait()
            outcome.check()
            simulator = simulators[name]
            assert outcome.n_cached == simulator.look_up(ids, read=read), f"request {i}"
            whole = (*ids, *outcome.tokens())
            if write:
                due = checkpoints.due(
                    boundaries,
                    len(ids),
                    n_restored=outcome.n_cached,
                    n_shared=simulator.n_shared,
                )
                # The first token is collected immediately: a one-token reply is never fed back.
                simulator.keep(whole if len(outcome.tokens()) > 1 else ids, due)
            chats.append(whole)
            (admission,) = outcome.of(Admitted)
            assert admission.tiers == (
                (("memory", admission.n_cached),) if admission.n_cached else ()
            )
        lab.check()
        everything = lab.between_steps(lambda: admin.stats(cache, None))
        by_name = {
            name: lab.between_steps(lambda name=name: admin.stats(cache, Namespace(name)))
            for name in simulators
        }
    total = sum((s.counts for s in simulators.values()), Counter())
    check_counts(everything, total)
    assert everything["seconds_saved"] == pytest.approx(
        sum(s.seconds_saved for s in simulators.values()), abs=0.002
    )
    for name, simulator in simulators.items():
        check_held(by_name[name], simulator)
        check_counts(by_name[name], simulator.counts)
    assert everything["memory"]["records"] == len(records_of(cache))
    assert everything["memory"]["used_bytes"] == cache.records.memory.nbytes


def _next_prompt(rng: random.Random, chats: list[Tokens], i: int) -> Tokens:
    """A new text, or an old one again: grown, cut short, branched off, or as it was."""
    if not chats or rng.random() < 0.15:
        return tuple(words(i, rng.randint(1, 60)))
    old = rng.choice(chats[-12:])
    cut = rng.choice([len(old), rng.randint(1, len(old)), min(len(old), rng.randint(1, 5) * BLOCK)])
    return (*old[:cut], *words(1000 + i, rng.choice([0, 1, 3, 20])))


def check_counts(counts: dict[str, object], want: Counter[str]) -> None:
    mine = seen(counts)
    kinds = ("lookups", "hits.", "misses.", "shortfalls.", "evictions.", "dropped.", "faults.")
    kinds += ("tokens.prompt", "tokens.cached", "commits.")
    picked = {k: n for k, n in mine.items() if k.startswith(kinds) and n}
    assert picked == {k: n for k, n in want.items() if n}


def check_held(stats: dict[str, object], simulator: Simulator) -> None:
    """What is in memory, by part."""
    memory = stats["memory"]
    assert isinstance(memory, dict)
    shape = simulator.shape
    n_tokens = sum((len(n) - 1) % BLOCK + 1 for n in simulator.nodes)
    want = {
        Part.PAGES: (len(simulator.nodes), 8 * n_tokens) if shape.pages else (0, 0),
        Part.WINDOW: (len(simulator.nodes), 4 * n_tokens) if shape.window else (0, 0),
        Part.STATE: (
            len(simulator.states),
            sum(4 * len(s) + shape.state_nbytes for s in simulator.states),
        ),
    }
    for part, (n_records, nbytes) in want.items():
        assert memory["parts"][part.value] == {"records": n_records, "bytes": nbytes}
    assert memory["records"] == sum(n for n, _ in want.values())
    assert memory["used_bytes"] == sum(n for _, n in want.values())


# --- the pieces that no simulator is needed for --------------------------------------------


def test_probing_counts_nothing_and_says_what_a_request_would_get() -> None:
    cache = tree(HYBRID, block=BLOCK)
    with LabEngine(HYBRID, cache=cache) as lab:
        ids = words(1, 60)
        lab.submit(ids, 8, boundaries=[30]).wait().check()
        before = lab.between_steps(lambda: admin.stats(cache, None))
        probes = {
            n: lab.between_steps(
                lambda n=n: admin.probe(cache, prompt_of(ids[:n] + words(9, 10)), Namespace(""))
            )
            for n in (0, 20, 45)
        }
        assert lab.between_steps(lambda: admin.stats(cache, None)) == before
        assert [probes[n]["cached_tokens"] for n in (0, 20, 45)] == [0, 0, 30]
        assert [probes[n]["shared_tokens"] for n in (0, 20, 45)] == [0, 20, 45]
        assert probes[0]["reason"] == "cold"
        assert probes[45]["reason"] == "no state checkpoint"
        other = lab.between_steps(lambda: admin.probe(cache, prompt_of(ids), Namespace("other")))
        assert (other["cached_tokens"], other["reason"]) == (0, "cold")
        lab.check()


def test_a_namespace_sees_nothing_of_the_others() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(words(1, 60), 8, namespace="alice").wait().check()
        lab.submit(words(1, 60), 8, namespace="alice").wait().check()
        for name in ("bob", ""):
            view = lab.between_steps(lambda name=name: admin.stats(cache, Namespace(name)))
            assert {k: n for k, n in seen(view).items() if n} == {
                "enabled": 1,
                "block_tokens": BLOCK,
            }
            assert view["memory"]["used_bytes"] == 0
            assert "limit_bytes" not in view["memory"]
            assert "room_bytes" not in view["memory"]


def test_what_happens_to_records_and_requests_is_counted_for_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is too small for what they store, and one request of alice's fails in the cache."""
    cache = tree(DENSE, block=BLOCK, limit_nbytes=40 * 8 * BLOCK)
    names = ("alice", "bob")
    with LabEngine(DENSE, cache=cache, chunk=16) as lab:
        for i, name in enumerate(["alice", "bob", "bob"] * 4):
            lab.submit(words(i, 24 * BLOCK), 2, namespace=name).wait().check()
        lab.submit(words(99, 80 * BLOCK), 2, namespace="bob").wait().check()
        with monkeypatch.context() as patch:
            patch.setattr(cache.restorer, "match", lambda cursor: 1 // 0)
            lab.submit(words(1, 60), 2, namespace="alice").wait().check()
        everything = lab.between_steps(lambda: admin.stats(cache, None))
        own = {
            name: lab.between_steps(lambda name=name: admin.stats(cache, Namespace(name)))
            for name in names
        }
        lab.check()
    for kind in ("commits", "evictions", "dropped", "faults"):
        assert everything[kind], kind
        total = sum((Counter(own[name][kind]) for name in names), Counter())
        assert total == Counter(everything[kind]), kind
    assert 0 < own["alice"]["evictions"]["pages"] < own["bob"]["evictions"]["pages"]
    assert (own["alice"]["dropped"], own["bob"]["dropped"]["no room"] > 0) == ({}, True)
    assert (own["alice"]["faults"], own["bob"]["faults"]) == ({"restore": 1}, {})


def test_two_prompts_at_once_count_what_one_took_over_from_the_other() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache, chunk=16) as lab:
        gate = lab.hold()
        both = [lab.submit(words(1, 161), 4) for _ in range(2)]
        gate.set()
        for outcome in both:
            outcome.wait().check()
        tokens = cache.stats.view()["tokens"]
        assert tokens["prompt"] == 322
        assert lab.runner.n_prefilled == 320 - tokens["advanced"]
        assert tokens["cached"] == tokens["advanced"]
        lab.check()


def test_every_miss_has_a_reason() -> None:
    """Even that of a one-token prompt, of which nothing can be reused."""
    with LabEngine(DENSE, cache=tree(DENSE, block=BLOCK)) as lab:
        for _ in range(2):
            lab.submit([5], 1).wait().check()
        assert dict(lab.tree.stats.misses) == {"one token": 2}
