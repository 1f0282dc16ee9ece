"""The tree of stored prefixes, for people who look at it: read in slices, shown in runs.

A run is a row of blocks without a branch. Nodes are read on the engine thread a slice at a time, so that
no step waits for a large tree; what changes meanwhile is seen as it was or as it is. Runs are made of
what was read on any other thread.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from firn.cache.planning.match import MEMORY
from firn.cache.prefix import PrefixTree
from firn.cache.tree import Node, Root
from firn.core.keys import Key
from firn.core.values import Namespace

SLICE_S = 0.001
"""So long a slice may keep the engine."""
N_UNCLOCKED = 16
"""Nodes that are read between two looks at the clock."""
MAX_NODES = 1 << 16
"""More are not read: the rest is told of as cut off."""
N_SHOWN_TOKENS = 48
"""Of a run's beginning, where its text may be shown."""
N_FORGOTTEN = 64
"""Nodes that are forgotten in a slice: each may delete files."""


@dataclass(slots=True)
class Glimpse:
    """A node as it was when it was read. parent: its place in the list, -1 for none."""

    key: Key
    parent: int
    start: int
    end: int
    nbytes: int
    places: tuple[int, ...]
    """Of these bytes, those in each place: memory, then the tiers. One may lie in several."""
    used_at: float
    n_pins: int
    n_leases: int
    namespace: Namespace | None
    """Of a root; None for all others."""
    head: tuple[int, ...]
    """Its first tokens."""
    # Below are sums that are made when all is read.
    n_ends: int = 0
    n_nodes: int = 0
    total: int = 0
    totals: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class TreeReader:
    """One look at a tree. Owner: whoever asks; `read` on the engine thread, then `answer` anywhere."""

    def __init__(
        self,
        namespace: Namespace | None,
        node: Key | None,
        *,
        with_tokens: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """namespace: the only one to be shown; None: all. node: the run with this node is the top."""
        self._namespace = namespace
        self._node = node
        self._with_tokens = with_tokens
        self._clock = clock
        self._todo: deque[tuple[Node, int]] | None = None
        self._seen: list[Glimpse] = []
        self._head: dict[str, Any] = {"enabled": True}
        self.is_known = True
        """There is such a node, and the caller may see it."""

    def read(self, cache: PrefixTree) -> bool:
        """A slice; whether there is no more to read."""
        until = self._clock() + SLICE_S
        if self._todo is None:
            self._begin(cache)
        todo = self._todo
        assert todo is not None
        while todo and len(self._seen) < MAX_NODES:
            for _ in range(min(N_UNCLOCKED, len(todo))):
                self._glimpse(*todo.popleft(), todo)
            if self._clock() > until:
                break
        return not todo or len(self._seen) >= MAX_NODES

    def _begin(self, cache: PrefixTree) -> None:
        records = cache.records
        tops: list[Node] = [
            root
            for root in records.tree.roots()
            if self._namespace in (None, root.namespace) and len(root.children)
        ]
        if self._node is not None:
            found = find(cache, self._node, self._namespace)
            self.is_known = found is not None
            tops = [] if found is None else [run_start(found)]
        self._todo = deque((top, -1) for top in tops)
        self._head |= {
            "block_tokens": cache.settings.block,
            "places": [MEMORY, *(tier.name for tier in records.tiers)],
        }

    def _glimpse(self, node: Node, parent: int, todo: deque[tuple[Node, int]]) -> None:
        is_root = isinstance(node, Root)
        if node.parent is None and not is_root:
            return  # it has gone since
        nbytes, places = 0, [0] * len(self._head["places"])
        for record in node.records.values():
            nbytes += record.nbytes
            if record.arrays is not None:
                places[0] += record.nbytes
            for tier in range(1, len(places)):
                if record.stored >> tier - 1 & 1:
                    places[tier] += record.nbytes
        shown = self._with_tokens and not is_root
        head = tuple(node.tokens[:N_SHOWN_TOKENS].tolist()) if shown else ()
        number = len(self._seen)
        self._seen.append(
            Glimpse(
                node.key, parent, node.start, node.end, nbytes, tuple(places), node.used_at,
                node.n_pins, node.n_leases, node.namespace if isinstance(node, Root) else None, head,
            )
        )  # fmt: skip
        todo.extend((child, number) for child in node.children)

    def answer(self, limit: int) -> dict[str, Any]:
        """At most so many runs, those that hold most first; `more` says what is left out below."""
        seen = self._seen
        _sum(seen)
        shown = list(_largest(seen, limit))
        return {
            **self._head,
            "nodes": len(seen),
            "cut_off": bool(self._todo),
            "runs": [_view(seen, run, self._with_tokens) for run in shown],
        }


def _sum(seen: Sequence[Glimpse]) -> None:
    """Children come behind their parents in the list, so sums go from its end."""
    for each in seen:
        each.n_ends, each.n_nodes, each.total = 0, int(each.namespace is None), each.nbytes
        each.totals, each.children = list(each.places), []
    for number in range(len(seen) - 1, -1, -1):
        each = seen[number]
        each.n_ends = each.n_ends or 1
        if each.parent < 0:
            continue
        above = seen[each.parent]
        above.children.append(number)
        above.n_ends += each.n_ends
        above.n_nodes += each.n_nodes
        above.total += each.total
        above.totals = [a + b for a, b in zip(above.totals, each.totals, strict=True)]


@dataclass(slots=True)
class _Run:
    """Places in the list: a row of nodes without a branch, and the run above it."""

    nodes: list[int]
    above: _Run | None
    hidden: list[int] = field(default_factory=list)
    """Where runs begin that are not shown."""


def _largest(seen: Sequence[Glimpse], limit: int) -> Iterator[_Run]:
    serial = count()
    heap: list[tuple[int, int, int, _Run | None]] = [
        (-each.total, next(serial), i, None) for i, each in enumerate(seen) if each.parent < 0
    ]
    heapq.heapify(heap)
    found: list[_Run] = []
    while heap and len(found) < limit:
        *_, first, above = heapq.heappop(heap)
        run = _Run([first], above)
        while len(seen[run.nodes[-1]].children) == 1 and seen[first].namespace is None:
            run.nodes.append(seen[run.nodes[-1]].children[0])
        found.append(run)
        for child in seen[run.nodes[-1]].children:
            heapq.heappush(heap, (-seen[child].total, next(serial), child, run))
    for *_, first, above in heap:
        if above is not None:
            above.hidden.append(first)
    yield from found


def _view(seen: Sequence[Glimpse], run: _Run, with_tokens: bool) -> dict[str, Any]:
    first, last = seen[run.nodes[0]], seen[run.nodes[-1]]
    own = [seen[i] for i in run.nodes]
    view: dict[str, Any] = {
        "node": last.key.hex(),
        "above": None if run.above is None else seen[run.above.nodes[-1]].key.hex(),
        "start": first.start,
        "end": last.end,
        "bytes": sum(each.nbytes for each in own),
        "places": [sum(n) for n in zip(*(each.places for each in own), strict=True)],
        "total_bytes": first.total,
        "total_places": first.totals,
        "used_at": round(first.used_at, 3),
        "pins": last.n_pins,
        "in_use": last.n_leases,
        "ends": last.n_ends,
        "blocks": first.n_nodes,
    }
    if first.namespace is not None:
        view["namespace"] = first.namespace[:8]
    if run.hidden:
        view["more"] = {"runs": len(run.hidden), "bytes": sum(seen[i].total for i in run.hidden)}
    if with_tokens:
        tokens = [token for each in own[:2] for token in each.head]
        view["tokens"] = tokens[:N_SHOWN_TOKENS]
    return view


# --- one node ------------------------------------------------------------------------------


def find(cache: PrefixTree, key: Key, namespace: Namespace | None) -> Node | None:
    """The node, if it is this namespace's; None for either fault, for they look alike outside."""
    records = cache.records
    node = records.tree.find(key)
    if node is None or not records.tree.is_attached(node.root):
        return None
    return node if namespace in (None, node.root.namespace) else None


def run_start(node: Node) -> Node:
    """The first node of the run that this one is in."""
    while (above := node.parent) is not None and above.parent and len(above.children) == 1:
        node = above
    return node


def details(cache: PrefixTree, node: Node) -> dict[str, Any]:
    """What the prefix that ends here takes, and what it saves whoever asks for it again."""
    records = cache.records
    missing: dict[str, int] = {}
    nbytes = 0
    for record in (r for n in node.path() for r in n.records.values()):
        nbytes += record.nbytes
        if record.arrays is None:
            below = next((tier for tier in records.tiers if tier.has(record)), None)
            if below is not None:
                missing[below.name] = missing.get(below.name, 0) + record.nbytes
    compute_s = records.estimates.prefill_s(0, node.end)
    load_s = sum(records.estimates.load_s(tier, n) for tier, n in missing.items())
    return {
        "node": node.key.hex(),
        "tokens": node.end,
        "bytes": nbytes,
        "to_load_bytes": missing,
        "compute_s": round(compute_s, 4),
        "load_s": round(load_s, 4),
        "saves_s": round(max(compute_s - load_s, 0.0), 4),
        "measured": records.estimates.knows_prefill,
        "pinned": node in node.root.pinned,
        "pins": node.n_pins,
        "in_use": node.n_leases,
    }


def unpin_below(cache: PrefixTree, node: Node) -> int:
    """Let go of every pinned prefix that ends in this run or below; how many there were."""
    first = run_start(node)
    ends = [end for end in node.root.pinned if any(n is first for n in end.path())]
    for end in ends:
        cache.records.unpin(end)
    return len(ends)


class Forgetting:
    """A run and all below it, forgotten a slice at a time. What is pinned or in use stays.

    Owner: whoever asks; `step` on the engine thread.
    """

    def __init__(self, namespace: Namespace | None, node: Key) -> None:
        self._namespace = namespace
        self._node = node
        self._todo: list[Node] | None = None
        self._n_nodes = self._n_kept = self._nbytes = 0
        self.is_known = True

    def step(self, cache: PrefixTree) -> bool:
        """Whether it is done. Leaves go before their parents."""
        if self._todo is None:
            found = find(cache, self._node, self._namespace)
            self.is_known = found is not None
            self._todo = [] if found is None else list(cache.records.tree.subtree(run_start(found)))
        for _ in range(min(N_FORGOTTEN, len(self._todo))):
            node = self._todo.pop()
            if node.n_leases or node.n_pins:
                self._n_kept += 1
            elif node.records:
                self._n_nodes += 1
                self._nbytes += sum(r.nbytes for r in node.records.values())
                cache.records.forget(node)
        return not self._todo

    def answer(self) -> dict[str, Any]:
        return {
            "forgotten_blocks": self._n_nodes,
            "freed_bytes": self._nbytes,
            "kept_blocks": self._n_kept,
        }
