"""How large a cache should be: a trace played against tables of sizes, in several processes.

Each tier is played by itself. Two tiers together reuse as much of a prompt as the better one does,
because each holds chains from their beginnings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from firn.traces.simulate import SimulatedSsd, play, play_all
from firn.traces.trace import Ints, Trace

ENOUGH = 0.01
"""The share of the prompt tokens that a doubling must add to the reuse to be worth it."""
SERIAL_BELOW = 400_000
"""Requests in all runs together, below which starting processes costs more than it saves."""
ENOUGH_MEMORY, ENOUGH_SSD = 0.99, 0.999
"""Shares of what an unlimited cache reuses: once reached, larger sizes are not worth a column."""
N_BEFORE = 4

Progress = Callable[[int, int], None]
"""Called with the number of finished runs and the total."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Rates are shares of the prompt tokens. Sizes are in blocks, ascending."""

    memory: tuple[int, ...]
    ssd: tuple[int, ...]
    unlimited: float
    alone: Mapping[int, float]
    """By memory size: the rate without an SSD."""
    together: Mapping[tuple[int, int], float]
    """By memory size and SSD size."""
    lru: Mapping[int, float]
    """By size: one tier with an exact LRU order, in which every use touches every block."""

    @property
    def memory_knee(self) -> int:
        return knee(self.alone)

    @property
    def ssd_knee(self) -> int:
        """With the smallest memory."""
        first = self.memory[0]
        return knee({size: self.together[first, size] for size in self.ssd})


def advise(
    trace: Trace,
    *,
    memory: Sequence[int] = (),
    ssd: Sequence[int] = (),
    unit: float = 1.0,
    progress: Progress = lambda n, total: None,
    workers: int | None = None,
) -> Advice:
    """Sizes in blocks; if none are given, the unit times powers of two, in the range that matters.

    unit: in blocks. workers: processes; None: one for each core.
    """

    def rate(depths: Ints) -> float:
        return float(depths.sum(dtype=np.int64)) * trace.block / max(trace.n_prompt_tokens, 1)

    unlimited = rate(trace.known)
    of_memory = play_all(trace, [*_powers(trace, unit), *memory, *ssd])
    curve = {n: rate(depths) for n, depths in of_memory.items()}
    memory = sorted(set(memory)) or _around(curve, ENOUGH_MEMORY * unlimited)
    ssd = sorted(set(ssd)) or _around(curve, ENOUGH_SSD * unlimited)
    progress(1, 1 + len(ssd))
    of_ssd = _play_ssds(
        trace, ssd, lambda n: progress(1 + n, 1 + len(ssd)), workers or os.cpu_count() or 1
    )
    return Advice(
        tuple(memory),
        tuple(ssd),
        unlimited=unlimited,
        alone={n: curve[n] for n in memory},
        together={(m, s): rate(np.maximum(of_memory[m], of_ssd[s])) for m in memory for s in ssd},
        lru={n: curve[n] for n in ssd},
    )


def _powers(trace: Trace, unit: float) -> list[int]:
    """The unit times powers of two, up to twice as many blocks as are ever stored."""
    powers = [round(unit * 2.0**k) for k in range(-40, 60)]
    return sorted({p for p in powers if 1 <= p <= 2 * max(trace.n_nodes, 1)} or {1})


def _around(curve: Mapping[int, float], enough: float) -> list[int]:
    """The first size that is enough, up to N_BEFORE sizes before it, and one after it."""
    sizes = sorted(curve)
    last = next((i for i, size in enumerate(sizes) if curve[size] >= enough), len(sizes) - 1)
    return sizes[max(last - N_BEFORE, 0) : last + 2]


def knee(rates: Mapping[int, float]) -> int:
    """The smallest size beyond which no doubling is worth it."""
    sizes = sorted(rates)
    best = sizes[-1]
    for small, large in reversed(list(pairwise(sizes))):
        if (rates[large] - rates[small]) / np.log2(large / small) >= ENOUGH:
            return best
        best = small
    return best


def _play_ssds(
    trace: Trace, sizes: Sequence[int], progress: Callable[[int], None], workers: int
) -> dict[int, Ints]:
    """By size: how many blocks of each prompt an SSD of that size had."""
    done: dict[int, Ints] = {}
    if workers == 1 or len(sizes) * len(trace) < SERIAL_BELOW:
        for size in sizes:
            done[size] = play(SimulatedSsd(trace, n_blocks=size))
            progress(len(done))
        return done
    with tempfile.TemporaryDirectory(prefix="firn-advise-") as folder:
        trace.save(Path(folder))
        # Spawned: a fork of this process would inherit locks that its threads hold.
        with ProcessPoolExecutor(min(workers, len(sizes)), get_context("spawn")) as pool:
            waiting = {pool.submit(_play_saved, folder, size): size for size in sizes}
            for future in as_completed(waiting):
                done[waiting[future]] = future.result()
                progress(len(done))
    return done


def _play_saved(folder: str, size: int) -> Ints:
    return play(SimulatedSsd(Trace.load(Path(folder)), n_blocks=size))
