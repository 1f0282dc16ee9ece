"""What people ask of a running cache: how full it is, what would hit, pin this, clear that.

Functions over the cache, run on the engine thread between two steps. They answer with plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from firn.cache.admin import browse
from firn.cache.off import CacheOff
from firn.cache.parts import Part
from firn.cache.planning.match import MEMORY
from firn.cache.prefix import PrefixCache
from firn.cache.records import Clearing
from firn.cache.tiers import TierUsage
from firn.cache.tree import Node, PartTotals, Root
from firn.core.errors import BadRequest, NotFound
from firn.core.keys import Key, child_key, packed_tokens
from firn.core.values import Namespace, Prompt

PIN_SHARE = 0.5
"""The share of memory that may be pinned in total."""
Json = dict[str, Any]
T = TypeVar("T")


class RunOnEngine(Protocol):
    """Runs a function on the engine thread, between two steps. It receives the state of memory
    admission."""

    def __call__(self, function: Callable[[Json], T], /) -> Future[T]: ...


class CacheAdmin:
    """Implements core.ports.CacheAdmin."""

    def __init__(self, cache: PrefixCache, run: RunOnEngine, *, pin_cap_nbytes: int) -> None:
        self._cache = cache
        self._run = run
        self._pin_cap_nbytes = pin_cap_nbytes

    def stats(self, namespace: Namespace | None) -> Future[Json]:
        return self._run(
            lambda admission: {**stats(self._cache, namespace), "admission": admission}
        )

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[Json]:
        return self._run(lambda _: probe(self._cache, prompt, namespace))

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[Json]:
        cap = self._pin_cap_nbytes
        return self._run(lambda _: pin(self._cache, prompt, namespace, cap_nbytes=cap))

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[Json]:
        return self._run(lambda _: unpin(self._cache, prompt, namespace))

    def clear(self, namespace: Namespace | None) -> Future[Json]:
        """Answers once no later process can find what was cleared. It may fail with NotForgotten."""
        answer: Future[Json] = Future()
        answer.set_running_or_notify_cancel()

        def started(clearing: Clearing) -> None:
            _when_kept(clearing.promises, answer, {"freed_bytes": clearing.nbytes})

        _then(self._run(lambda _: self._cache.records.clear(namespace)), answer, started)
        return answer

    def browse(
        self, namespace: Namespace | None, node: str | None, *, limit: int, with_tokens: bool
    ) -> SlicedTreeQuery:
        key = None if node is None else key_of(node)
        reader = browse.TreeReader(namespace, key, limit=limit, with_tokens=with_tokens)
        return SlicedTreeQuery(self._cache, self._run, reader)

    def forget_node(self, namespace: Namespace | None, node: str) -> SlicedTreeQuery:
        removal = browse.SubtreeRemoval(namespace, key_of(node))
        return SlicedRemoval(self._cache, self._run, removal)

    def node(self, namespace: Namespace | None, node: str) -> Future[Json]:
        key = key_of(node)
        return self._run(
            lambda _: browse.details(self._cache, known_node(self._cache, key, namespace))
        )

    def pin_node(self, namespace: Namespace | None, node: str) -> Future[Json]:
        key = key_of(node)

        def pin(_: Json) -> Json:
            end = known_node(self._cache, key, namespace)
            pin_end(self._cache, end, cap_nbytes=self._pin_cap_nbytes)
            return browse.details(self._cache, end)

        return self._run(pin)

    def unpin_node(self, namespace: Namespace | None, node: str) -> Future[Json]:
        key = key_of(node)

        def unpin(_: Json) -> Json:
            top = known_node(self._cache, key, namespace)
            n_unpinned = browse.unpin_below(self._cache, top)
            return {"unpinned": n_unpinned, **browse.details(self._cache, top)}

        return self._run(unpin)

    def health(self) -> Json:
        """Whether reuse is on, and which tiers accept writes. From any thread."""
        statuses = {tier.name: tier.usage().status for tier in self._cache.records.tiers}
        tiers = {name: {"state": s.state, "reason": s.reason} for name, s in statuses.items()}
        return {"reuse": True, **tiers}

    def snapshot(self) -> Json:
        """Counters for a scrape, from any thread: copies that need not agree with each other exactly."""
        return snapshot(self._cache)


class NullAdmin:
    """Implements core.ports.CacheAdmin for a server without a prefix cache: there is nothing to see."""

    def __init__(self, off: CacheOff, run: RunOnEngine) -> None:
        self._why = off.why
        self._run = run

    def stats(self, namespace: Namespace | None) -> Future[Json]:
        return self._run(lambda admission: {**self._off, "admission": admission})

    def _nothing(self, *args: object, **named: object) -> Future[Json]:
        return _answered(self._off)

    probe = pin = unpin = clear = node = pin_node = unpin_node = _nothing

    def _no_query(self, *args: object, **named: object) -> NullQuery:
        return NullQuery(self._off)

    browse = forget_node = _no_query

    def health(self) -> Json:
        return {"reuse": False, "why": self._why}

    def snapshot(self) -> Json:
        return {}

    @property
    def _off(self) -> Json:
        return {"enabled": False, "why": self._why}


class NullQuery:
    """Implements core.ports.SlicedQuery: it has its answer already."""

    def __init__(self, answer: Json) -> None:
        self._answer = answer

    def step(self) -> Future[bool]:
        return _answered(True)

    def answer(self) -> Json:
        return self._answer


def admin_of(
    cache: PrefixCache | CacheOff, run: RunOnEngine, *, pin_cap_nbytes: int
) -> CacheAdmin | NullAdmin:
    if isinstance(cache, CacheOff):
        return NullAdmin(cache, run)
    return CacheAdmin(cache, run, pin_cap_nbytes=pin_cap_nbytes)


def known_node(cache: PrefixCache, key: Key, namespace: Namespace | None) -> Node:
    """Raises NotFound."""
    node = browse.find(cache, key, namespace)
    if node is None:
        raise no_such_node()
    return node


class TreeQuery(Protocol):
    """Reads or changes the tree a slice at a time."""

    is_known: bool
    """Whether the node in question exists and the caller may see it."""

    def step(self, cache: PrefixCache) -> bool:
        """Do a slice; True when there is no more to do."""
        ...

    def answer(self) -> Json: ...


class SlicedTreeQuery:
    """Implements core.ports.SlicedQuery over a TreeQuery, whose slices run on the engine thread."""

    def __init__(self, cache: PrefixCache, run: RunOnEngine, query: TreeQuery) -> None:
        self._cache = cache
        self._run = run
        self._query = query

    def step(self) -> Future[bool]:
        def go_on(_: Json) -> bool:
            done = self._query.step(self._cache)
            if not self._query.is_known:
                raise no_such_node()
            return done

        return self._run(go_on)

    def answer(self) -> Json:
        return self._query.answer()


class SlicedRemoval(SlicedTreeQuery):
    """Its last slice is over once everything that was forgotten is deleted in all tiers."""

    def step(self) -> Future[bool]:
        answer: Future[bool] = Future()
        answer.set_running_or_notify_cancel()

        def stepped(is_last: bool) -> None:
            if is_last:
                promises = self._run(lambda _: self._cache.records.tiers.deleted())
                _then(promises, answer, lambda promises: _when_kept(promises, answer, True))
            else:
                answer.set_result(False)

        _then(super().step(), answer, stepped)
        return answer


def _answered(answer: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(answer)
    return future


def _then(future: Future[T], answer: Future[Any], go_on: Callable[[T], None]) -> None:
    """Go on with the result of a future; an error ends the answer."""

    def done(future: Future[T]) -> None:
        error = future.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            go_on(future.result())

    future.add_done_callback(done)


def _when_kept(promises: Sequence[Future[None]], answer: Future[T], result: T) -> None:
    """Answer when the last promise is kept, or with the error of the first that is not."""

    left = iter(promises)

    def go_on(kept: Future[None] | None) -> None:
        while kept is None or kept.done():
            if kept is not None and (error := kept.exception()) is not None:
                answer.set_exception(error)
                return
            kept = next(left, None)
            if kept is None:
                answer.set_result(result)
                return
        kept.add_done_callback(go_on)

    go_on(None)


def key_of(node: str) -> Key:
    """Raises NotFound if the text is not a key."""
    try:
        return Key(bytes.fromhex(node))
    except ValueError:
        raise no_such_node() from None


def no_such_node() -> NotFound:
    return NotFound("You have no such stored prefix; it may have been evicted since.", param="node")


# --- how full it is ------------------------------------------------------------------------


def stats(cache: PrefixCache, namespace: Namespace | None) -> Json:
    """Statistics of all namespaces, or of one without revealing anything about the others.

    Reads totals that are kept up to date: the cost does not depend on how much is stored.
    """
    everything = namespace is None
    counted = cache.stats if namespace is None else cache.records.counts.of(namespace)
    roots = _roots(cache, namespace)
    ledger = cache.records.ledger
    if namespace is None:
        in_memory, in_tiers = ledger.memory, ledger.tiers
    else:
        in_memory, in_tiers = _own_totals(cache, roots)
    memory: Json = {
        **_totals_view(in_memory),
        "tokens": sum(root.n_stored_tokens for root in roots),
        "pinned_bytes": sum(root.pinned_nbytes for root in roots),
        "parts": {
            part.value: {"records": in_memory.n_records[part], "bytes": in_memory.nbytes[part]}
            for part in Part
        },
    }
    tiers: dict[str, Json] = {}
    for tier, in_tier in zip(cache.records.tiers, in_tiers, strict=True):
        tiers[tier.name] = {"enabled": True, **_totals_view(in_tier)}
        if everything:
            tiers[tier.name]["folder"] = usage_view(tier.usage())
    if everything:
        memory["limit_bytes"] = cache.settings.limit_nbytes
        memory["room_bytes"] = cache.records.memory.limit_nbytes
        memory["leaving_bytes"] = ledger.leaving_nbytes
        memory |= cache.records.rows.view()
    view: Json = {
        "enabled": True,
        "reuse": "exact" if cache.settings.exact_chunk else "full",
        "block_tokens": cache.settings.block,
        "tiers": [MEMORY, *tiers],
        MEMORY: memory,
        **tiers,
        **counted.view(),
    }
    if everything:  # learned from everybody's requests
        view["estimates"] = cache.records.estimates.view()
        view["integrity"] = {
            "passes": cache.integrity.n_passes,
            "violations": cache.integrity.n_violations,
        }
    return view


def _roots(cache: PrefixCache, namespace: Namespace | None) -> list[Root]:
    roots = cache.records.tree.roots()
    return [root for root in roots if namespace in (None, root.namespace)]


def _own_totals(cache: PrefixCache, roots: list[Root]) -> tuple[PartTotals, list[PartTotals]]:
    memory, tiers = PartTotals(), [PartTotals() for _ in cache.records.tiers]
    for root in roots:
        memory.add(root.memory)
        for total, own in zip(tiers, root.tiers, strict=True):
            total.add(own)
    return memory, tiers


def _totals_view(totals: PartTotals) -> Json:
    return {"records": totals.total_records, "used_bytes": totals.total_nbytes}


def snapshot(cache: PrefixCache) -> Json:
    """See `CacheAdmin.snapshot`."""
    ledger = cache.records.ledger
    places = {MEMORY: ledger.memory}
    places |= {t.name: totals for t, totals in zip(cache.records.tiers, ledger.tiers, strict=True)}
    nbytes = {
        place: {p.value: n for p, n in totals.nbytes.items()} for place, totals in places.items()
    }
    usages = {t.name: t.usage() for t in cache.records.tiers}
    limits = {MEMORY: cache.records.memory.limit_nbytes}
    limits |= {name: usage.limit_nbytes for name, usage in usages.items()}
    counts = {name: dict(usage.counts) for name, usage in usages.items()}
    return {**cache.stats.view(), "bytes": nbytes, "limits": limits, "operations": counts}


def usage_view(usage: TierUsage) -> Json:
    """A tier as a whole, with all models and processes that share it."""
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


# --- one prompt ----------------------------------------------------------------------------


def probe(cache: PrefixCache, prompt: Prompt, namespace: Namespace) -> Json:
    """How much would hit, from where, and why not more. Changes nothing."""
    reuse = cache.probe(prompt, namespace)
    reason = reuse.reason
    return {
        "prompt_tokens": len(prompt),
        "cached_tokens": reuse.match.n_tokens,
        "shared_tokens": reuse.n_shared,
        "tiers": reuse.tiers,
        "reason": str(reason or ""),
        "cause": reason.cause.value if reason else None,
        "differs_at": reason.at if reason else None,
    }


def pin(cache: PrefixCache, prompt: Prompt, namespace: Namespace, *, cap_nbytes: int) -> Json:
    """Keep whatever is stored of this prompt until it is unpinned."""
    match = cache.probe(prompt, namespace).match
    if match.segments:
        end = match.segments[-1].node
        pin_end(cache, end, cap_nbytes=cap_nbytes)
        cache.records.tree.set_pinned_for(end, _key(prompt), match.n_tokens)
    return {"pinned_tokens": match.n_tokens, "pinned_bytes": pinned_nbytes(cache, namespace)}


def pin_end(cache: PrefixCache, end: Node, *, cap_nbytes: int) -> None:
    """Keep the prefix that ends here. Raises BadRequest if that is more than may be pinned."""
    allowed = _may_pin_nbytes(cache, end.root, cap_nbytes)
    was_pinned = end in end.root.pinned
    cache.records.pin(end)
    if end.root.pinned_nbytes > allowed:
        more = end.root.pinned_nbytes
        if not was_pinned:
            cache.records.unpin(end)
        raise BadRequest(f"With this prefix {more} bytes would be pinned; the limit is {allowed}.")


def _may_pin_nbytes(cache: PrefixCache, root: Root, cap_nbytes: int) -> int:
    """Bytes that may be pinned under this root: a share of memory, less other roots' pins."""
    size = cache.records.memory.limit_nbytes
    all_keys = min(cap_nbytes, int(PIN_SHARE * size))
    others = sum(r.pinned_nbytes for r in cache.records.tree.roots() if r is not root)
    return max(min(all_keys - others, all_keys), 0)


