"""What people ask of the cache: how full it is, what would hit, pin this, clear that.

Functions over the tree, run on the engine thread between two steps. They answer with plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from firn.cache.index import Node
from firn.cache.match import Match, find
from firn.cache.off import CacheOff
from firn.cache.parts import Part
from firn.cache.prefix import PrefixTree
from firn.core.errors import BadRequest
from firn.core.keys import block_keys, key_tokens
from firn.core.values import Namespace, Prompt

Run = Callable[[Callable[[Any], Any]], "Future[Any]"]
"""Runs a function over the cache on the engine thread."""


class CacheAdmin:
    """Implements core.ports.CacheAdmin: each question runs on the engine thread, between two steps."""

    def __init__(self, run: Run, *, pin_cap_nbytes: int) -> None:
        self._run = run
        self._pin_cap_nbytes = pin_cap_nbytes

    def stats(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: stats(tree, namespace))

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: probe(tree, prompt, namespace))

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        cap = self._pin_cap_nbytes
        return self._ask(lambda tree: pin(tree, prompt, namespace, cap_nbytes=cap))

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: unpin(tree, prompt, namespace))

    def clear(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: clear(tree, namespace))

    def _ask(self, question: Callable[[PrefixTree], dict[str, Any]]) -> Future[dict[str, Any]]:
        def answer(cache: PrefixTree | CacheOff) -> dict[str, Any]:
            if isinstance(cache, CacheOff):
                return {"enabled": False, "why": cache.why}
            return question(cache)

        return self._run(answer)


def stats(tree: PrefixTree, namespace: Namespace | None) -> dict[str, Any]:
    """What was counted: all of it, or one namespace's own share and nothing of the others."""
    everything = namespace is None
    counted = tree.stats if namespace is None else tree.stats_of(namespace)
    nodes = list(tree.index.nodes() if namespace is None else tree.nodes_of(namespace))
    records = [r for n in nodes for r in n.records.values() if r.payload is not None]
    memory: dict[str, Any] = {
        "records": len(records),
        "used_bytes": sum(r.nbytes for r in records),
        "tokens": sum(len(n.values) for n in nodes if n.records),
        "pinned_bytes": sum(r.nbytes for r in records if r.node.n_pins),
        "parts": {
            part.value: {
                "records": sum(r.part is part for r in records),
                "bytes": sum(r.nbytes for r in records if r.part is part),
            }
            for part in Part
        },
    }
    if everything:
        memory["limit_bytes"] = tree.settings.limit_nbytes
        memory["room_bytes"] = tree.pool.limit_nbytes
    return {
        "enabled": True,
        "reuse": "exact" if tree.settings.exact_chunk else "full",
        "block_tokens": tree.settings.block,
        "memory": memory,
        **counted.view(),
    }


def probe(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> dict[str, Any]:
    """How much would hit, from where, and where it diverges. Touches nothing."""
    match = _find(tree, prompt, namespace)
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": match.n_tokens,
        "shared_tokens": match.n_shared,
        "tiers": {"memory": match.n_tokens} if match.n_tokens else {},
        "reason": match.reason,
    }


def pin(
    tree: PrefixTree, prompt: Prompt, namespace: Namespace, *, cap_nbytes: int
) -> dict[str, Any]:
    """Keep what is stored of this prompt until it is unpinned."""
    match = _find(tree, prompt, namespace)
    nodes = _nodes_of(match)
    more = sum(r.nbytes for n in nodes if not n.n_pins for r in n.records.values())
    if pinned_nbytes(tree) + more > cap_nbytes:
        raise BadRequest(
            f"Pinning needs {more} bytes more; {cap_nbytes} bytes may be pinned in all."
        )
    for node in nodes:
        node.n_pins = 1
    return {"pinned_tokens": match.n_tokens, "pinned_bytes": pinned_nbytes(tree)}


def unpin(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> dict[str, Any]:
    """Let go of what was pinned of this prompt, but for what a longer pinned prompt shares."""
    match = _find(tree, prompt, namespace)
    n_unpinned = 0
    for node in _nodes_of(match):
        if node.n_pins and not any(c.n_pins for c in node.children.values()):
            node.n_pins = 0
            n_unpinned += len(node.values)
            tree.pool.rejoin(node)
    return {"unpinned_tokens": n_unpinned, "pinned_bytes": pinned_nbytes(tree)}


def clear(tree: PrefixTree, namespace: Namespace | None = None) -> dict[str, Any]:
    """Forget every record, or one namespace's. Those in use stay."""
    only = None if namespace is None else tree.root_of(namespace)
    before = tree.pool.held.total_nbytes
    for root in tree.index.roots():
        if only is None or root.key == only:
            for node in reversed(list(tree.index.below(root))):
                if not _in_use(tree, node):
                    node.n_pins = 0
                    tree.forget(node)
    return {"freed_bytes": before - tree.pool.held.total_nbytes}


def pinned_nbytes(tree: PrefixTree) -> int:
    return sum(r.nbytes for n in tree.index.nodes() if n.n_pins for r in n.records.values())


def _find(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> Match:
    values = key_tokens(prompt.ids, prompt.media)
    key = tree.root_of(namespace)
    root = tree.index.root(key)
    match = find(root, values, block_keys(key, values, tree.settings.block), tree.needs)
    tree.index.prune(root)
    return match


def _nodes_of(match: Match) -> list[Node]:
    """The nodes of a match, deepest first."""
    return [s.node for s in reversed(match.segments)]


def _in_use(tree: PrefixTree, node: Node) -> bool:
    return any(n.n_leases for n in tree.index.below(node) if n.parent is not None)
