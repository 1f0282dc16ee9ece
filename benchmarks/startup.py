"""What the fingerprint of the weights adds to a start, in seconds.

    .venv/bin/python benchmarks/startup.py --gb 16 [--files cold,warm] [--hold]

A model's files are read alone, read while they are hashed for the first time, and read when their digest
is remembered. Needs as much disk as `--gb` says.

Takes under a minute for 2 GiB, and about ten minutes for 16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
from disks import drop_pages
from report import BenchError, cli

from firn.models.load import fingerprint as fingerprints
from firn.models.load.fingerprint import Fingerprint
from firn.models.load.weight_memory import WeightMemory

GIB = 1 << 30
SHARD_NBYTES = 4 * GIB
TENSOR_NBYTES = 128 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the weights in GiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--files", default="cold,warm", help="in the page cache, or not")
    parser.add_argument("--hold", action="store_true", help="keep all arrays, as a server does")
    args = parser.parse_args()
    if shutil.disk_usage(args.folder).free < args.gb * GIB * 1.2:
        raise BenchError(f"{args.folder} has no room for {args.gb:g} GiB")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="firn-startup-") as temp:
        model = Path(temp) / "model"
        write(model, int(args.gb * GIB))
        memory = WeightMemory(Path(temp) / "cache", clock=lambda: time.time() + 3600)
        print(f"{args.gb:g} GiB, {os.cpu_count()} cores, {args.rounds} rounds\n")
        for state in args.files.split(","):
            for i in range(args.rounds):
                for name, seconds in measured(model, memory, cold=state == "cold", hold=args.hold):
                    print(f"{state} {i + 1}  {name:<20} {seconds:7.2f} s", flush=True)


def measured(
    model: Path, memory: WeightMemory, *, cold: bool, hold: bool
) -> Iterator[tuple[str, float]]:
    def read() -> None:
        held = []
        for path in fingerprints.weight_files(model, vision=False):
            for array in mx.load(str(path)).values():  # type: ignore[union-attr]
                mx.eval(array)
                if hold:
                    held.append(array)

    def hashed() -> None:
        pending = Fingerprint(model)
        read()
        pending.result()

    def remembered() -> None:
        pending = Fingerprint(model, memory=memory)
        read()
        pending.result()

    Fingerprint(model, memory=memory).result()
    works: dict[str, Callable[[], object]] = {
        "read": read,
        "read and hashed": hashed,
        "read, remembered": remembered,
    }
    for name, work in works.items():
        prepare(model, cold=cold)
        began = time.perf_counter()
        work()
        yield name, time.perf_counter() - began
        mx.clear_cache()


def prepare(model: Path, *, cold: bool) -> None:
    """Drops the files from the page cache, or reads them into it as far as they fit."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as f:
            os.fsync(f.fileno())
            if cold:
                drop_pages(f.fileno())
            else:
                while f.read(64 << 20):
                    pass


def write(model: Path, nbytes: int) -> None:
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    block = os.urandom(TENSOR_NBYTES)
    n_shards = -(-nbytes // SHARD_NBYTES)
    for i in range(n_shards):
        n = min(SHARD_NBYTES, nbytes - i * SHARD_NBYTES) // TENSOR_NBYTES
        header = {
            f"layers.{i}.{j}.weight": {
                "dtype": "BF16",
                "shape": [TENSOR_NBYTES // 8192, 4096],
                "data_offsets": [j * TENSOR_NBYTES, (j + 1) * TENSOR_NBYTES],
            }
            for j in range(n)
        }
        text = json.dumps(header).encode()
        with (model / f"model-{i + 1:05}-of-{n_shards:05}.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for j in range(n):
                f.write(struct.pack("<QQ", i, j) + block[16:])


if __name__ == "__main__":
    cli(main)
