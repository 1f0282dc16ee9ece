"""The SSD tier against the bare disk, and what writing costs decoding.

    python benchmarks/ssd.py                       real models' records; writes 13 GB, 1 GB at a time
    python benchmarks/ssd.py --decode              tokens/s while records are written, and without
    python benchmarks/ssd.py --device-run --out X  on a GPU: an 8B model, computed, from memory, from SSD

Records go through the container, the tier and its I/O threads as in a server: packed, checksummed,
renamed; read, verified, turned into arrays where MLX is installed. In turn with them, the same
bytes are written to one file and read from it, like `dd`. A write ends when the bytes are on the
disk. Reads are cold where the system drops its page cache. Targets: restoring at 70% of the bare
disk or more; decoding with writes at 97% of without or more; the device run's choices within 5% of
the better one.

Takes a few minutes on a fast disk; `--decode` takes two on two cores, and `--device-run` begins nothing
new after `--seconds` (six minutes).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disks import Temperature, drop, need_free, read_file, write_file
from report import BenchError, cli, grid, names, numbers, save

try:
    import numpy as np

    from firn.cache.parts import Part
    from firn.cache.storage.container import Header, TensorSpec
    from firn.cache.storage.orders import ReadOrder, ReadOver, WriteOrder, WriteOver
    from firn.cache.storage.worker import TierWorker
    from firn.cache.tiers import TierError, TierOptions, WriteResult
    from firn.cache.tiers.ssd import SsdTier
    from firn.core.keys import Key, child_key
except ImportError as error:
    raise SystemExit(
        f"ssd.py: {error}; run this with firn's environment or PYTHONPATH=src"
    ) from None

BLOCK = 256
MB = 1e6
WAIT_S = 600.0
"""Longest time for one record."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of record of one model."""

    what: str
    part: Part
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


def _pages(n_layers: int, n_heads: int, width: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("BF16", (2 * n_layers, 1, n_heads, BLOCK, width)),)


def _gated_delta(n_layers: int, n_heads: int, n_channels: int) -> tuple[TensorSpec, ...]:
    conv = TensorSpec("BF16", (n_layers, 1, 3, n_channels))
    state = TensorSpec("F32", (n_layers, 1, n_heads, 128, 128))
    return conv, state


SHAPES = {
    "8b": Shape("8B dense, a block", Part.PAGES, _pages(36, 8, 128)),
    "30b": Shape("30B-A3B, a block", Part.PAGES, _pages(48, 4, 128)),
    "hybrid": Shape("gated-delta hybrid, a block", Part.PAGES, _pages(12, 2, 256)),
    "state": Shape("gated-delta hybrid, a checkpoint", Part.STATE, _gated_delta(36, 64, 12_288)),
}


def payload(shape: Shape) -> list[memoryview]:
    """Random bytes, which no disk can compress."""
    rng = np.random.default_rng(3)
    return [np.frombuffer(rng.bytes(spec.nbytes), np.uint8).data for spec in shape.tensors]


def headers(shape: Shape, n: int) -> list[Header]:
    """The first block of n prompts: none waits for another one to be written."""
    root = Key(bytes(32))
    out: list[Header] = []
    for i in range(n):
        tokens = np.arange(i * BLOCK, (i + 1) * BLOCK, dtype=np.uint64)
        out.append(
            Header(
                key=child_key(root, tokens),
                parent=root,
                root=root,
                part=shape.part,
                start=0,
                tokens=tokens,
                fingerprint=b"benchmark",
                namespace="",
                layout="benchmark",
                tensors=shape.tensors,
                places=(),
                created=time.time(),
                mark=0,
            )
        )
    return out


