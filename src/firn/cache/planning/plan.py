"""What to resume from now, and what to load in the meantime. Pure.

Loading and computing the same tokens race. The prompt is computed from the front while its blocks
are loaded from the back; where the two meet, the row jumps to the end of what is stored. So a load
is worth starting if some of it arrives before computing gets there, and a wrong estimate wastes
work, never time.

    0            front                                  match           n_prompt
    |-- resumed --|== computed ==>        <== loaded ====|-- computed ------|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.planning.match import (
    NOTHING,
    Available,
    Match,
    Walk,
    is_obtainable,
    resume_points,
)
from firn.cache.tree import Record

MAX_TARGETS = 64
"""Resume points that are weighed against each other."""
MIN_GAIN = 0.02
"""A load must save at least this share of the time that the prompt takes without it."""
GRACE_S = 0.005
"""How late a load may be before computing begins."""
UNKNOWN_PATIENCE_S = 0.03
"""How long computing waits for a load while the speed of prefill is unknown."""

TierOf = Callable[[Record], str]
"""The name of the tier that a record is read from."""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    now: Match
    """What can be resumed immediately."""
    target: Match = NOTHING
    """What can be resumed once the loads have arrived."""
    loads: tuple[Record, ...] = ()
    """What to read, in this order."""
    load_s: float = 0.0
    """How long the loads should take..."""
    compute_s: float = 0.0
    """... and how long computing the same tokens should take."""
    patience_s: float = 0.0
    """How long computing waits for the loads while the engine has nothing else to do..."""
    busy_patience_s: float = 0.0
    """... and while other rows decode, which computing would slow down."""
    is_slower: bool = False
    """More is stored than is loaded, because computing it is faster."""


def make_plan(
    walk: Walk,
    needs: Needs,
    estimates: Estimates,
    tier_of: TierOf,
    *,
    start: int = 0,
    available: Available,
) -> ResumePlan:
    """available: what can be resumed from now. start: tokens that are already computed."""
    now = next(resume_points(walk, needs, available))
    front = max(now.n_tokens, start)
    n_prompt = len(walk.tokens)
    alone_s = estimates.prefill_s(front, n_prompt)
    if not start:  # there is no row yet: either way one is filled
        alone_s += _fill_s(now, estimates)
    best, best_s = None, alone_s * (1 - MIN_GAIN)
    n_most = 0
    for match in _targets(walk, needs, front):
        n_most = max(n_most, match.n_tokens)
        target = _weigh(match, front, needs, estimates, tier_of, available)
        seconds = target.race_s + estimates.prefill_s(match.n_tokens, n_prompt)
        if seconds < best_s:
            best, best_s = target, seconds
    if best is None:
        return ResumePlan(now, is_slower=n_most > front)
    patience_s, busy_s = _patience(best, front, estimates)
    return ResumePlan(
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
    """Time until the row reaches the match, while loading and computing race."""


def _targets(walk: Walk, needs: Needs, front: int) -> Iterator[Match]:
    """Resume points that loading can reach: the last, and others evenly spread before it."""
    last, gap = 0, 0
    for match in resume_points(walk, needs, is_obtainable):
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
    available: Available,
) -> _Target:
    missing = tuple(r for r in match.records if not available(r))
    nbytes = Counter[str]()
    for record in missing:
        nbytes[tier_of(record)] += record.nbytes
    load_s = sum(estimates.load_s(tier, n) for tier, n in nbytes.items())
    compute_s = estimates.prefill_s(front, match.n_tokens)
    engine_s = estimates.engine_s(sum(nbytes.values()))
    fill_s = _fill_s(match, estimates)
    if not needs.pages:  # windows and states are of use only once all have arrived
        race_s = load_s + engine_s + fill_s
    else:
        share = compute_s / max(load_s + compute_s, 1e-9)
        race_s = share * (load_s + engine_s) + fill_s
    return _Target(match, missing, tuple(nbytes), load_s, compute_s, race_s)


def _fill_s(match: Match, estimates: Estimates) -> float:
    return estimates.fill_s(match.nbytes_of(match.records))


def _from_the_back(records: Iterable[Record]) -> tuple[Record, ...]:
    """States and windows, without which nothing can resume; then pages, the last block first."""
    return tuple(sorted(records, key=lambda r: (r.part is Part.PAGES, -r.node.start)))


def _patience(target: _Target, front: int, estimates: Estimates) -> tuple[float, float]:
    """How long to wait for the load: alone, and while others decode.

    A chunk that begins just before its tokens arrive delays them by a chunk. A load that should
    take less than half the time of computing is awaited until a chunk could have been computed: by
    then its pace is known. One that should take less than a chunk may take twice as long as
    expected, or half the time until computing can be interrupted: the first load after a start is
    slower than any later.
    """
    late = 2 * target.load_s + GRACE_S
    if not estimates.knows_prefill:
        return (min(late, UNKNOWN_PATIENCE_S),) * 2
    chunk_s = estimates.chunk_s(front)
    if target.load_s < target.compute_s / 2:
        late = max(late, min(chunk_s, target.compute_s) / 2)
        return (late if target.load_s < chunk_s else min(late, chunk_s)), late
    alone = late if target.load_s < chunk_s else 0.0
    return alone, alone
