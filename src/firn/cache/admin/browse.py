"""The tree as people browse it: read in slices, shown in runs.

A run is a sequence of blocks without a branch. Nodes are read on the engine thread a slice at a
time, so that no step waits for a large tree; a node that changes meanwhile is shown in its old or
its new state. The runs are made on another thread, from what was read.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from firn.cache.planning.match import MEMORY
from firn.cache.prefix import PrefixCache
from firn.cache.tree import Node, Root
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.keys import Key
from firn.core.values import Namespace

SLICE_S = 0.001
"""How long a slice may occupy the engine."""
N_UNCLOCKED = 16
"""Nodes read before the clock is checked again."""
MAX_NODES = 1 << 16
"""Cap on the nodes read; the answer reports whether others were cut off."""
N_SHOWN_TOKENS = 48
"""Tokens shown of a run, if its text may be shown: from where it parts from the others."""
N_LAST_TOKENS = 12
"""Tokens shown of a run that ends where another one goes on: its last ones."""
N_FORGOTTEN = 64
"""Nodes forgotten in one slice: each may delete files."""


@dataclass(slots=True)
class NodeView:
    """A node as it was when it was read. parent: its index in the list, -1 for none."""

    key: Key
    parent: int
    start: int
    end: int
    nbytes: int
    places: tuple[int, ...]
    """The bytes in memory, then in each tier. A record may be in several places."""
    used_at: float
    n_pins: int
    n_leases: int
    namespace: Namespace | None
    """A root's; None for other nodes."""
    parts_at: int
    """Where it parts from its siblings, or what is shown of it begins."""
    head: tuple[int, ...]
    """Its tokens from there on."""
    # Sums over the subtree, computed once everything has been read.
    n_ends: int = 0
    n_nodes: int = 0
    total: int = 0
    totals: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class TreeReader:
    """Implements TreeQuery. Owner: the caller; `step` on the engine thread, `answer` on any."""

    def __init__(
        self,
        namespace: Namespace | None,
        node: Key | None,
        *,
        limit: int,
        with_tokens: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """namespace: the only one to show; None: all. node: begin with the run that contains it.

        limit: the most runs to show, the largest first.
        """
        self._namespace = namespace
        self._node = node
        self._limit = limit
        self._with_tokens = with_tokens
        self._clock = clock
        self._todo: deque[tuple[Node, int]] | None = None
        self._nodes: list[NodeView] = []
        self._head: dict[str, Any] = {"enabled": True}
        self.is_known = True

    def step(self, cache: PrefixCache) -> bool:
        until = self._clock.elapsed() + SLICE_S
        if self._todo is None:
            self._begin(cache)
        todo = self._todo
        assert todo is not None
        while todo and len(self._nodes) < MAX_NODES:
            for _ in range(min(N_UNCLOCKED, len(todo))):
                self._read(*todo.popleft(), todo)
            if self._clock.elapsed() > until:
                break
        return not todo or len(self._nodes) >= MAX_NODES

    def _begin(self, cache: PrefixCache) -> None:
        records = cache.records
        tops: list[Node] = [
            root
            for root in records.tree.roots()
            if self._namespace in (None, root.namespace) and len(root.children)
        ]
        if self._node is not None:
            node = find(cache, self._node, self._namespace)
            self.is_known = node is not None
            tops = [] if node is None else [run_start(node)]
        self._todo = deque((top, -1) for top in tops)
        self._head |= {
            "block_tokens": cache.settings.block,
            "places": [MEMORY, *(tier.name for tier in records.tiers)],
        }

    def _read(self, node: Node, parent: int, todo: deque[tuple[Node, int]]) -> None:
        is_root = isinstance(node, Root)
        if node.parent is None and not is_root:
            return  # removed since it was listed
        nbytes, places = 0, [0] * len(self._head["places"])
        for record in node.records.values():
            nbytes += record.nbytes
            if record.arrays is not None:
                places[0] += record.nbytes
            for tier in range(len(places) - 1):
                if record.is_stored(tier):
                    places[tier + 1] += record.nbytes
        shown = self._with_tokens and not is_root
        parts_at, head = _from_parting(node) if shown else (node.start, ())
        number = len(self._nodes)
        self._nodes.append(
            NodeView(
                node.key, parent, node.start, node.end, nbytes, tuple(places), node.used_at,
                node.n_pins, node.n_leases, node.namespace if isinstance(node, Root) else None,
                parts_at, head,
            )
        )  # fmt: skip
        todo.extend((child, number) for child in node.children)

    def answer(self) -> dict[str, Any]:
        """In each run, `more` reports how much below it is left out."""
        nodes = self._nodes
        _sum(nodes)
        runs = _largest(nodes, self._limit)
        return {
            **self._head,
            "nodes": len(nodes),
            "cut_off": bool(self._todo),
            "runs": [_view(nodes, run, self._with_tokens) for run in runs],
        }


def _from_parting(node: Node) -> tuple[int, tuple[int, ...]]:
    """Where a node parts from its siblings, and the tokens from there on."""
    at = node.parent.children.shared_with_siblings(node) if node.parent is not None else 0
    if at >= node.n_tokens:
        at = max(node.n_tokens - N_LAST_TOKENS, 0)
    return node.start + at, tuple(node.tokens[at : at + N_SHOWN_TOKENS].tolist())


def _sum(nodes: Sequence[NodeView]) -> None:
    """Children follow their parents in the list, so sums are computed from its end."""
    for each in nodes:
        each.n_ends, each.n_nodes, each.total = 0, int(each.namespace is None), each.nbytes
        each.totals, each.children = list(each.places), []
    for number in range(len(nodes) - 1, -1, -1):
        each = nodes[number]
        each.n_ends = each.n_ends or 1
        if each.parent < 0:
            continue
        above = nodes[each.parent]
        above.children.append(number)
        above.n_ends += each.n_ends
        above.n_nodes += each.n_nodes
        above.total += each.total
        above.totals = [a + b for a, b in zip(above.totals, each.totals, strict=True)]


@dataclass(slots=True)
class _Run:
    """Indices of nodes without a branch, and the run above them."""

    nodes: list[int]
    above: _Run | None
    hidden: list[int] = field(default_factory=list)
    """The first nodes of runs below it that are not shown."""


def _largest(nodes: Sequence[NodeView], limit: int) -> list[_Run]:
    serial = count()
    heap: list[tuple[int, int, int, _Run | None]] = [
        (-each.total, next(serial), i, None) for i, each in enumerate(nodes) if each.parent < 0
    ]
    heapq.heapify(heap)
    runs: list[_Run] = []
    while heap and len(runs) < limit:
        *_, first, above = heapq.heappop(heap)
        run = _Run([first], above)
        while len(nodes[run.nodes[-1]].children) == 1 and nodes[first].namespace is None:
            run.nodes.append(nodes[run.nodes[-1]].children[0])
        runs.append(run)
        for child in nodes[run.nodes[-1]].children:
            heapq.heappush(heap, (-nodes[child].total, next(serial), child, run))
    for *_, first, above in heap:
        if above is not None:
            above.hidden.append(first)
    return runs


def _view(nodes: Sequence[NodeView], run: _Run, with_tokens: bool) -> dict[str, Any]:
    first, last = nodes[run.nodes[0]], nodes[run.nodes[-1]]
    own = [nodes[i] for i in run.nodes]
    view: dict[str, Any] = {
        "node": last.key.hex(),
        "above": None if run.above is None else nodes[run.above.nodes[-1]].key.hex(),
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
        view["more"] = {"runs": len(run.hidden), "bytes": sum(nodes[i].total for i in run.hidden)}
    if with_tokens:
        tokens = [token for each in own[:2] for token in each.head]
        view["tokens"] = tokens[:N_SHOWN_TOKENS]
        view["parts_at"] = first.parts_at
    return view


# --- one node ------------------------------------------------------------------------------


def find(cache: PrefixCache, key: Key, namespace: Namespace | None) -> Node | None:
    """The node, if it belongs to this namespace. Nodes of others seem not to exist."""
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


def details(cache: PrefixCache, node: Node) -> dict[str, Any]:
    """The size of the prefix that ends here, and how much time it saves when it is used again."""
    records = cache.records
    missing: dict[str, int] = {}
    nbytes = 0
    for record in (r for n in node.path() for r in n.records.values()):
        nbytes += record.nbytes
        if record.arrays is None:
            tier = next((tier for tier in records.tiers if tier.has(record)), None)
            if tier is not None:
                missing[tier.name] = missing.get(tier.name, 0) + record.nbytes
    compute_s = records.estimates.prefill_s(0, node.end)
    load_s = sum(records.estimates.load_s(name, n) for name, n in missing.items())
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
        "where": {part.value: records.ledger.where(r) for part, r in node.records.items()},
    }


def unpin_below(cache: PrefixCache, node: Node) -> int:
    """Unpin every pinned prefix that ends in this run or below it; returns how many there were."""
    first = run_start(node)
    ends = [end for end in node.root.pinned if any(n is first for n in end.path())]
    for end in ends:
        cache.records.unpin(end)
    return len(ends)


class SubtreeRemoval:
    """Implements TreeQuery: forgets a run and all below it. What is pinned or in use is kept.

    Owner: the caller; `step` on the engine thread.
    """

    def __init__(
        self,
        namespace: Namespace | None,
        node: Key,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._namespace = namespace
        self._node = node
        self._clock = clock
        self._unlisted: Iterator[Node] | None = None
        self._todo: list[Node] = []
        self._n_nodes = self._n_kept = self._nbytes = 0
        self.is_known = True

    def step(self, cache: PrefixCache) -> bool:
        """All nodes are listed first, because leaves are removed before their parents."""
        if self._unlisted is None:
            top = find(cache, self._node, self._namespace)
            self.is_known = top is not None
            subtree = () if top is None else cache.records.tree.subtree(run_start(top))
            self._unlisted = iter(subtree)
        return self._list(self._unlisted) and self._forget(cache)

    def _list(self, unlisted: Iterator[Node]) -> bool:
        until = self._clock.elapsed() + SLICE_S
        while some := list(islice(unlisted, N_UNCLOCKED)):
            self._todo += some
            if self._clock.elapsed() > until:
                return False
        return True

    def _forget(self, cache: PrefixCache) -> bool:
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
