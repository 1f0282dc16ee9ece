"""What to resume from now, what to load meanwhile, and why not more: pure functions.

A load and the computing of the same tokens race. The prompt is computed from the front while its blocks
are loaded from the back; where the two meet, the row jumps to the end. So a load is worth beginning if
some of it arrives before computing gets there, and an estimate that is wrong wastes work, never time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.planning.match import NOTHING, Match, Walk, points
from firn.cache.tree import Record, Tree

MAX_TARGETS = 64
"""Resume points that are weighed against each other."""
MIN_GAIN = 0.02
"""A load must save this part of the time it would take without."""
GRACE_S = 0.005
"""What a load may be late before computing begins."""
UNKNOWN_PATIENCE_S = 0.03
"""How long computing waits for a load while nothing is known of either."""

TierOf = Callable[[Record], str]
"""The name of the tier that a record is read from."""


@dataclass(frozen=True, slots=True)
class Plan:
    now: Match
    """What can be resumed at once."""
    target: Match = NOTHING
    """What can be resumed when the loads are there."""
    loads: tuple[Record, ...] = ()
    """What is to be read, in this order."""
    load_s: float = 0.0
    """How long that is thought to take..."""
    compute_s: float = 0.0
    """... and how long computing what it stands for."""
    patience_s: float = 0.0
    """So long computing waits for the loads, when nobody else has anything to do..."""
    busy_patience_s: float = 0.0
    """... and while others decode, whom computing would slow down."""
    is_slower: bool = False
    """More is stored than is loaded: computing it is faster."""


def make_plan(
    way: Walk,
    needs: Needs,
    estimates: Estimates,
    tier_of: TierOf,
    *,
    start: int = 0,
    have: Callable[[Record], bool],
) -> Plan:
    """`have`: what can be had at once. `start`: so many tokens are computed already."""
    now = next(points(way, needs, have))
    front = max(now.n_tokens, start)
    n_prompt = len(way.tokens)
    alone_s = estimates.prefill_s(front, n_prompt)
    best, best_s = None, alone_s * (1 - MIN_GAIN)
    n_most = 0
    for match in _targets(way, needs, front):
        n_most = max(n_most, match.n_tokens)
        target = _weigh(match, front, needs, estimates, tier_of, have)
        seconds = target.race_s + estimates.prefill_s(match.n_tokens, n_prompt)
        if seconds < best_s:
            best, best_s = target, seconds
    if best is None:
        return Plan(now, is_slower=n_most > front)
    patience_s, busy_s = _patience(best, front, estimates)
    return Plan(
        now,
        best.match,
        _from_the_back(best.missing),
        best.load_s,
        best.compute_s,
        patience_s,
        busy_s,
        is_slower=n_most > best.match.n_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    match: Match
    missing: tuple[Record, ...]
    tiers: tuple[str, ...]
    load_s: float
    compute_s: float
    race_s: float
    """Until the row stands at the match, with both at work."""


def _targets(way: Walk, needs: Needs, front: int) -> Iterator[Match]:
    """Resume points that can be had by loading: the last, and others evenly spread before it."""
    last, gap = 0, 0
    for match in points(way, needs, lambda record: record.obtainable):
        if match.n_tokens <= front:
            return
        if not last or last - match.n_tokens >= gap:
            gap = gap or (match.n_tokens - front) // MAX_TARGETS
            last = match.n_tokens
            yield match


def _weigh(
    match: Match,
    front: int,
    needs: Needs,
    estimates: Estimates,
    tier_of: TierOf,
    have: Callable[[Record], bool],
) -> _Target:
    missing = tuple(r for r in match.records if not have(r))
    nbytes = Counter[str]()
    for record in missing:
        nbytes[tier_of(record)] += record.nbytes
    load_s = sum(estimates.load_s(tier, n) for tier, n in nbytes.items())
    compute_s = estimates.prefill_s(front, match.n_tokens)
    engine_s = estimates.engine_s(sum(nbytes.values()))
    fill_s = estimates.fill_s.value * sum(r.nbytes for r in match.records)
    if not needs.pages:  # all or nothing
        race_s = load_s + engine_s + fill_s
    else:
        share = compute_s / max(load_s + compute_s, 1e-9)
        race_s = share * (load_s + engine_s) + fill_s
    return _Target(match, missing, tuple(nbytes), load_s, compute_s, race_s)


def _from_the_back(records: Iterable[Record]) -> tuple[Record, ...]:
    """States and windows, without which nothing goes; then pages, the last block first."""
    return tuple(sorted(records, key=lambda r: (r.part is Part.PAGES, -r.node.start)))


def _patience(target: _Target, front: int, estimates: Estimates) -> tuple[float, float]:
    """To begin a chunk just before its tokens arrive would delay them by a chunk.

    A load that should take half the time of computing is waited for until a chunk could have been
    computed: by then its pace is known.
    """
    late = 2 * target.load_s + GRACE_S
    if not (estimates.knows_prefill and all(map(estimates.knows_tier, target.tiers))):
        return (min(late, UNKNOWN_PATIENCE_S),) * 2
    chunk_s = estimates.chunk_s(front)
    if target.load_s < target.compute_s / 2:
        return (late if target.load_s < chunk_s else min(late, chunk_s)), late
    alone = late if target.load_s < chunk_s else 0.0
    return alone, alone


# --- why not more --------------------------------------------------------------------------

SWITCHED_OFF = "reading off"
NOT_YET = "not yet loaded"
SLOWER = "slower to load"
NO_STATE = "no state checkpoint"
OFF_THE_GRID = "whole chunks only"
EVICTED = "evicted"
COLD = "cold"


def why_not_more(tree: Tree, way: Walk, needs: Needs, n_tokens: int) -> str:
    """Why a prompt resumes at this position and not later; '' when only its last token is left.

    For what can be had now, by memory or by loading: what else stood in the way of a load, the
    caller knows better.
    """
    n_last = len(way.tokens) - 1
    if n_tokens >= n_last:
        return ""
    if n_tokens >= n_last - n_last % needs.grid:
        return OFF_THE_GRID
    limit = way.limit
    if n_tokens < limit:
        if n_tokens >= limit - limit % needs.grid:
            return OFF_THE_GRID
        if needs.state and _covered(way, needs):
            return NO_STATE
        return EVICTED
    if _next_was_evicted(tree, way):
        return EVICTED
    return f"diverged at token {way.n_shared}" if way.n_shared else COLD


def _covered(way: Walk, needs: Needs) -> bool:
    """Whether the pages of the path can all be had, so that a state would do."""
    pages = (node.records.get(Part.PAGES) for node in way.path if needs.pages)
    return all(r is not None and r.obtainable for r in pages)


def _next_was_evicted(tree: Tree, way: Walk) -> bool:
    """Whether more than is there now was there once.

    Where another child shares some tokens, only one that contained the whole next block is known to
    have shared more.
    """
    last = way.node(len(way.path))
    n = way.block if way.n_shared > last.end else 1
    tokens = way.tokens.tokens[last.end : last.end + n]
    return len(tokens) == n and tree.evicted.had(last, tokens)
