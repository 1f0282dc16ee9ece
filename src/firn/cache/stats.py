"""Counters of what the cache did. Owner: the engine thread; readers get copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from firn.core.reuse import Reason
from firn.core.values import Namespace

ONE_TOKEN = "one token"
"""The reason for a miss with nothing to gain: the prompt's only token makes the logits."""


@dataclass(eq=False)
class Stats:
    n_lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """By kind. whole: all but the prompt's last token; growing: all that was stored of a shorter prompt;
    branching: a part of what was stored."""
    misses: Counter[str] = field(default_factory=Counter)
    """Lookups that reused nothing, by reason."""
    shortfalls: Counter[str] = field(default_factory=Counter)
    """Lookups that reused something but not all, by reason."""
    evictions: Counter[str] = field(default_factory=Counter)
    commits: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """Records that were not kept, by reason."""
    faults: Counter[str] = field(default_factory=Counter)
    n_tokens_prompt: int = 0
    n_tokens_cached: int = 0
    n_tokens_advanced: int = 0
    """Cached tokens that a request got from another one that was computing them at the same time."""
    tokens_by_tier: Counter[str] = field(default_factory=Counter)
    seconds_saved: float = 0.0

    def looked_up(
        self,
        *,
        n_prompt: int,
        n_cached: int,
        n_advanced: int = 0,
        kind: str,
        reason: Reason | None,
        tiers: Iterable[tuple[str, int]] = (),
    ) -> None:
        self.n_lookups += 1
        for tier, n in tiers:
            self.tokens_by_tier[tier] += n
        self.n_tokens_prompt += n_prompt
        self.n_tokens_cached += n_cached
        self.n_tokens_advanced += n_advanced
        if n_cached:
            self.hits[kind] += 1
            if reason is not None:
                self.shortfalls[reason.cause.value] += 1
        else:
            self.misses[ONE_TOKEN if reason is None else reason.cause.value] += 1

    def view(self) -> dict[str, Any]:
        """A copy, as plain values."""
        return {
            "lookups": self.n_lookups,
            "hits": dict(self.hits),
            "misses": dict(self.misses),
            "shortfalls": dict(self.shortfalls),
            "evictions": dict(self.evictions),
            "commits": dict(self.commits),
            "dropped": dict(self.dropped),
            "faults": dict(self.faults),
            "tokens": {
                "prompt": self.n_tokens_prompt,
                "cached": self.n_tokens_cached,
                "advanced": self.n_tokens_advanced,
                "by_tier": dict(self.tokens_by_tier),
            },
            "seconds_saved": round(self.seconds_saved, 3),
        }


class NamespaceStats:
    """The counters of all namespaces together, and those of each."""

    def __init__(self) -> None:
        self.total = Stats()
        self._own: dict[Namespace, Stats] = {}

    def of(self, namespace: Namespace) -> Stats:
        return self._own.get(namespace, Stats())

    def both(self, namespace: Namespace) -> tuple[Stats, Stats]:
        """Where to count what happens to a namespace: the total, and its own counters."""
        own = self._own.get(namespace)
        if own is None:
            own = self._own[namespace] = Stats()
        return self.total, own

    def committed(self, namespace: Namespace, part: str) -> None:
        for stats in self.both(namespace):
            stats.commits[part] += 1

    def evicted(self, namespace: Namespace, part: str) -> None:
        for stats in self.both(namespace):
            stats.evictions[part] += 1

    def dropped(self, namespace: Namespace, reason: str, n: int = 1) -> None:
        for stats in self.both(namespace):
            stats.dropped[reason] += n

    def failed(self, namespace: Namespace | None, reason: str) -> None:
        """namespace: whose request or record it was; None: nobody's in particular."""
        for stats in (self.total,) if namespace is None else self.both(namespace):
            stats.faults[reason] += 1
