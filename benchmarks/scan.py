"""A restart over many records: how soon they are known, and what the scan costs everybody else.

    python benchmarks/scan.py                       100,000 records of 256 tokens; needs 1 GB of disk
    python benchmarks/scan.py --records 20000 --folder /mnt/nas

The folder is scanned as in a server, by the SSD tier behind its I/O threads, each time in a process
of its own. Meanwhile another thread, like the engine's, asks for the interpreter every millisecond;
its longest wait is how long a scan can delay a step. Before a cold scan, the files are dropped from
the page cache.

Takes a few minutes, most of them for writing the records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from disks import drop_pages
from report import BenchError, cli, grid, save

try:
    import numpy as np

    from firn.cache.parts import Part
    from firn.cache.storage.container import Header, TensorSpec, pack
    from firn.cache.storage.orders import ScanBatch, ScanOrder
    from firn.cache.storage.worker import TierWorker
    from firn.cache.tiers import TierOptions
    from firn.cache.tiers._folder import SUBFOLDERS, path_of
    from firn.cache.tiers.ssd import SsdTier
    from firn.core.keys import Key, child_key
except ImportError as error:
    raise SystemExit(
        f"scan.py: {error}; run this with firn's environment or PYTHONPATH=src"
    ) from None

BLOCK = 256
CHAIN = 100
"""Blocks per prompt."""
MIB = 1 << 20
SCAN_S = 600.0
"""Longest time between two reports of a scan."""


def fill(folder: Path, n_records: int) -> None:
    """Writes chains of blocks with few bytes after the labels; a child is older than its parent."""
    for subfolder in SUBFOLDERS:
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    root, body, now = Key(bytes(32)), bytes(2048), time.time()
    parent = root
    for i in range(n_records):
        depth = i % CHAIN
        parent = parent if depth else root
        tokens = np.arange(i * BLOCK, (i + 1) * BLOCK, dtype=np.uint64)
        header = Header(
            key=child_key(parent, tokens),
            parent=parent,
            root=root,
            part=Part.PAGES,
            start=depth * BLOCK,
            tokens=tokens,
            fingerprint=b"benchmark",
            namespace="",
            layout="benchmark",
            tensors=(TensorSpec("U8", (1, len(body))),),
            places=(((0, 0),),),
            created=now,
            mark=0,
        )
        path = folder / path_of(str(header.name))
        path.write_bytes(b"".join(pack(header, [body]).pieces))
        os.utime(path, (now, now - 2 * depth))
        parent = header.key


def forget(folder: Path) -> None:
    os.sync()
    for path in folder.glob("??/*"):
        fd = os.open(path, os.O_RDONLY)
        drop_pages(fd)
        os.close(fd)


def rss_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Waiter:
    """A thread that asks for the interpreter every millisecond, and the longest it had to wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> float:
        self._stop = True
        self._thread.join()
        return self.longest_s

    def _run(self) -> None:
        while not self._stop:
            began = time.perf_counter()
            time.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - began - 0.001)


def measure(folder: Path) -> dict[str, Any]:
    """One start of a process over the folder."""
    quiet = Waiter()
    time.sleep(2.0)
    quiet_s = quiet.stop()
    before = rss_nbytes()
    worker = TierWorker(SsdTier(TierOptions(str(folder), 1 << 40)))
    seen = [0, 0.0]
    waiter, began = Waiter(), time.perf_counter()

    def scan() -> float:
        start = time.perf_counter()
        worker.submit(ScanOrder())
        while isinstance(outcome := worker.poll(wait_s=SCAN_S), ScanBatch):
            seen[1] = seen[1] or time.perf_counter() - began
            seen[0] += len(outcome.changes)
        return time.perf_counter() - start

    figures = {
        "all_s": scan(),
        "first_s": seen[1],
        "records": seen[0],
        "longest_wait_s": waiter.stop(),
        "quiet_wait_s": quiet_s,
        "rss_nbytes": rss_nbytes() - before,
        "again_s": scan(),
    }
    worker.close()
    return figures


def run(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, __file__, "--measure", str(folder)]
    results: dict[str, list[dict[str, Any]]] = {}
    for i in range(args.rounds):
        for how in ("cold", "warm"):
            if how == "cold":
                forget(folder)
            # The lock file's page is new: only the first start lists the folder under the lock.
            name = f"{how}, first" if i == 0 and not results else how
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.setdefault(name, []).append(json.loads(out))
    return results


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    rows = [["files", "first batch", "all", "a second scan", "longest wait", "without", "memory"]]
    for name, some in results.items():
        best = min(some, key=lambda r: float(r["all_s"]))
        rows.append(
            [
                name,
                f"{best['first_s']:.2f} s",
                f"{best['all_s']:.2f} s",
                f"{1000 * best['again_s']:.1f} ms",
                f"{1000 * best['longest_wait_s']:.1f} ms",
                f"{1000 * best['quiet_wait_s']:.1f} ms",
                f"{best['rss_nbytes'] / MIB:.0f} MiB",
            ]
        )
    return grid(rows)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--records", type=int, default=100_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options.add_argument("--out", type=Path, help="JSON file with all rounds")
    options.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return
    if args.records < 1 or args.rounds < 1:
        raise BenchError("at least one record and one round, please")
    folder = Path(tempfile.mkdtemp(prefix="firn-scan-", dir=args.folder))
    try:
        fill(folder, args.records)
        results = run(args, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{args.records:,} records\n{table(results)}")
    if args.out:
        save(args.out, "scan", options=vars(args), result=results)


if __name__ == "__main__":
    cli(main)
