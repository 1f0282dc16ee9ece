"""`ssd.py --device-run`: first-token times of a big model, computed, from memory, and from the SSD.

A prompt of n tokens is computed once and stored (cold). The same n tokens, with another 256 after
them, then come from the SSD, with the page cache dropped and loading forced; from memory; and from
nowhere, because reading is forbidden. Finally the cache may choose for itself: what counts is its
time over the better of loading and computing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from disks import Temperature, drop, sequential_s
from engines import Answer, BenchEngine, shape_of
from report import grid

from firn.cache.prefix import PrefixCache

N_NEW = 256
GIB = 1 << 30


class PreferLoading:
    """Estimates in which computing is so slow that every load pays; they learn as usual."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @property
    def knows_prefill(self) -> bool:
        return True

    def prefill_s(self, start: int, end: int) -> float:
        return 1e6 * (end - start)

    def chunk_s(self, start: int) -> float:
        return 1e9

    def load_s(self, tier: str, nbytes: int) -> float:
        return 60.0  # the deadline of a load is a multiple of this

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@dataclass(eq=False)
class Point:
    """All first-token seconds at one length."""

    n_tokens: int
    cold_s: float = 0.0
    memory_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    chosen_s: list[float] = field(default_factory=list)
    chosen_cached: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    """Tokens that really came from the SSD when loading was forced."""
    of_disk: list[float] = field(default_factory=list)
    """Bytes per second of those loads, over a plain sequential read of as many bytes."""
    temperature: list[Temperature] = field(default_factory=list)
    spill_s: float = 0.0

    @property
    def worse(self) -> float | None:
        """The time of the choice over that of the better of loading and computing."""
        if not (self.load_s and self.compute_s and self.chosen_s):
            return None
        better = min(statistics.median(self.load_s), statistics.median(self.compute_s))
        return statistics.median(self.chosen_s) / better


class DeviceRun:
    """Owner: `run`."""

    def __init__(self, engine: BenchEngine, folder: Path, *, seconds: float, itemsize: int) -> None:
        self._engine = engine
        self._folder = folder
        self._rng = np.random.default_rng(11)
        self._n_vocab = int(engine.config["vocab_size"])
        self._until = time.monotonic() + seconds
        config = engine.config
        heads, width = config["num_key_value_heads"], config["head_dim"]
        self._token_nbytes = 2 * config["num_hidden_layers"] * heads * width * itemsize

    @property
    def late(self) -> bool:
        return time.monotonic() > self._until

    def warm_up(self, n_tokens: int) -> None:
        """Compiles what will run, and lets the estimates see how fast this machine computes."""
        self._ask(self._tokens(n_tokens + N_NEW), read=False, write=False)

    def point(self, n_tokens: int, *, repeats: int) -> Point:
        point, prefix = Point(n_tokens), self._tokens(n_tokens)
        point.cold_s = self._ask(prefix + self._tokens(N_NEW)).first_s
        began = time.perf_counter()
        self._engine.settle()
        point.spill_s = time.perf_counter() - began
        for _ in range(repeats):
            if self.late:
                break
            self._to_ssd(point)
            with_load = self._forced(lambda: self._again(prefix))
            point.load_s.append(with_load.first_s)
            point.loaded.append(with_load.tiers.get("ssd", 0))
            nbytes = point.loaded[-1] * self._token_nbytes
            point.of_disk.append(sequential_s(self._folder.parent, nbytes) / with_load.first_s)
            point.memory_s.append(self._again(prefix).first_s)
            self._to_ssd(point)
            point.compute_s.append(self._again(prefix, read=False).first_s)
            chosen = self._again(prefix)
            point.chosen_s.append(chosen.first_s)
            point.chosen_cached.append(chosen.n_cached)
        return point

    def _again(self, prefix: list[int], *, read: bool = True) -> Answer:
        return self._ask(prefix + self._tokens(N_NEW), read=read, write=False)

    def _ask(self, ids: list[int], *, read: bool = True, write: bool = True) -> Answer:
        return self._engine.ask(ids, 2, read=read, write=write).wait()

    def _to_ssd(self, point: Point) -> None:
        self._engine.forget_memory()
        point.temperature.append(drop(self._folder.rglob("*.safetensors")))

    def _forced(self, ask: Callable[[], Answer]) -> Answer:
        def prefer_loading(cache: PrefixCache) -> Any:
            real = cache.records.estimates
            cache.records.estimates = PreferLoading(real)  # type: ignore[assignment]
            return real

        real = self._engine.call(prefer_loading)
        try:
            return ask()
        finally:
            self._engine.call(lambda cache: setattr(cache.records, "estimates", real))

    def _tokens(self, n: int) -> list[int]:
        tokens: list[int] = self._rng.integers(10, self._n_vocab, n).tolist()
        return tokens


def run(
    folder: Path, *, shape: str, lengths: Sequence[int], repeats: int, seconds: float
) -> dict[str, Any]:
    """Prints the table; returns all of its numbers. Stops early when its time is up."""
    config, dtype = shape_of(shape)
    began = time.perf_counter()
    with BenchEngine(config, dtype=dtype, memory_nbytes=24 * GIB, ssd=folder) as engine:
        print(f"{shape} shape on {mx.default_device()}, {engine.model.weights_nbytes / 1e9:.1f} GB")
        print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
        work = DeviceRun(engine, folder, seconds=seconds, itemsize=dtype.size)
        work.warm_up(min(lengths))
        points: list[Point] = []
        for n in lengths:
            if work.late:
                print(f"out of time: {n} tokens are left out")
                continue
            points.append(work.point(n, repeats=repeats))
            print(f"{n} tokens: done after {time.perf_counter() - began:.0f} s", flush=True)
        estimates = engine.call(lambda cache: cache.records.estimates.view())
    print()
    print(_table(points))
    print("files were", " and ".join(sorted({t for p in points for t in p.temperature})))
    return {
        "shape": shape,
        "device": str(mx.default_device()),
        "estimates": estimates,
        "points": [
            {name: getattr(p, name) for name in Point.__dataclass_fields__} | {"worse": p.worse}
            for p in points
        ],
    }


def _table(points: Sequence[Point]) -> str:
    head = ["tokens", "cold s", "memory s", "SSD s", "compute s", "chosen s"]
    rows = [[*head, "SSD tokens", "chosen tokens", "of the disk", "chosen / better"]]
    for p in points:
        rows.append([f"{p.n_tokens:,}", f"{p.cold_s:.3f}"])
        for values in (p.memory_s, p.load_s, p.compute_s, p.chosen_s):
            rows[-1].append(f"{statistics.median(values):.3f}" if values else "-")
        for counts in (p.loaded, p.chosen_cached):
            rows[-1].append(f"{statistics.median(counts):,.0f}" if counts else "-")
        rows[-1].append(f"{statistics.median(p.of_disk):.2f}" if p.of_disk else "-")
        rows[-1].append("-" if p.worse is None else f"{p.worse:.2f}")
    return grid(rows)
