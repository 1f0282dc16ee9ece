"""The whole tree under random use: whatever requests, pins, lifetimes and limits do to it.

The machine drives the cache as the engine does (open, restore, advance, commit, fork, close) with
rows of plain tokens. After every step the tree must be in order, and memory's books the sum of the
records. Every lookup must find what trying every position of every chain finds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from firn.cache.admin import control as admin
from firn.cache.cursor import CacheCursor
from firn.cache.parts import Part
from firn.cache.tree import Node, Record
from firn.core.errors import BadRequest
from firn.core.keys import key_tokens
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from firn.engine.scheduler import chunk_end
from tests.cache.lab import (
    SHAPES,
    LabLayer,
    LabRow,
    Shape,
    check_tree,
    longest,
    nodes_of,
    prompt_of,
    records_of,
    tree,
)

BLOCK, CHUNK = 4, 8
NAMES = ("alice", "bob")
BASES = [random.Random(seed).choices(range(1, 4), k=64) for seed in range(3)]
"""Few texts of few words, so that prompts share much and diverge anywhere."""


@dataclass(eq=False)
class Choice:
    cursor: Any
    row: LabRow
    reply: list[int]


@dataclass(eq=False)
class Request:
    ids: list[int]
    cursor: Any
    row: LabRow | None = None
    choices: list[Choice] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    shape: Shape
    exact = False

    @initialize(limit=st.sampled_from([60, 200, 600, 1 << 30]))
    def start(self, limit: int) -> None:
        self.now = 0.0
        self.ticks = count()
        self.limit = limit
        self.new_tree()
        self.rng = random.Random(7)
        self.requests: list[Request] = []
        self.protected: dict[Record, Node] = {}
        self.room = limit
        self.n_held = 0
        self.whole = True
        """Whether no row was lost along with the records in it."""

    def new_tree(self) -> None:
        self.tree = tree(
            self.shape,
            block=BLOCK,
            limit_nbytes=self.limit,
            exact_chunk=CHUNK if self.exact else 0,
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now + 1e-3 * next(self.ticks),
        )

    # --- requests --------------------------------------------------------------------------

    @rule(
        base=st.integers(0, 2),
        n=st.integers(1, 60),
        tail=st.lists(st.integers(1, 3), max_size=3),
        name=st.sampled_from(NAMES),
        ttl=st.sampled_from([None, None, 5.0, 20.0]),
        read=st.sampled_from([True, True, True, False]),
        write=st.sampled_from([True, True, True, False]),
    )
    def arrive(
        self,
        base: int,
        n: int,
        tail: list[int],
        name: str,
        ttl: float | None,
        read: bool,
        write: bool,
    ) -> None:
        ids = BASES[base][:n] + tail
        control = CacheControl(read=read, write=write, ttl_s=ttl)
        bounds = sorted({len(ids) // 3, len(ids) - 2} - {0, -1})
        cursor = self.tree.open(prompt_of(ids, bounds), Namespace(name), control)
        self.requests.append(Request(ids, cursor))
        if read:
            values = key_tokens(prompt_of(ids).ids)
            want = longest(self.tree, self.tree.records.identity.root(Namespace(name)), values)
            assert self.tree.probe(prompt_of(ids), Namespace(name)).match.n_tokens == want

    @precondition(lambda self: self.waiting())
    @rule(pick=st.integers(0, 99))
    def admit(self, pick: int) -> None:
        request = self.one(self.waiting(), pick)
        restored = request.cursor.restore()
        request.row = self.row_of(request.cursor, restored)
        if restored is not None:
            assert request.row.tokens == request.ids[: restored.n_tokens]
            assert restored.n_tokens < len(request.ids)
            assert request.cursor.request.control.read
        assert request.cursor.admission.n_cached == request.row.n_tokens

    @precondition(lambda self: self.reading())
    @rule(pick=st.integers(0, 99))
    def read_chunk(self, pick: int) -> None:
        request = self.one(self.reading(), pick)
        assert request.row is not None
        ahead = request.cursor.advance(request.row.n_tokens)
        if ahead is not None:
            assert ahead.n_tokens > request.row.n_tokens
            old, request.row = request.row, self.row_of(request.cursor, ahead)
            old.is_live = False
            assert request.row.tokens == request.ids[: ahead.n_tokens]
        n_total = len(request.ids) - 1
        if request.row.n_tokens < n_total:
            stops = request.cursor.stops()
            end = chunk_end(request.row.n_tokens, n_total, chunk=CHUNK, stops=stops)
            request.row.consume(request.ids[request.row.n_tokens : end])
            request.cursor.commit(request.row)

    @precondition(lambda self: self.read())
    @rule(pick=st.integers(0, 99), n=st.integers(1, 3))
    def begin(self, pick: int, n: int) -> None:
        request = self.one(self.read(), pick)
        assert request.row is not None
        for i in range(n):
            reply: list[int] = []
            layer = LabLayer([list(request.row.tokens)], self.shape, grouped=True)
            row = LabRow(layer, request.row.n_tokens)
            if i == 0:
                row, row.layer = request.row, layer
            cursor = request.cursor.fork(reply)
            request.choices.append(Choice(cursor, row, reply))
        request.cursor.close(None)

    @precondition(lambda self: self.decoding())
    @rule(pick=st.integers(0, 99), n=st.integers(1, 9))
    def decode(self, pick: int, n: int) -> None:
        """The row consumes a token, and then the next one is known; it may be one step ahead."""
        request = self.one(self.decoding(), pick)
        choice = request.choices[pick % len(request.choices)]
        for _ in range(n):
            choice.row.consume([([*request.ids, *choice.reply])[choice.row.n_tokens]])
            choice.reply.append(self.rng.randint(1, 3))
            if choice.cursor.commit_due(choice.row.n_tokens):
                choice.cursor.commit(choice.row)

    @precondition(lambda self: self.decoding())
    @rule(pick=st.integers(0, 99), ahead=st.booleans(), failed=st.booleans())
    def finish(self, pick: int, ahead: bool, failed: bool) -> None:
        request = self.one(self.decoding(), pick)
        choice = request.choices.pop(pick % len(request.choices))
        if ahead:
            choice.row.consume([([*request.ids, *choice.reply])[choice.row.n_tokens]])
        self.end(choice.cursor, choice.row, failed=failed)
        if not request.choices:
            self.leave(request)
        else:
            self.protect()
            self.set_room(self.room)

    def end(self, cursor: Any, row: LabRow | None, *, failed: bool) -> None:
        cursor.close(None if failed else row)
        if row is not None:
            row.is_live = False
            if failed and self.shape.in_rows:
                self.whole = False

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99), failed=st.booleans())
    def cancel(self, pick: int, failed: bool) -> None:
        request = self.one(self.requests, pick)
        for choice in request.choices:
            self.end(choice.cursor, choice.row, failed=failed)
        if not request.choices:
            self.end(request.cursor, request.row, failed=failed)
        request.cursor.close(request.row)  # a second time does nothing
        self.leave(request)

    def leave(self, request: Request) -> None:
        """When a request is gone, the engine sets how much room there is."""
        self.requests.remove(request)
        self.protect()
        self.set_room(self.room)

    # --- people ----------------------------------------------------------------------------

    @rule(base=st.integers(0, 2), n=st.integers(1, 60), name=st.sampled_from(NAMES))
    def pin(self, base: int, n: int, name: str) -> None:
        prompt = prompt_of(BASES[base][:n])
        before = admin.pinned_nbytes(self.tree)
        try:
            admin.pin(self.tree, prompt, Namespace(name), cap_nbytes=150)
        except BadRequest:
            assert admin.pinned_nbytes(self.tree) == before
        # What is pinned may grow by a state that is kept later, but no pin may exceed the cap.
        assert admin.pinned_nbytes(self.tree) <= max(150, before)

    @rule(base=st.integers(0, 2), n=st.integers(1, 60), name=st.sampled_from(NAMES))
    def unpin(self, base: int, n: int, name: str) -> None:
        admin.unpin(self.tree, prompt_of(BASES[base][:n]), Namespace(name))
        self.protected = {}

    @precondition(lambda self: self.rng.random() < 0.2)
    @rule(name=st.sampled_from([*NAMES, None]))
    def clear(self, name: str | None) -> None:
        admin.clear(self.tree, None if name is None else Namespace(name))
        self.protected = {}

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tree.tick(EngineLoad.NONE)

    @rule(nbytes=st.sampled_from([0, 30, 100, 400, 1 << 40]))
    def set_room(self, nbytes: int) -> None:
        self.room = nbytes
        memory, inner = self.tree.records.memory, self.tree.records.tree
        self.n_held = memory.nbytes
        self.tree.set_room(nbytes)
        assert memory.limit_nbytes <= self.tree.settings.limit_nbytes
        if memory.nbytes > memory.limit_nbytes:
            held = [r for r in records_of(self.tree) if r.arrays is not None]
            left = [r for r in held if not r.leaving]
            left = [r for r in left if self.tree.records.rows.may_evict(r)]
            assert not [r for r in left if inner.may_evict(r)], "over the limit for no reason"

    # --- what always holds -----------------------------------------------------------------

    @invariant()
    def in_order(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree, whole=self.whole)
        memory = self.tree.records.memory
        assert memory.nbytes <= max(memory.limit_nbytes, self.n_held), "grew past the limit"
        self.n_held = memory.nbytes
        assert dict(self.tree.stats.faults) == {}
        self.check_leases()
        self.check_protected()

    def check_leases(self) -> None:
        cursors = [r.cursor for r in self.requests if not r.choices and not r.cursor.closed]
        cursors += [c.cursor for r in self.requests for c in r.choices]
        ends = [t.committed.node for t in cursors if isinstance(t, CacheCursor)]
        ends = [n for n in ends if self.tree.records.tree.is_attached(n.root)]
        want = Counter(above for n in ends for above in (*n.path(), n.root))
        nodes = [*self.tree.records.tree.roots(), *nodes_of(self.tree.records.tree)]
        assert {n: n.n_leases for n in nodes if n.n_leases} == want

    def check_protected(self) -> None:
        """What was pinned or led to a lease before this step is still there."""
        if not self.whole:
            return
        for record, node in self.protected.items():
            assert node.records.get(record.part) is record
            assert record.arrays is not None
        self.protect()

    def protect(self) -> None:
        self.protected = {r: r.node for r in records_of(self.tree) if r.node.n_pins}
        for node in nodes_of(self.tree.records.tree):
            if node.n_leases:
                for above in node.path():
                    if Part.PAGES in above.records:
                        self.protected[above.records[Part.PAGES]] = above

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.requests:
            self.cancel(0, failed=False)
        check_tree(self.tree, whole=self.whole)
        admin.clear(self.tree)
        assert records_of(self.tree) == []
        assert list(nodes_of(self.tree.records.tree)) == []
        assert not any(len(root.children) for root in self.tree.records.tree.roots())
        assert self.tree.records.memory.nbytes == 0

    # --- who is where ----------------------------------------------------------------------

    @staticmethod
    def one(requests: Sequence[Request], pick: int) -> Request:
        return requests[pick % len(requests)]

    def waiting(self) -> list[Request]:
        return [r for r in self.requests if r.row is None]

    def _begun(self) -> list[Request]:
        return [r for r in self.requests if r.row is not None and not r.choices]

    def reading(self) -> list[Request]:
        return [r for r in self._begun() if r.row and r.row.n_tokens < len(r.ids) - 1]

    def read(self) -> list[Request]:
        return [r for r in self._begun() if r.row and r.row.n_tokens == len(r.ids) - 1]

    def decoding(self) -> list[Request]:
        return [r for r in self.requests if r.choices]

    def row_of(self, cursor: Any, restored: Any) -> LabRow:
        row = LabRow(LabLayer([[]], self.shape))
        if restored is not None:
            restored.fill([row.layer])
            row.n_tokens = restored.n_tokens
            cursor.filled(row)
        return row


EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
MODE = pytest.mark.parametrize("exact", [False, True], ids=["full", "exact"])


def run(shape: Shape, exact: bool, *, n_examples: int) -> None:
    run_state_machine_as_test(
        type("M", (Machine,), {"shape": shape, "exact": exact}),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@MODE
@EACH
def test_random_use(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=14)


@pytest.mark.soak
@MODE
@EACH
def test_much_random_use(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=200)