def unpin(cache: PrefixCache, prompt: Prompt, namespace: Namespace) -> Json:
    """Unpin what was pinned of this prompt, except what a longer pinned prompt shares.

    By now the prompt may match a different node than the one pinned for it.
    """
    n_tokens = {s.node: s.n_tokens for s in cache.probe(prompt, namespace).match.segments}
    key = _key(prompt)
    for root in _roots(cache, namespace):
        for end, prompts in root.pinned.items():
            if key in prompts:
                n_tokens |= {n: n.n_tokens for n in end.path()}
                n_tokens[end] = prompts[key] - end.start
    pinned = [node for node in n_tokens if node.n_pins]
    for node in n_tokens:
        cache.records.unpin(node)
    n_unpinned = sum(n_tokens[node] for node in pinned if not node.n_pins)
    return {"unpinned_tokens": n_unpinned, "pinned_bytes": pinned_nbytes(cache, namespace)}


def _key(prompt: Prompt) -> Key:
    """Identifies a prompt."""
    return child_key(Key(b""), packed_tokens(prompt).tokens)


def pinned_nbytes(cache: PrefixCache, namespace: Namespace | None = None) -> int:
    """Bytes pinned in all namespaces, or in one."""
    return sum(root.pinned_nbytes for root in _roots(cache, namespace))


def clear(cache: PrefixCache, namespace: Namespace | None = None) -> Json:
    """Forget every record, or one namespace's. Running requests finish, but store nothing more."""
    return {"freed_bytes": cache.records.clear(namespace).nbytes}
