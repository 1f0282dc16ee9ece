"""What people ask of the cache: how full it is, what would hit, pin this, clear that.

Functions over the tree, run on the engine thread between two steps. They answer with plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from firn.cache import browse
from firn.cache.match import MEMORY
from firn.cache.nodes import Held, Node, Root
from firn.cache.off import CacheOff
from firn.cache.parts import Part
from firn.cache.prefix import PrefixTree
from firn.cache.tiers import Usage
from firn.core.errors import BadRequest, NotFound
from firn.core.keys import Key
from firn.core.values import Namespace, Prompt

PIN_SHARE = 0.5
"""Of memory: what may be pinned in all."""
Run = Callable[[Callable[[Any, dict[str, Any]], Any]], "Future[Any]"]
"""Runs a function on the engine thread: over the cache, and how admission by memory stands."""


class CacheAdmin:
    """Implements core.ports.CacheAdmin: each question runs on the engine thread, between two steps."""

    def __init__(self, run: Run, *, pin_cap_nbytes: int) -> None:
        self._run = run
        self._pin_cap_nbytes = pin_cap_nbytes

    def stats(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        def answer(cache: PrefixTree | CacheOff, admission: dict[str, Any]) -> dict[str, Any]:
            if isinstance(cache, CacheOff):
                return {"enabled": False, "why": cache.why, "admission": admission}
            return {**stats(cache, namespace), "admission": admission}

        return self._run(answer)

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: probe(tree, prompt, namespace))

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        cap = self._pin_cap_nbytes
        return self._ask(lambda tree: pin(tree, prompt, namespace, cap_nbytes=cap))

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: unpin(tree, prompt, namespace))

    def clear(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        return self._ask(lambda tree: clear(tree, namespace))

    def browse(
        self, namespace: Namespace | None, node: str | None, *, limit: int, with_tokens: bool
    ) -> Browsing:
        key = None if node is None else key_of(node)
        reader = browse.TreeReader(namespace, key, with_tokens=with_tokens)
        return Browsing(self._run, reader, reader.read, lambda: reader.answer(limit))

    def forget_node(self, namespace: Namespace | None, node: str) -> Browsing:
        forgetting = browse.Forgetting(namespace, key_of(node))
        return Browsing(self._run, forgetting, forgetting.step, forgetting.answer)

    def node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        return self._ask_node(namespace, node, browse.details)

    def pin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        def pin(tree: PrefixTree, found: Node) -> dict[str, Any]:
            pin_end(tree, found, cap_nbytes=self._pin_cap_nbytes)
            return browse.details(tree, found)

        return self._ask_node(namespace, node, pin)

    def unpin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        def unpin(tree: PrefixTree, found: Node) -> dict[str, Any]:
            return {"unpinned": browse.unpin_below(tree, found), **browse.details(tree, found)}

        return self._ask_node(namespace, node, unpin)

    def _ask_node(
        self,
        namespace: Namespace | None,
        node: str,
        question: Callable[[PrefixTree, Node], dict[str, Any]],
    ) -> Future[dict[str, Any]]:
        key = key_of(node)

        def answer(tree: PrefixTree) -> dict[str, Any]:
            found = browse.find(tree, key, namespace)
            if found is None:
                raise no_such_node()
            return question(tree, found)

        return self._ask(answer)

    def _ask(self, question: Callable[[PrefixTree], dict[str, Any]]) -> Future[dict[str, Any]]:
        def answer(cache: PrefixTree | CacheOff, admission: dict[str, Any]) -> dict[str, Any]:
            if isinstance(cache, CacheOff):
                return {"enabled": False, "why": cache.why}
            return question(cache)

        return self._run(answer)


class Asked(Protocol):
    """is_known: there is the node that it is about."""

    is_known: bool


class Browsing:
    """Implements core.ports.SlicedQuery over something that reads or changes the tree."""

    def __init__(
        self,
        run: Run,
        asked: Asked,
        step: Callable[[PrefixTree], bool],
        answer: Callable[[], dict[str, Any]],
    ) -> None:
        self._run = run
        self._asked = asked
        self._step = step
        self._answer = answer
        self._off: CacheOff | None = None

    def step(self) -> Future[bool]:
        def go_on(cache: PrefixTree | CacheOff, admission: dict[str, Any]) -> bool:
            if isinstance(cache, CacheOff):
                self._off = cache
                return True
            done = self._step(cache)
            if not self._asked.is_known:
                raise no_such_node()
            return done

        return self._run(go_on)

    def answer(self) -> dict[str, Any]:
        if self._off is not None:
            return {"enabled": False, "why": self._off.why}
        return self._answer()


def key_of(node: str) -> Key:
    """Raises NotFound: what is no key is no node's."""
    try:
        return Key(bytes.fromhex(node))
    except ValueError:
        raise no_such_node() from None


