"""Plans the next step: a pure function of the pending work.

Fairness, in four rules:
- A decode step of all replies runs between any two prefill chunks, so a long prompt never stops them.
- Requests are admitted in order of arrival.
- Chunks alternate between the oldest prompt and the one with the least left to read. Short prompts
  overtake one of 100K tokens within a few chunks, and the long one still gets half of all chunks: it
  takes at most twice as long, whatever arrives after it.
- A prompt that is also being loaded gets a chunk only if no other prompt needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.core.common_chunks import common_end
from firn.core.values import RequestId


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue, in order of arrival."""

    id: RequestId
    n_rows: int
    need_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A prompt being read, in order of arrival.

    racing: a part of it is being loaded while it is computed. should_wait: the load ends so soon that
    no chunk should start.
    """

    task: int
    n_left: int
    racing: bool = False
    should_wait: bool = False


@dataclass(frozen=True, slots=True)
class PendingWork:
    waiting: tuple[Waiting, ...]
    prefilling: tuple[Prefilling, ...]
    n_rows: int
    """Rows taken by admitted requests, prefilling and decoding alike."""
    max_rows: int
    n_decoding: int
    free_nbytes: int
    turn: int
    """Counts prefill chunks; its parity decides whose turn it is."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    admit: tuple[RequestId, ...]
    prefill: int | None
    """The task that gets one chunk."""
    decode: bool


def plan(work: PendingWork) -> StepPlan:
    return StepPlan(
        admit=_admit(work),
        prefill=_next_prefill(work.prefilling, work.turn),
        decode=work.n_decoding > 0,
    )


def _admit(work: PendingWork) -> tuple[RequestId, ...]:
    """First come, first served: a request that does not fit yet holds back those after it."""
    admitted: list[RequestId] = []
    n_rows, free = work.n_rows, work.free_nbytes
    for w in work.waiting:
        alone = n_rows == 0  # an empty engine admits any request: waiting would free nothing
        if n_rows + w.n_rows > work.max_rows and not alone:
            break
        if w.need_nbytes > free and not alone:
            break
        admitted.append(w.id)
        n_rows += w.n_rows
        free -= w.need_nbytes
    return tuple(admitted)


def _next_prefill(prompts: Sequence[Prefilling], turn: int) -> int | None:
    ready = [p for p in prompts if not p.racing]
    ready = ready or [p for p in prompts if not p.should_wait]
    if not ready:
        return None
    if turn % 2 == 0:
        return min(ready, key=lambda p: p.n_left).task
    return ready[0].task


def chunk_end(
    n_done: int,
    n_total: int,
    *,
    chunk: int,
    stops: Sequence[int] = (),
    unbroken: Sequence[tuple[int, int]] = (),
    aligned: bool = True,
    common: int = 0,
) -> int:
    """Where the next prefill chunk ends.

    Chunks are aligned to absolute positions, so that a prompt is always cut in the same places,
    whatever part of it was restored. A stop (they ascend) ends a chunk early. If results need not be
    equal bit for bit (`aligned` is False), the last chunk and a half is read as one chunk: two cost
    more.

        0        chunk      2*chunk     n_total
        |----------|----------|---x
             ^ n_done: the next chunk ends at `chunk`, or at the first stop after n_done

    An end inside an unbroken range moves to the start of the range, or to its end if the chunk starts
    in it. So this, too, depends on the prompt alone.

    common: the `multiple` of `common_end`, for chunks that are not aligned.
    """
    end = min((n_done // chunk + 1) * chunk, n_total)
    if not aligned and n_total - n_done <= chunk + chunk // 2:
        end = n_total
    if not aligned:
        end = common_end(n_done, end, multiple=common)
    for stop in stops:
        if n_done < stop < end and not any(first < stop < last for first, last in unbroken):
            end = stop
            break
    for first, last in unbroken:
        if first < end < last:
            return first if first > n_done else min(last, n_total)
    return end
