"""Is a hit ever slower than a miss? The cache's choices against the better of two fixed rules.

    python benchmarks/decisions.py                            # a small model on this machine
    python benchmarks/decisions.py --shape 8b --lengths 2048,16384 --disks fast    # on a GPU

Prompts are stored once. Then, for every disk, history and length, a new engine starts on the
folder, goes through the history, and receives a stored prompt with new tokens at its end. Its
first-token time is compared with that of an engine that always loads and of one that always
computes. It is worse if it exceeds 1.1 times the better of the two by more than one prefill chunk.

Histories: "restart": nothing but what an earlier engine learned; "no memory of it": not even that;
"tiny loads": five loads of a few tokens first; "slow spell": five loads while the disk was stuck.

Takes about twenty minutes on two cores; `--lengths 200,2000 --repeats 2` takes five minutes.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import Answer, BenchEngine, shape_of
from report import cli, grid, names, numbers, save
from servers import lab
from ssd_device import PreferLoading

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import SHAPES
from tests.slow_disk import SlowDisk

GIB = 1 << 30
N_NEW = 64
N_TINY = 13
DISKS = {"fast": (0.0, float("inf")), "slow": (0.005, 60e6), "stuck": (0.05, 5e6)}
"""Latency in seconds, bytes per second."""
HISTORIES = ("restart", "no memory of it", "tiny loads", "slow spell")


@dataclass(frozen=True)
class Cell:
    disk: str
    history: str
    n_tokens: int
    chosen_s: float
    load_s: float
    compute_s: float
    chunk_s: float
    why: str

    @property
    def better_s(self) -> float:
        return min(self.load_s, self.compute_s)

    @property
    def is_right(self) -> bool:
        return self.chosen_s <= 1.1 * self.better_s + self.chunk_s


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._config, self._dtype = shape_of(args.shape)
        self._rng = np.random.default_rng(7)
        self._model: Any = None
        self.prompts = {n: self._tokens(n) for n in (N_TINY * 4, *args.lengths)}

    def engine(self, disk: str = "fast", *, memo: bool = True) -> tuple[BenchEngine, SlowDisk]:
        latency, speed = DISKS[disk]
        slow = SlowDisk(self._folder / "ssd", latency_s=latency, nbytes_per_s=speed)
        made = BenchEngine(
            self._config,
            dtype=self._dtype,
            memory_nbytes=24 * GIB if self._args.shape != "tiny" else 4 * GIB,
            ssd=self._folder / "ssd",
            disk=slow,
            memo=self._folder / f"memo-{disk}" if memo else None,
            model=self._model,
        )
        self._model = made.weights
        return made, slow

    def store(self) -> None:
        engine, _ = self.engine()
        with engine:
            for ids in self.prompts.values():
                engine.ask(ids, 2).wait()
            engine.settle()

    def learn(self, disk: str) -> None:
        """An engine's life before the restart: it computes and loads as usual."""
        engine, _ = self.engine(disk)
        with engine:
            for n in self._args.lengths:
                self._ask(engine, n, read=False)
                engine.forget_memory()
                self._always_load(engine)
                self._ask(engine, n)

    def cell(self, disk: str, history: str, n: int) -> Cell:
        load = self._measure(disk, lambda e, d: self._always_load(e), n)
        compute = self._measure(disk, lambda e, d: None, n, read=False)
        before = self._before(disk, history)
        chosen = self._measure(disk, before, n, memo=history != "no memory of it")
        chunk_s = self._chunk_s(compute, n)
        times = [statistics.median(a.first_s for a in some) for some in (chosen, load, compute)]
        return Cell(disk, history, n, times[0], times[1], times[2], chunk_s, chosen[-1].why)

    def _chunk_s(self, compute: list[Answer], n: int) -> float:
        n_chunk = min(int(self._args.chunk), n + N_NEW)
        return statistics.median(a.first_s for a in compute) * n_chunk / (n + N_NEW)

    def _before(self, disk: str, history: str) -> Callable[[BenchEngine, SlowDisk], None]:
        def live(engine: BenchEngine, slow: SlowDisk) -> None:
            if history not in ("tiny loads", "slow spell"):
                return
            if history == "slow spell":
                slow.latency_s, slow.nbytes_per_s = DISKS["stuck"]
            for _ in range(5):
                self._ask(engine, N_TINY * 4)
                engine.forget_memory()
            slow.latency_s, slow.nbytes_per_s = DISKS[disk]

        return live

    def _measure(
        self,
        disk: str,
        before: Callable[[BenchEngine, SlowDisk], None],
        n: int,
        *,
        read: bool = True,
        memo: bool = True,
    ) -> list[Answer]:
        answers = []
        for _ in range(self._args.repeats):
            engine, slow = self.engine(disk, memo=memo)
            with engine:
                self._ask(engine, N_TINY, read=False, new=True)  # the model's first pass
                before(engine, slow)
                answers.append(self._ask(engine, n, read=read))
        return answers

    def _ask(self, engine: BenchEngine, n: int, *, read: bool = True, new: bool = False) -> Answer:
        ids = self._tokens(n) if new else self.prompts[n]
        return engine.ask(ids + self._tokens(N_NEW), 2, read=read, write=False).wait()

    @staticmethod
    def _always_load(engine: BenchEngine) -> None:
        def prefer(cache: Any) -> None:
            cache.records.estimates = PreferLoading(cache.records.estimates)

        engine.call(prefer)

    def _tokens(self, n: int) -> list[int]:
        tokens: list[int] = self._rng.integers(10, int(self._config["vocab_size"]), n).tolist()
        return tokens


def shown(cells: list[Cell]) -> str:
    head = ["disk", "history", "tokens", "chosen s", "load s", "compute s", "of better", "", "why"]
    rows = [
        [
            c.disk,
            c.history,
            f"{c.n_tokens:,}",
            f"{c.chosen_s:.3f}",
            f"{c.load_s:.3f}",
            f"{c.compute_s:.3f}",
            f"{c.chosen_s / c.better_s:.2f}",
            "" if c.is_right else "WORSE",
            c.why,
        ]
        for c in cells
    ]
    return grid([head, *rows])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", choices=list(SHAPES), default="tiny")
    options.add_argument(
        "--lengths", type=numbers, default=[200, 300, 2000, 8000], metavar="N,M,.."
    )
    options.add_argument("--disks", type=names, default=["fast", "slow", "stuck"])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--chunk", type=int, default=512, help="tokens of a prefill chunk here")
    options.add_argument("--out", type=Path, help="JSON file (default: decisions.json in the lab)")
    args = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="firn-decisions-"))
    began = time.perf_counter()
    cells: list[Cell] = []
    try:
        bench = Bench(args, folder)
        bench.store()
        for disk in args.disks:
            bench.learn(disk)
            for history in HISTORIES:
                for n in args.lengths:
                    cells.append(bench.cell(disk, history, n))
                    print(
                        f"{disk}, {history}, {n}: {time.perf_counter() - began:.0f} s", flush=True
                    )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + shown(cells))
    n_worse = sum(not c.is_right for c in cells)
    print(f"\n{n_worse} of {len(cells)} worse than 1.1 of the better way and a chunk")
    save(
        args.out or lab() / "decisions.json",
        "decisions",
        options=vars(args),
        result={"cells": [vars(c) for c in cells]},
    )


if __name__ == "__main__":
    cli(main)
