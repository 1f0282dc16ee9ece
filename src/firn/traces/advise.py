"""How large a cache should be: a trace played against tables of sizes, in several processes.

A tier is played by itself; of two tiers together a prompt gets what the better one has of it, because
each holds chains from their beginnings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from firn.traces.simulate import SsdStore, play
from firn.traces.stack import play_all
from firn.traces.trace import Ints, Trace

ENOUGH = 0.01
"""A doubling that reuses fewer of the prompt tokens is not worth it."""
ALONE = 400_000
"""Requests, over all runs, below which other processes would cost more than they bring."""
N_SIZES = 5

Progress = Callable[[int, int], None]
"""Runs that are over, and all of them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the trace: memories of several sizes, or one SSD."""

    tier: Literal["memory", "ssd"]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Rates are shares of the prompt tokens. Sizes are in blocks, ascending."""

    memory: tuple[int, ...]
    ssd: tuple[int, ...]
    unlimited: float
    alone: Mapping[int, float]
    """By memory: what it reuses without an SSD."""
    together: Mapping[tuple[int, int], float]
    """By memory and SSD."""
    lru: Mapping[int, float]
    """By size: one tier that goes by the last use to the second, and touches every block."""

    @property
    def memory_knee(self) -> int:
        return knee(self.alone)

    @property
    def ssd_knee(self) -> int:
        """Beside the smallest memory."""
        first = self.memory[0]
        return knee({size: self.together[first, size] for size in self.ssd})


def advise(
    trace: Trace,
    *,
    memory: Sequence[int],
    ssd: Sequence[int],
    progress: Progress = lambda n, total: None,
    workers: int | None = None,
) -> Advice:
    """Sizes in blocks. workers: processes, as many as there are cores where it is not said."""
    memory, ssd = sorted(set(memory)), sorted(set(ssd))
    runs = [Run("memory", (*memory, *ssd)), *(Run("ssd", (n,)) for n in ssd)]
    depths = _play_all(trace, runs, progress, workers or os.cpu_count() or 1)
    of_memory = depths[runs[0]]
    of_ssd = {n: depths[Run("ssd", (n,))][n] for n in ssd}

    def rate(found: Ints) -> float:
        return float(found.sum(dtype=np.int64)) * trace.block / max(trace.n_prompt_tokens, 1)

    return Advice(
        tuple(memory),
        tuple(ssd),
        unlimited=rate(trace.known),
        alone={n: rate(of_memory[n]) for n in memory},
        together={(m, s): rate(np.maximum(of_memory[m], of_ssd[s])) for m in memory for s in ssd},
        lru={n: rate(of_memory[n]) for n in ssd},
    )


def knee(rates: Mapping[int, float]) -> int:
    """The smallest size from which on no doubling is worth it."""
    sizes = sorted(rates)
    best = sizes[-1]
    for small, large in reversed(list(pairwise(sizes))):
        if (rates[large] - rates[small]) / np.log2(large / small) >= ENOUGH:
            return best
        best = small
    return best


def suggested(trace: Trace, *, unit: float) -> tuple[list[int], list[int]]:
    """Sizes worth a look, in blocks: units by powers of two, for memory and for an SSD.

    unit: blocks in one.
    """
    whole = max(trace.n_nodes, 1)
    powers = [unit * 2.0**k for k in range(-20, 40)]
    fitting = [round(p) for p in powers if whole / 256 <= p <= whole * 2 and round(p) >= 1]
    sizes = sorted(set(fitting or [whole]))
    return sizes[:N_SIZES], sizes[-N_SIZES:]


def _play_all(
    trace: Trace, runs: Sequence[Run], progress: Progress, workers: int
) -> dict[Run, dict[int, Ints]]:
    done: dict[Run, dict[int, Ints]] = {}
    if workers == 1 or len(runs) * len(trace) < ALONE:
        for run in runs:
            done[run] = _play(trace, run)
            progress(len(done), len(runs))
        return done
    with tempfile.TemporaryDirectory(prefix="firn-advise-") as folder:
        trace.save(Path(folder))
        # Started afresh: a copy of this process would carry its threads' locks along.
        with ProcessPoolExecutor(min(workers, len(runs)), get_context("spawn")) as pool:
            waiting = {pool.submit(partial(_play_saved, folder, run)): run for run in runs}
            for future in as_completed(waiting):
                done[waiting[future]] = future.result()
                progress(len(done), len(runs))
    return done


def _play_saved(folder: str, run: Run) -> dict[int, Ints]:
    return _play(Trace.load(Path(folder)), run)


def _play(trace: Trace, run: Run) -> dict[int, Ints]:
    if run.tier == "memory":
        return play_all(trace, run.sizes)
    return {n: play(SsdStore(trace, n_blocks=n)) for n in run.sizes}
