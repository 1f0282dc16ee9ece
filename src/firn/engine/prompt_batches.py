"""Reads short prompts that wait at the same time in one pass, if measurements show that it pays.

A pass of few tokens leaves a device partly idle; how much depends on the device and the model. So
prompts are read alone and together, both are timed per token, the faster is used, and the slower is
tried again now and then. Prompts whose unread parts begin with the same tokens are not read
together: the second reuses what the first computes. Nor are any in exact mode: other shapes give
other bits.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from firn.core.measure import Median
from firn.engine.inflight import InFlight
from firn.engine.sequence import PrefillTask

log = logging.getLogger("firn.engine")

MAX_TOKENS = 1024
"""The longest prompt that is read together with others."""
MAX_NEW_TOKENS = 512
MIN_NEW_TOKENS = 8
MIN_FILL = 0.6
"""Minimum share of a pass that is not padding: each row is padded to the longest."""
N_SHARED = 16
"""Of two prompts whose next N_SHARED tokens agree, one waits for the other's records."""
N_KEPT = 5
"""Timings of each kind. The first passes of a shape take longer: three later ones outvote two."""
MAX_TIME_RATIO = 0.95
"""Time per token together over time per token alone: above this, reading together does not pay."""
TRY_FIRST, TRY_EVERY = 8, 64
"""Decisions between two trials of the slower kind: TRY_FIRST, doubled each time up to TRY_EVERY."""


@dataclass(eq=False)
class BatchTrial:
    """Decides whether to read short prompts together or alone, by how long each took."""

    alone_s: Median = field(default_factory=lambda: Median(kept=N_KEPT))
    batched_s: Median = field(default_factory=lambda: Median(kept=N_KEPT))
    """Seconds per token of passes of each kind."""
    _n_spaced: int = TRY_FIRST
    _n_decisions: int = 0
    """Decisions since the slower kind was tried."""

    def should_batch(self) -> bool:
        """Whether to read the next prompts together."""
        if not (self.batched_s.is_sure and self.alone_s.is_sure):
            return len(self.batched_s) <= len(self.alone_s)
        pays = self.batched_s.value < MAX_TIME_RATIO * self.alone_s.value
        self._n_decisions += 1
        if self._n_decisions < self._n_spaced:
            return pays
        self._n_decisions, self._n_spaced = 0, min(2 * self._n_spaced, TRY_EVERY)
        return not pays

    def observe(self, seconds: float, *, n_tokens: int, n_prompts: int) -> None:
        samples = self.batched_s if n_prompts > 1 else self.alone_s
        samples.add(seconds / n_tokens)


class PromptBatches:
    def __init__(self, inflight: InFlight, skip_ahead: Callable[[PrefillTask], bool]) -> None:
        """skip_ahead: see `Prefill.skip_ahead`."""
        self._inflight = inflight
        self._skip_ahead = skip_ahead
        self._trial = BatchTrial()
        self._is_supported = inflight.runner.can_batch_prefill and not inflight.limits.aligned

    def find(self, task: PrefillTask, *, max_tokens: int) -> list[PrefillTask]:
        """The tasks to read in the same pass. max_tokens: of the whole pass."""
        task.others, task.share = [], 1.0
        if not self._is_supported or not self._is_short(task):
            return []
        busy = bool(self._inflight.rows)
        waiting = [t for t in self._inflight.tasks.values() if t is not task and self._is_short(t)]
        waiting = [
            t for t in waiting if not t.cursor.racing and not t.cursor.should_wait(busy=busy)
        ]
        chosen = _fill_pass(task, waiting, max_tokens=max_tokens)
        task.could_batch = bool(chosen)
        if not chosen or not self._trial.should_batch():
            return []
        chosen = [t for t in chosen if self._skip_ahead(t)]
        return [t for t in chosen if t.number in self._inflight.tasks]  # a fault puts all back

    def _is_short(self, task: PrefillTask) -> bool:
        return (
            MIN_NEW_TOKENS <= task.n_left <= MAX_NEW_TOKENS
            and task.n_total <= MAX_TOKENS
            and task.is_plain
            and not task.prompt.unbroken
            and not any(stop < task.n_total for stop in task.cursor.stops())
        )

    def prefill(self, task: PrefillTask, others: Sequence[PrefillTask]) -> bool:
        """Dispatch one pass for all of them. False: this model cannot do it after all."""
        tasks = [task, *others]
        total, began = sum(t.n_left for t in tasks), time.perf_counter()
        starts = [t.row.n_tokens for t in tasks]
        shares = [t.n_left / total for t in tasks]
        try:
            self._inflight.runner.batched_prefill(
                [t.row for t in tasks], [t.prompt for t in tasks], [t.n_total for t in tasks]
            )
        except (RuntimeError, MemoryError):
            raise  # may be the device's fault, which says nothing about the model
        except ValueError as e:
            log.info("prompts are read one by one: %s", e)
            self._is_supported = False
            return False
        except Exception as e:
            log.warning(
                "this model cannot read several prompts in one pass; "
                "reading each one alone from now on: %r",
                e,
                exc_info=e,
            )
            self._is_supported = False
            return False
        for t, start, share in zip(tasks, starts, shares, strict=True):
            t.chunk_start, t.chunk_began, t.share = start, began, share
        task.others = list(others)
        return True

    def observe(self, task: PrefillTask, seconds: float) -> None:
        """The pass that this task led took `seconds`."""
        if task.could_batch or task.others:
            n_tokens = task.row.n_tokens - task.chunk_start
            self._trial.observe(
                seconds, n_tokens=int(n_tokens / task.share), n_prompts=1 + len(task.others)
            )


def _fill_pass(
    task: PrefillTask, waiting: Sequence[PrefillTask], *, max_tokens: int
) -> list[PrefillTask]:
    """Which tasks fill a pass of at most `max_tokens`, led by `task`, with little padding."""
    chosen: list[PrefillTask] = []
    for other in sorted(waiting, key=lambda t: abs(t.n_left - task.n_left)):
        lengths = [t.n_left for t in (task, *chosen, other)]
        n_padded = max(lengths) * len(lengths)
        if n_padded > max_tokens or sum(lengths) < MIN_FILL * n_padded:
            break
        if not any(_begin_alike(other, t) for t in (task, *chosen)):
            chosen.append(other)
    return chosen


def _begin_alike(a: PrefillTask, b: PrefillTask) -> bool:
    """Whether both would compute the same tokens first."""
    start = min(a.row.n_tokens, b.row.n_tokens)
    end = max(a.row.n_tokens, b.row.n_tokens) + N_SHARED
    return bool(np.array_equal(a.prompt.ids[start:end], b.prompt.ids[start:end]))