@contextmanager
def worker_on(folder: Path, limit_nbytes: int) -> Iterator[TierWorker]:
    tier = SsdTier(TierOptions(str(folder), limit_nbytes))
    list(tier.scan())
    worker = TierWorker(tier)
    try:
        yield worker
    finally:
        worker.close()
        tier.close()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Implements orders.RecordBytes."""

    buffers: Sequence[Any]

    def fetch(self) -> Sequence[Any]:
        return self.buffers


def write_records(
    folder: Path, records: Sequence[Header], *, buffers: Sequence[Any], limit_nbytes: int
) -> float:
    """Seconds until all records are files on the disk."""
    content = Bytes(buffers)
    with worker_on(folder, limit_nbytes) as worker:
        os.sync()
        start = time.perf_counter()
        n_open = 0
        for header in records:
            while not worker.submit(WriteOrder(header, content, time.time())):
                _check_write(worker)  # the queue is full: a write must end first
                n_open -= 1
            n_open += 1
        for _ in range(n_open):
            _check_write(worker)
        os.sync()
        return time.perf_counter() - start


def read_records(
    folder: Path,
    records: Sequence[Header],
    *,
    limit_nbytes: int,
    use: Callable[[Any], Any],
) -> float:
    """Seconds until all records are read, verified and passed to `use`, as they arrive."""
    kept = []
    with worker_on(folder, limit_nbytes) as worker:
        start = time.perf_counter()
        for header in records:
            worker.submit(ReadOrder(header.name, header.tokens))
        for _ in records:
            outcome = worker.poll(wait_s=WAIT_S)
            if not isinstance(outcome, ReadOver) or isinstance(outcome.result, TierError):
                raise BenchError(f"a record could not be read: {outcome}")
            kept.append(use(outcome.result))
        return time.perf_counter() - start


def _check_write(worker: TierWorker) -> None:
    outcome = worker.poll(wait_s=WAIT_S)
    if not isinstance(outcome, WriteOver) or not isinstance(outcome.result, WriteResult):
        raise BenchError(f"a record could not be written: {outcome}")


def array_maker() -> Callable[[Any], Any] | None:
    """Turns bytes into arrays as the engine does; None without MLX."""
    try:
        from firn.cache.arrays.host import from_host
    except ImportError:
        return None
    return lambda loaded: from_host(loaded.header.tensors, (), loaded.buffers)


@dataclass(eq=False)
class Speeds:
    """MB per second of every round, by what was done."""

    shape: Shape
    n_records: int
    rounds: dict[str, list[float]]
    temperature: set[Temperature]

    def add(self, what: str, seconds: float) -> None:
        nbytes = self.n_records * self.shape.nbytes
        self.rounds.setdefault(what, []).append(nbytes / seconds / MB)

    def median(self, what: str) -> float | None:
        return statistics.median(self.rounds[what]) if what in self.rounds else None

    def ratio(self, what: str, to: str) -> float | None:
        """The median of the ratios within each round, whose halves were measured in succession."""
        if what not in self.rounds:
            return None
        pairs = zip(self.rounds[what], self.rounds[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(shape: Shape, folder: Path, *, nbytes: int, n_rounds: int) -> Speeds:
    n = max(nbytes // shape.nbytes, 2)
    records, buffers, limit = headers(shape, n), payload(shape), 4 * n * shape.nbytes
    speeds = Speeds(shape, n, {}, set())
    use = array_maker()
    file, cache = folder / "plain", folder / "cache"

    def cold() -> None:
        speeds.temperature.add(drop([file, *cache.rglob("*.safetensors")]))

    def read(use: Callable[[Any], Any]) -> float:
        return read_records(cache, records, limit_nbytes=limit, use=use)

    for i in range(n_rounds + 1):
        shutil.rmtree(cache, ignore_errors=True)
        plain_s = write_file(file, (b for _ in range(n) for b in buffers))
        tier_s = write_records(cache, records, buffers=buffers, limit_nbytes=limit)
        cold()
        plain_read_s = read_file(file)
        cold()
        verified_s = read(lambda loaded: loaded)
        cold()
        restored_s = read(use) if use else None
        if i == 0:
            continue  # the first round warms up: it creates files and allocates memory
        speeds.add("disk write", plain_s)
        speeds.add("write", tier_s)
        speeds.add("disk read", plain_read_s)
        speeds.add("verify", verified_s)
        if restored_s is not None:
            speeds.add("restore", restored_s)
    file.unlink()
    shutil.rmtree(cache)
    return speeds


def shapes_table(results: Sequence[Speeds]) -> str:
    head = ["MB/s", "MB each", "disk write", "tier", "ratio"]
    rows = [[*head, "disk read", "read+verify", "+arrays", "ratio", "page cache"]]
    for s in results:
        best = "restore" if "restore" in s.rounds else "verify"
        whole = [s.median(w) for w in ("disk read", "verify", "restore")]
        rows.append([s.shape.what, f"{s.shape.nbytes / MB:.0f}"])
        rows[-1] += [_text(s.median(w)) for w in ("disk write", "write")]
        rows[-1] += [_text(s.ratio("write", "disk write"), 2)]
        rows[-1] += [_text(v) for v in whole]
        rows[-1] += [_text(s.ratio(best, "disk read"), 2), "+".join(sorted(s.temperature))]
    return grid(rows)


def _text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def run_shapes(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    unknown = [name for name in args.shapes if name not in SHAPES]
    if unknown:
        raise BenchError(f"there is no shape {unknown[0]}; there are {', '.join(SHAPES)}")
    nbytes = int(args.gb * 1e9)
    need_free(folder, 2 * max(nbytes, 2 * max(SHAPES[s].nbytes for s in args.shapes)))
    results = []
    for name in args.shapes:
        print(SHAPES[name].what, flush=True)
        results.append(measure(SHAPES[name], folder, nbytes=nbytes, n_rounds=args.rounds))
    print(f"\n{shapes_table(results)}\n(medians; ratios are medians of each round's own)")
    if array_maker() is None:
        print("MLX is not installed here: nothing was turned into arrays")
    return {
        s.shape.what: {"n_records": s.n_records, "mb_per_s": s.rounds, "cache": list(s.temperature)}
        for s in results
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options.add_argument("--out", type=Path, help="JSON file with all rounds")
    options.add_argument("--rounds", type=int, default=3)
    shapes = options.add_argument_group("records of real models' shapes")
    shapes.add_argument("--shapes", type=names, default=list(SHAPES), metavar="A,B,..")
    shapes.add_argument("--gb", type=float, default=0.4, help="of each shape, a round")
    decode = options.add_argument_group("the cost of writing")
    decode.add_argument("--decode", action="store_true", help="measure this in place of the shapes")
    decode.add_argument("--rows", type=int, default=4, help="that decode together")
    decode.add_argument("--prompt-tokens", type=int, default=2048)
    decode.add_argument("--reply-tokens", type=int, default=384)
    device = options.add_argument_group("first-token times of a big model")
    device.add_argument("--device-run", action="store_true", help="measure this, on a GPU")
    device.add_argument("--model", choices=["8b", "tiny"], default="8b", help="tiny: to try it out")
    device.add_argument("--tokens", type=numbers, default=[4096, 16_384, 32_768], metavar="N,..")
    device.add_argument("--repeats", type=int, default=3)
    device.add_argument("--seconds", type=float, default=360, help="begin nothing new after these")
    args = options.parse_args()
    if args.rounds < 1 or args.repeats < 1:
        raise BenchError("at least one round, please")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="firn-ssd-", dir=args.folder) as name:
        folder = Path(name)
        if args.decode:
            result = _decode(folder, args)
        elif args.device_run:
            result = _device_run(folder, args)
        else:
            result = run_shapes(folder, args)
    if args.out:
        save(args.out, "ssd", options=vars(args), result=result)


def _decode(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    try:
        import ssd_decode
    except ImportError as e:
        raise BenchError(f"{e}; run this with firn's environment") from e
    return ssd_decode.run(
        folder,
        n_rounds=args.rounds,
        n_rows=args.rows,
        n_prompt=args.prompt_tokens,
        n_reply=args.reply_tokens,
    )


def _device_run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    try:
        import ssd_device
    except ImportError as e:
        raise BenchError(f"{e}; run this with firn's environment") from e
    need_free(folder, 150_000 * sum(args.tokens) if args.model == "8b" else 1 << 30)
    return ssd_device.run(
        folder,
        shape=args.model,
        lengths=args.tokens,
        repeats=args.repeats,
        seconds=args.seconds,
    )


if __name__ == "__main__":
    cli(main)
