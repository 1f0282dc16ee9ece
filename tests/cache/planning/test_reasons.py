"""The reason given for not reusing more is true, according to a plain model of the cache.

The model is a flat list: every prefix that something was ever stored for, and where it is stored
now. It finds what can be resumed, and why not more, by trying every position of every prefix. The
machine sends prompts that share much, drops memory, loses and damages what a tier has, makes loads
late or too slow to be worth it, and compares the model's answers with those of requests and probes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from firn.cache.admin import control as admin
from firn.cache.parts import Part
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from firn.engine.scheduler import chunk_end
from tests.cache.lab import (
    DENSE,
    HYBRID,
    WINDOWED,
    LabLayer,
    LabRow,
    Shape,
    nodes_of,
    prompt_of,
    tree,
)
from tests.cache.test_cache_over_tier import DictWorker
from tests.cache.test_cache_tree import BASES, BLOCK, CHUNK
from tests.cache.test_decisions import Hasty, Refusing

EVERYONE = Namespace("")
SAID_OF = {"read: bad checksum": "damaged", "read: not stored": "evicted"}
Tokens = tuple[int, ...]


@dataclass
class Stored:
    """A prefix that ends with a block or a tail, and where its parts are now."""

    tokens: Tokens
    start: int
    memory: set[Part] = field(default_factory=set)
    tier: set[Part] = field(default_factory=set)

    def has(self, part: Part, *, loads: bool) -> bool:
        return part in self.memory or (loads and part in self.tier)


@dataclass
class Plain:
    """All that is stored now, and every prefix that ever was."""

    shape: Shape
    grid: int
    now: list[Stored]
    ever: set[tuple[Tokens, int]]

    def best(self, ids: Tokens, *, loads: bool) -> int:
        """The last position at which the prompt can resume."""
        positions = range(len(ids) - 1, 0, -1)
        return next((p for p in positions if self.resumes(ids, p, loads=loads)), 0)

    def resumes(self, ids: Tokens, p: int, *, loads: bool) -> bool:
        if p % self.grid:
            return False
        return any(self._resumes_in(s, ids, p, loads=loads) for s in self.now)

    def _resumes_in(self, last: Stored, ids: Tokens, p: int, *, loads: bool) -> bool:
        if not last.start < p <= len(last.tokens) or last.tokens[:p] != ids[:p]:
            return False
        if (self.grid > 1 or self.shape.state) and p != len(last.tokens):
            return False
        above = [s for s in self.now if len(s.tokens) % BLOCK == 0 and len(s.tokens) <= last.start]
        chain = [s for s in above if s.tokens == ids[: len(s.tokens)]] + [last]
        if len(chain) != last.start // BLOCK + 1:
            return False
        needed = [(s, Part.PAGES) for s in chain if self.shape.pages]
        needed += [(s, Part.WINDOW) for s in chain if len(s.tokens) > p - self.shape.window]
        needed += [(last, Part.STATE)] if self.shape.state else []
        wanted = set(self.shape.parts)
        return all(s.has(part, loads=loads) for s, part in needed if part in wanted)

    def n_shared(self, ids: Tokens) -> int:
        return max((_n_same(s.tokens, ids) for s in self.now), default=0)

    def reasons(self, ids: Tokens, n: int, *, is_refusing: bool) -> set[str]:
        """The reasons that may be given for a prompt that resumes at n, with no load under way."""
        last = len(ids) - 1
        if n >= last:
            return {""}
        if is_refusing and self.best(ids, loads=True) > n:
            return {"slower to load"}
        shared = self.n_shared(ids)
        limit = min(shared, last)
        if n >= last - last % self.grid or limit - limit % self.grid <= n < limit:
            return {"whole chunks only"}
        if n < limit:
            return {"no state checkpoint" if self._is_covered(ids, shared) else "evicted"}
        return self._beyond(ids, shared)

    def _is_covered(self, ids: Tokens, shared: int) -> bool:
        whole = [s for s in self.now if len(s.tokens) % BLOCK == 0 and len(s.tokens) <= shared]
        path = [s for s in whole if s.tokens == ids[: len(s.tokens)]]
        return self.shape.state and all(s.has(Part.PAGES, loads=True) for s in path)

    def _beyond(self, ids: Tokens, shared: int) -> set[str]:
        """Everything stored was used: there never was more, or it was evicted."""
        diverges = any(
            len(s.tokens) > shared and s.tokens[:shared] == ids[:shared] for s in self.now
        )
        plain = f"{'diverged at' if diverges else 'new from'} token {shared}" if shared else "cold"
        more = {t for t, _ in self.ever if _n_same(t, ids) > shared}
        if not more:
            return {plain}
        start = shared - shared % BLOCK
        whole = ids[: start + BLOCK]
        is_known = shared == start or (len(whole) == start + BLOCK and (whole, start) in self.ever)
        return {"evicted"} if is_known else {"evicted", plain}


def _n_same(a: Tokens, b: Tokens) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class Reasons(RuleBasedStateMachine):
    shape: Shape
    exact = False

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        ticks = count()
        self.tree = tree(
            self.shape,
            block=BLOCK,
            exact_chunk=CHUNK if self.exact else 0,
            clock=lambda: self.now,
            wall=lambda: 1e9 + next(ticks),
        )
        self.io = DictWorker(Part.PAGES)
        self.ever: set[tuple[Tokens, int]] = set()
        self.tree.add_tier("ssd", self.io, namespaces=[EVERYONE])
        self.decide(refusing=False)

    @rule(
        base=st.integers(0, 1),
        n=st.integers(1, 60),
        tail=st.lists(st.integers(1, 3), max_size=2),
        read=st.sampled_from([True] * 6 + [False]),
        is_late=st.sampled_from([False, False, True]),
    )
    def ask(self, base: int, n: int, tail: list[int], read: bool, is_late: bool) -> None:
        ids = BASES[base][:n] + tail
        plain = self.plain()
        before = self.probe(tuple(ids), plain)
        bounds = sorted({len(ids) // 3, len(ids) - 2} - {0, -1})
        cursor = self.tree.open(prompt_of(ids, bounds), EVERYONE, CacheControl(read=read))
        n_hoped = cursor.loads.loading.n_tokens if cursor.loads.loading else 0
        failed = set()
        if not is_late:
            failed = self.run_orders()
        restored = cursor.restore()
        n_cached = 0 if restored is None else restored.n_tokens
        self.check(tuple(ids), cursor, n_cached, before, failed=failed, n_hoped=n_hoped)
        self.compute(ids, cursor, restored)
        self.run_orders()
        self.tree.tick(EngineLoad.NONE)
        self.run_orders()
        self.ever |= {(s.tokens, s.start) for s in self.plain().now}

    def probe(self, ids: Tokens, plain: Plain) -> dict[str, Any]:
        told = admin.probe(self.tree, prompt_of(ids), EVERYONE)
        assert told["cached_tokens"] == plain.best(ids, loads=not self.is_refusing)
        assert told["shared_tokens"] == plain.n_shared(ids)
        allowed = plain.reasons(ids, told["cached_tokens"], is_refusing=self.is_refusing)
        assert told["reason"] in allowed
        return told

    def check(
        self,
        ids: Tokens,
        cursor: Any,
        n_cached: int,
        before: dict[str, Any],
        *,
        failed: set[str],
        n_hoped: int,
    ) -> None:
        """Check the request's own reason, which takes into account what became of its loads."""
        reason = cursor.admission.why
        assert cursor.admission.n_cached == n_cached
        if not cursor.request.control.read:
            assert (n_cached, reason) == (0, "reading off")
        elif n_cached >= len(ids) - 1:
            assert reason == ""
        elif cursor.racing:
            assert (reason, n_cached < n_hoped) == ("not yet loaded", True)
        elif failed and n_cached < n_hoped:
            assert reason in failed
        else:
            assert (n_cached, reason) == (before["cached_tokens"], before["reason"])

    def compute(self, ids: list[int], cursor: Any, restored: Any) -> None:
        row = LabRow(LabLayer([[]], self.shape))
        if restored is not None:
            restored.fill([row.layer])
            row.n_tokens = restored.n_tokens
        while row.n_tokens < len(ids) - 1:
            stops = cursor.stops()
            end = chunk_end(row.n_tokens, len(ids) - 1, chunk=CHUNK, stops=stops)
            row.consume(ids[row.n_tokens : end])
            cursor.commit(row)
        row.consume(ids[-1:])
        cursor.close(row)

    def run_orders(self) -> set[str]:
        """Run all queued orders and those they cause. Returns the reasons for failed reads."""
        while self.io.orders:
            self.io.orders.popleft()("well")
            self.tree.tick(EngineLoad.DECODING)
        faults = set(self.tree.stats.faults)
        self.tree.stats.faults.clear()
        return {SAID_OF[fault] for fault in faults}

    @rule(nbytes=st.sampled_from([0, 100, 400, 1000]), share=st.sampled_from([0.0, 0.2, 1.0]))
    def drop(self, nbytes: int, share: float) -> None:
        """From memory, and a share of the rest from the tier."""
        self.tree.set_room(nbytes)
        self.run_orders()
        self.tree.set_room(1 << 40)
        names = list(self.io.stored)
        self.io.gone = names[len(names) - int(share * len(names)) :]
        self.io.delete(self.io.gone)
        self.now += 11.0
        self.tree.tick(EngineLoad.NONE)
        self.tree.tick(EngineLoad.NONE)

    @precondition(lambda self: self.io.stored)
    @rule(pick=st.integers(0, 99), is_damage=st.booleans(), n=st.integers(1, 3))
    def lose(self, pick: int, is_damage: bool, n: int) -> None:
        """Lose or damage records without the cache noticing yet."""
        for name in list(self.io.stored)[pick % len(self.io.stored) :][:n]:
            if is_damage:
                self.io.damaged.add(name)
            else:
                del self.io.stored[name]

    @rule(refusing=st.booleans())
    def decide(self, refusing: bool) -> None:
        self.is_refusing = refusing
        self.tree.records.estimates = Refusing() if refusing else Hasty()

    def plain(self) -> Plain:
        now = []
        for node in nodes_of(self.tree.records.tree):
            path = [*node.path()][::-1]
            tokens = tuple(int(t) for n in path for t in n.tokens)
            stored = Stored(tokens, node.start)
            stored.memory = {p for p, r in node.records.items() if r.arrays is not None}
            stored.tier = {p for p, r in node.records.items() if r.stored}
            now.append(stored)
        return Plain(self.shape, CHUNK if self.exact else 1, now, self.ever)


@pytest.mark.parametrize("exact", [False, True], ids=["full", "exact"])
@pytest.mark.parametrize("shape", [DENSE, WINDOWED, HYBRID], ids=["dense", "windowed", "hybrid"])
def test_reasons_by_a_plain_model(shape: Shape, exact: bool) -> None:
    run_state_machine_as_test(
        type("M", (Reasons,), {"shape": shape, "exact": exact}),
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
