"""What people ask of the cache: how full it is, what would hit, pin this, clear that.

Functions over the tree, run on the engine thread between two steps. They answer with plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firn.cache.index import Node
from firn.cache.match import Match, find
from firn.cache.parts import Part
from firn.cache.prefix import PrefixTree
from firn.core.errors import BadRequest
from firn.core.keys import block_keys, key_tokens
from firn.core.values import Namespace, Prompt


@dataclass(frozen=True, slots=True)
class Probe:
    """What a prompt would find if it came now."""

    n_prompt: int
    n_cached: int
    n_shared: int
    reason: str
    tiers: dict[str, int]
    """Tokens by the tier they would come from."""


def stats(tree: PrefixTree) -> dict[str, Any]:
    """Everything that is counted; nothing that would tell one namespace about another."""
    s, pool = tree.stats, tree.pool
    memory = {
        part.value: {
            "records": pool.held.n_records[part],
            "bytes": pool.held.nbytes[part],
        }
        for part in Part
    }
    return {
        "enabled": True,
        "reuse": "exact" if tree.settings.exact_chunk else "full",
        "block_tokens": tree.settings.block,
        "memory": {
            "limit_bytes": tree.settings.limit_nbytes,
            "room_bytes": pool.limit_nbytes,
            "used_bytes": pool.held.total_nbytes,
            "tokens": _n_tokens(tree),
            "pinned_bytes": pinned_nbytes(tree),
            "parts": memory,
        },
        "lookups": s.n_lookups,
        "hits": dict(s.hits),
        "misses": dict(s.misses),
        "shortfalls": dict(s.shortfalls),
        "evictions": dict(s.evictions),
        "commits": dict(s.commits),
        "dropped": dict(s.dropped),
        "faults": dict(s.faults),
        "tokens": {
            "prompt": s.n_tokens_prompt,
            "cached": s.n_tokens_cached,
            "advanced": s.n_tokens_advanced,
        },
        "seconds_saved": round(s.seconds_saved, 3),
    }


def probe(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> Probe:
    """How much would hit, from where, and where it diverges. Touches nothing."""
    match = _find(tree, prompt, namespace)
    tiers = {"memory": match.n_tokens} if match.n_tokens else {}
    return Probe(len(prompt), match.n_tokens, match.n_shared, match.reason, tiers)


def pin(tree: PrefixTree, prompt: Prompt, namespace: Namespace, *, cap_nbytes: int) -> int:
    """Keep what is stored of this prompt until it is unpinned; returns the tokens pinned."""
    match = _find(tree, prompt, namespace)
    nodes = _nodes_of(match)
    more = sum(r.nbytes for n in nodes if not n.n_pins for r in n.records.values())
    if pinned_nbytes(tree) + more > cap_nbytes:
        raise BadRequest(
            f"Pinning needs {more} bytes more; {cap_nbytes} bytes may be pinned in all."
        )
    for node in nodes:
        node.n_pins = 1
    return match.n_tokens


def unpin(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> int:
    """Let go of what was pinned of this prompt, and of anything pinned behind it."""
    match = _find(tree, prompt, namespace)
    n_unpinned = 0
    for node in _nodes_of(match):
        if node.n_pins and not any(c.n_pins for c in node.children.values()):
            node.n_pins = 0
            n_unpinned += len(node.values)
            tree.pool.rejoin(node)
    return n_unpinned


def clear(tree: PrefixTree, namespace: Namespace | None = None) -> int:
    """Forget every record, or one namespace's; returns the bytes let go. Those in use stay."""
    only = None if namespace is None else tree.root_of(namespace)
    before = tree.pool.held.total_nbytes
    for root in tree.index.roots():
        if only is None or root.key == only:
            for node in reversed(list(tree.index.below(root))):
                if not _in_use(tree, node):
                    node.n_pins = 0
                    tree.forget(node)
    return before - tree.pool.held.total_nbytes


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


def _n_tokens(tree: PrefixTree) -> int:
    return sum(len(n.values) for n in tree.index.nodes() if n.records)