def no_such_node() -> NotFound:
    return NotFound("There is no such prefix of yours; it may have gone since.", param="node")


def stats(tree: PrefixTree, namespace: Namespace | None) -> dict[str, Any]:
    """What was counted: all of it, or one namespace's own share and nothing of the others.

    Of sums that are kept up to date: costs the same however much is stored.
    """
    everything = namespace is None
    counted = tree.stats if namespace is None else tree.stats_of(namespace)
    roots = _roots(tree, namespace)
    held = tree.records.tree
    if namespace is None:
        in_memory, in_tiers = held.memory, held.tiers
    else:
        in_memory, in_tiers = _own(tree, roots)
    memory: dict[str, Any] = {
        **_held_view(in_memory),
        "tokens": sum(root.n_stored_tokens for root in roots),
        "pinned_bytes": sum(root.pinned_nbytes for root in roots),
        "parts": {
            part.value: {"records": in_memory.n_records[part], "bytes": in_memory.nbytes[part]}
            for part in Part
        },
    }
    tiers: dict[str, dict[str, Any]] = {}
    for below, in_tier in zip(tree.records.tiers, in_tiers, strict=True):
        tiers[below.name] = {"enabled": True, **_held_view(in_tier)}
        if everything:
            tiers[below.name]["folder"] = usage_view(below.usage())
    if everything:
        memory["limit_bytes"] = tree.settings.limit_nbytes
        memory["room_bytes"] = tree.records.memory.limit_nbytes
        memory["leaving_bytes"] = held.leaving_nbytes
        memory |= tree.records.rows.view()
    found: dict[str, Any] = {
        "enabled": True,
        "reuse": "exact" if tree.settings.exact_chunk else "full",
        "block_tokens": tree.settings.block,
        "tiers": [MEMORY, *tiers],
        MEMORY: memory,
        **tiers,
        **counted.view(),
    }
    if everything:  # learned from everybody's requests
        found["estimates"] = tree.records.estimates.view()
    return found


def _roots(tree: PrefixTree, namespace: Namespace | None) -> list[Root]:
    if namespace is None:
        return tree.records.tree.roots()
    return [root for root in tree.records.tree.roots() if root.namespace == namespace]


def _own(tree: PrefixTree, roots: list[Root]) -> tuple[Held, list[Held]]:
    memory, tiers = Held(), [Held() for _ in tree.records.tiers]
    for root in roots:
        memory.add(root.memory)
        for total, own in zip(tiers, root.tiers, strict=True):
            total.add(own)
    return memory, tiers


def _held_view(held: Held) -> dict[str, Any]:
    return {"records": held.total_records, "used_bytes": held.total_nbytes}


def snapshot(cache: object) -> dict[str, Any]:
    """Counters for a scrape, from any thread: copies, which need not agree to the last one."""
    if not isinstance(cache, PrefixTree):
        return {}
    tree = cache.records.tree
    places = {MEMORY: tree.memory}
    places |= {t.name: held for t, held in zip(cache.records.tiers, tree.tiers, strict=True)}
    nbytes = {place: {p.value: n for p, n in held.nbytes.items()} for place, held in places.items()}
    usages = {t.name: t.usage() for t in cache.records.tiers}
    limits = {MEMORY: cache.records.memory.limit_nbytes}
    limits |= {name: usage.limit_nbytes for name, usage in usages.items()}
    counts = {name: dict(usage.counts) for name, usage in usages.items()}
    return {**cache.stats.view(), "bytes": nbytes, "limits": limits, "operations": counts}


