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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.planning.match import (
    ANYWHERE,
    NOTHING,
    Available,
    Match,
    ResumePoint,
    ResumePoints,
    Walk,
    last_match,
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

_start = attrgetter("node.start")


@dataclass(frozen=True, slots=True)
class ResumePlan:
    now: Match
    """What can be resumed immediately."""
    target: Match = NOTHING
    """What can be resumed once the loads have arrived."""
    loads: tuple[Record, ...] = ()
    """What to read, in this order."""
    load_s: float = 0.0
    """How long the loads should take."""
    compute_s: float = 0.0
    """How long computing the same tokens should take."""
    patience_s: float = 0.0
    """How long computing waits for the loads while the engine has nothing else to do."""
    busy_patience_s: float = 0.0
    """How long it waits while other rows decode, which computing would slow down."""
    is_slower: bool = False
    """More is stored than is loaded, because computing it is faster."""


def make_plan(
    walk: Walk,
    needs: Needs,
    estimates: Estimates,
    tiers: Sequence[str],
    *,
    start: int = 0,
    available: Available,
) -> ResumePlan:
    """available: what can be resumed from now. tiers: their names, the fastest first. start: tokens
    that are already computed."""
    now = last_match(walk, needs, available)
    front = max(now.n_tokens, start)
    n_prompt = len(walk.tokens)
    alone_s = estimates.prefill_s(front, n_prompt)
    if not start:  # there is no row yet: either way one is filled
        alone_s += estimates.fill_s(now.nbytes_of(now.records))
    best, best_s = None, alone_s * (1 - MIN_GAIN)
    n_most = 0
    points = ResumePoints.of(walk, needs, ANYWHERE)
    targets = list(_targets(points, front))
    if not targets:
        return ResumePlan(now)
    costs = _ReadCosts(points, available, tiers)
    for point in targets:
        n_most = max(n_most, point.n_tokens)
        target = _weigh(point, costs, front, estimates)
        seconds = target.race_s + estimates.prefill_s(point.n_tokens, n_prompt)
        if seconds < best_s:
            best, best_s = target, seconds
    if best is None:
        return ResumePlan(now, is_slower=n_most > front)
    match = best.point.match()
    patience_s, busy_s = _patience(best, front, estimates)
    return ResumePlan(
        now,
        match,
        _from_the_back(r for r in match.records if not available.has(r)),
        best.load_s,
        best.compute_s,
        patience_s,
        busy_s,
        is_slower=n_most > match.n_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    point: ResumePoint
    load_s: float
    compute_s: float
    race_s: float
    """Time until the row reaches the point, while loading and computing race."""


def _targets(points: ResumePoints, front: int) -> Iterator[ResumePoint]:
    """Resume points that loading can reach: the last, and others evenly spread before it."""
    point = next(points.up_to(len(points.walk.tokens)))
    gap = max((point.n_tokens - front) // MAX_TARGETS, 1)
    while point.n_tokens > front:
        yield point
        point = next(points.up_to(max(point.n_tokens - gap, 0)))


class _ReadCosts:
    """Which bytes a resume reads, and from where. Sums along the path: a point costs no more than
    its last block."""

    def __init__(self, points: ResumePoints, available: Available, tiers: Sequence[str]) -> None:
        self._available = available
        self._tiers = tiers
        self._pages = self._sums(points.pages)
        self._windows = self._sums(points.windows)

    def of(self, point: ResumePoint) -> tuple[Counter[str], int]:
        """Bytes to load by tier, and how many bytes fill the row in all (see `Match.nbytes_of`)."""
        nbytes = Counter[str]()
        for place, sums in self._pages.items():
            nbytes[place] += sums[point.n_whole]
        for place, sums in self._windows.items():
            nbytes[place] += sums[point.n_whole] - sums[point.first_window]
        for record in (*point.tail_records, *point.states):
            nbytes[self._place(record)] += record.nbytes
        n_filled = nbytes.total()
        if point.tail is not None:
            left_out = 1 - (point.n_tokens - point.tail.start) / point.tail.n_tokens
            n_filled -= int(left_out * sum(r.nbytes for r in point.tail_records))
        del nbytes[""]
        return nbytes, n_filled

    def _sums(self, records: Sequence[Record | None]) -> Mapping[str, Sequence[int]]:
        """For each place: the bytes of its records among the first n, for every n."""
        places = ["" if r is None else self._place(r) for r in records]
        return {
            place: list(
                accumulate(
                    (
                        r.nbytes if r is not None and at == place else 0
                        for r, at in zip(records, places, strict=True)
                    ),
                    initial=0,
                )
            )
            for place in set(places)
        }

    def _place(self, record: Record) -> str:
        """The tier that it is read from; '' if it need not be loaded."""
        if self._available.has(record):
            return ""
        return self._tiers[record.fastest_tier]


def _weigh(point: ResumePoint, costs: _ReadCosts, front: int, estimates: Estimates) -> _Target:
    nbytes, n_filled = costs.of(point)
    load_s = sum(estimates.load_s(tier, n) for tier, n in nbytes.items())
    compute_s = estimates.prefill_s(front, point.n_tokens)
    engine_s = estimates.engine_s(nbytes.total())
    fill_s = estimates.fill_s(n_filled)
    if not point.points.needs.pages:  # windows and states are of use only once all have arrived
        race_s = load_s + engine_s + fill_s
    else:
        share = compute_s / max(load_s + compute_s, 1e-9)
        race_s = share * (load_s + engine_s) + fill_s
    return _Target(point, load_s, compute_s, race_s)


def _from_the_back(records: Iterable[Record]) -> tuple[Record, ...]:
    """States and windows, without which nothing can resume; then pages, the last block first.

    records: of a match, each part's in order.
    """
    pages, others = list[Record](), list[Record]()
    for record in records:
        (pages if record.part is Part.PAGES else others).append(record)
    others.sort(key=_start, reverse=True)
    return (*others, *reversed(pages))


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
