"""Short prompts that wait at the same time are read in one pass, where measurements say that it pays.

A pass of few tokens leaves a device partly idle; how much depends on the device and the model. So
both ways are tried and timed per token, the faster one is used, and the other is tried again now
and then. Prompts that share what they have not read yet are not read together: the second gets it
from the first. Not in exact mode: other shapes give other bits.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from firn.engine.inflight import InFlight
from firn.engine.sequence import PrefillTask

log = logging.getLogger("firn.engine")

MAX_TOKENS = 1024
"""The longest prompt: a pass is padded to its longest."""
MAX_NEW_TOKENS = 512
MIN_NEW_TOKENS = 8
MIN_FULL = 0.6
"""The least share of a pass that is not padding."""
N_SHARED = 16
"""Prompts that agree on so many unread tokens wait for each other."""
N_TRIED, N_KEPT = 4, 9
WORTH = 0.95
"""Time of a token read together over one read alone: above this it does not pay."""
TRY_EVERY = 64
"""Occasions between two trials of the slower way."""


@dataclass(eq=False)
class BatchTrial:
    """Decides whether to read short prompts together, by what both ways took."""

    alone_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_KEPT))
    together_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_KEPT))
    """Seconds per token of passes of each kind."""
    _n: int = 0

    def next(self) -> bool:
        """Whether to read the next ones together."""
        self._n += 1
        if len(self.together_s) < N_TRIED or len(self.alone_s) < N_TRIED:
            return len(self.together_s) <= len(self.alone_s)
        pays = median(self.together_s) < WORTH * median(self.alone_s)
        return pays is not (self._n % TRY_EVERY == 0)

    def saw(self, seconds: float, *, n_tokens: int, n_prompts: int) -> None:
        kept = self.together_s if n_prompts > 1 else self.alone_s
        kept.append(seconds / n_tokens)


class PromptBatches:
    def __init__(self, inflight: InFlight, jump: Callable[[PrefillTask], bool]) -> None:
        """jump: see `Prefill.jump`."""
        self._inflight = inflight
        self._jump = jump
        self._trial = BatchTrial()
        self._works = inflight.runner.reads_together and not inflight.limits.aligned
        self.n_passes = 0

    def find(self, task: PrefillTask, *, most: int) -> list[PrefillTask]:
        """The tasks to read in the same pass. most: tokens of a pass."""
        task.others, task.share = [], 1.0
        if not self._works or not self._is_short(task):
            return []
        busy = bool(self._inflight.rows)
        waiting = [t for t in self._inflight.tasks.values() if t is not task and self._is_short(t)]
        waiting = [
            t for t in waiting if not t.cursor.racing and not t.cursor.should_wait(busy=busy)
        ]
        chosen = _alike(task, waiting, most=most)
        task.is_occasion = bool(chosen)
        if not chosen or not self._trial.next():
            return []
        return [t for t in chosen if self._jump(t) and t.n_left]

    def _is_short(self, task: PrefillTask) -> bool:
        return (
            MIN_NEW_TOKENS <= task.n_left <= MAX_NEW_TOKENS
            and task.n_total <= MAX_TOKENS
            and not task.scored
            and task.reading is None
            and task.prompt.thinned is None
            and not task.prompt.unbroken
            and not self._inflight.cache.stops(task.cursor)
        )

    def prefill(self, task: PrefillTask, others: Sequence[PrefillTask]) -> bool:
        """Dispatch a pass for all of them. False: it does not work for this model after all."""
        tasks = [task, *others]
        total, began = sum(t.n_left for t in tasks), time.perf_counter()
        starts = [t.row.n_tokens for t in tasks]
        shares = [t.n_left / total for t in tasks]
        try:
            self._inflight.runner.prefill_together(
                [t.row for t in tasks], [t.prompt for t in tasks], [t.n_total for t in tasks]
            )
        except (RuntimeError, MemoryError):
            raise  # a device fault, not the model's
        except Exception as e:
            log.warning("prompts cannot be read together: %r", e, exc_info=e)
            self._works = False
            return False
        self.n_passes += 1
        for t, start, share in zip(tasks, starts, shares, strict=True):
            t.chunk_start, t.chunk_began, t.share = start, began, share
        task.others = list(others)
        return True

    def settled(self, task: PrefillTask, seconds: float) -> None:
        """A pass that this task led took this long."""
        if task.is_occasion or task.others:
            n_tokens = task.row.n_tokens - task.chunk_start
            self._trial.saw(
                seconds, n_tokens=int(n_tokens / task.share), n_prompts=1 + len(task.others)
            )


def _alike(task: PrefillTask, waiting: Sequence[PrefillTask], *, most: int) -> list[PrefillTask]:
    """Tasks that fill a pass of at most `most` tokens with little padding."""
    chosen: list[PrefillTask] = []
    for other in sorted(waiting, key=lambda t: abs(t.n_left - task.n_left)):
        every = [task, *chosen, other]
        width = max(t.n_left for t in every)
        if width * len(every) > most or sum(t.n_left for t in every) < MIN_FULL * width * len(
            every
        ):
            break
        if not any(_share(other, t) for t in every[:-1]):
            chosen.append(other)
    return chosen


def _share(a: PrefillTask, b: PrefillTask) -> bool:
    """Whether both would compute the same tokens."""
    start = min(a.row.n_tokens, b.row.n_tokens)
    end = max(a.row.n_tokens, b.row.n_tokens) + N_SHARED
    mine, theirs = a.prompt.ids[start:end], b.prompt.ids[start:end]
    return len(mine) == len(theirs) and bool(np.array_equal(mine, theirs))