def health(cache: object) -> dict[str, Any]:
    """Whether reuse is on, and which tiers take writes. From any thread."""
    if isinstance(cache, CacheOff):
        return {"reuse": False, "why": cache.why}
    found: dict[str, Any] = {"reuse": True}
    if isinstance(cache, PrefixTree):
        for tier in cache.records.tiers:
            status = tier.usage().status
            found[tier.name] = {"state": status.state, "reason": status.reason}
    return found


def usage_view(usage: Usage) -> dict[str, Any]:
    """The whole folder, all models and processes that share it."""
    return {
        "bytes": usage.nbytes,
        "limit_bytes": usage.limit_nbytes,
        "state": usage.status.state,
        "reason": usage.status.reason,
        "files": dict(usage.n_files),
        "part_bytes": dict(usage.part_nbytes),
        "foreign": usage.n_foreign,
        "quarantined": usage.n_quarantined,
        "counts": dict(usage.counts),
        "drops": dict(usage.drops),
        "day_bytes": usage.day_nbytes,
        "day_limit_bytes": usage.day_limit_nbytes,
    }


def probe(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> dict[str, Any]:
    """How much would hit, from where, and why not more. Changes nothing."""
    look = tree.look_up(prompt, namespace)
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": look.match.n_tokens,
        "shared_tokens": look.n_shared,
        "tiers": look.tiers,
        "reason": look.reason,
    }


def pin(
    tree: PrefixTree, prompt: Prompt, namespace: Namespace, *, cap_nbytes: int
) -> dict[str, Any]:
    """Keep what is stored of this prompt until it is unpinned."""
    match = tree.look_up(prompt, namespace).match
    if match.segments:
        pin_end(tree, match.segments[-1].node, cap_nbytes=cap_nbytes)
    return {"pinned_tokens": match.n_tokens, "pinned_bytes": pinned_nbytes(tree, namespace)}


def pin_end(tree: PrefixTree, end: Node, *, cap_nbytes: int) -> None:
    """Keep the prefix that ends here. Raises BadRequest where that is more than may be pinned."""
    allowed = _allowed(tree, end.root, cap_nbytes)
    was_pinned = end in end.root.pinned
    tree.records.pin(end)
    if end.root.pinned_nbytes > allowed:
        more = end.root.pinned_nbytes
        if not was_pinned:
            tree.records.unpin(end)
        raise BadRequest(
            f"With this prefix {more} bytes would be pinned; at most {allowed} may be."
        )


def _allowed(tree: PrefixTree, root: Root, cap_nbytes: int) -> int:
    """What this key may pin: a share of the memory there is, less where others have pinned."""
    size = tree.records.memory.limit_nbytes
    all_keys = min(cap_nbytes, int(PIN_SHARE * size))
    others = sum(r.pinned_nbytes for r in tree.records.tree.roots() if r is not root)
    return max(min(all_keys - others, all_keys), 0)


def unpin(tree: PrefixTree, prompt: Prompt, namespace: Namespace) -> dict[str, Any]:
    """Let go of what was pinned of this prompt, but for what a longer pinned prompt shares."""
    n_unpinned = 0
    for segment in reversed(tree.look_up(prompt, namespace).match.segments):
        node = segment.node
        tree.records.unpin(node)
        n_unpinned += 0 if node.n_pins else node.n_tokens
    return {"unpinned_tokens": n_unpinned, "pinned_bytes": pinned_nbytes(tree, namespace)}


def clear(tree: PrefixTree, namespace: Namespace | None = None) -> dict[str, Any]:
    """Forget every record, or one namespace's. Requests that run end well, and store nothing more."""
    return {"freed_bytes": tree.records.clear(namespace)}


def pinned_nbytes(tree: PrefixTree, namespace: Namespace | None = None) -> int:
    """Of everybody, or of one namespace alone."""
    return sum(root.pinned_nbytes for root in _roots(tree, namespace))
