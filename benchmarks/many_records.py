"""A server over a folder of many records: its start, its memory, and how long it keeps a stream waiting.

    python benchmarks/many_records.py                     100,000 records; needs 1 GB of disk
    python benchmarks/many_records.py --records 20000 --model path/to/model

The server runs as users run it, over an empty folder and over one with records of its own model. A
stream of tokens is read while the folder is scanned, while statistics are requested, and while
everything is deleted; the cost is how much the longest gap between two tokens exceeds that of a
quiet stream. On a busy machine gaps say little: compare them with the quiet ones of the same run.
`--pauses` needs no server: it measures what the engine thread itself does, piece by piece, in
processor time, also for one prompt of `--tokens` tokens, all of it in memory or all of it in a tier,
and for a full memory with `--rows` parked rows.

Takes a few minutes, most of them for writing the records; `--pauses` takes some seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from report import BenchError, cli, grid, save
from servers import free_port

from firn.cache.arrays.host import from_host
from firn.cache.arrays.payload import Payload
from firn.cache.garbage import Garbage
from firn.cache.layout import Layout
from firn.cache.parts import Needs, Part
from firn.cache.prefix import CacheSettings, PrefixCache, PrefixCursor
from firn.cache.records import Records
from firn.cache.storage.catalogue import CacheIdentity
from firn.cache.storage.container import (
    Header,
    Label,
    Loaded,
    TensorSpec,
    TierEntry,
    pack,
    unpack,
)
from firn.cache.storage.orders import (
    Order,
    Outcome,
    ReadOrder,
    ReadOver,
    ScanBatch,
    WriteOrder,
    outcome_of,
)
from firn.cache.storage.tier_records import BATCH
from firn.cache.tiers import TierUsage
from firn.cache.tiers._folder import SUBFOLDERS, path_of
from firn.cache.tree import CheckpointKind, Node, Record
from firn.core.keys import Key, child_key, packed_tokens
from firn.core.ports import At, EngineLoad, RowView
from firn.core.values import CacheControl, Namespace, PackedTokens, Prompt

T = TypeVar("T")

RECORD_NBYTES = 2048
CHAIN = 100
"""Blocks per prompt."""
BLOCK = 256
N_STREAMED = 400
START_S, SCAN_S = 60.0, 60.0
MIB = 1 << 20


class RunningServer:
    """A firn server, and what it answers."""

    def __init__(self, model: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "firn", "serve", model, "--port", str(port)]
        self._log = (folder / "server.log").open("wb")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--ssd-cache-dir", str(folder / "cache"), "--log-level", "warning"],
            stdout=self._log,
            stderr=self._log,
        )
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - began > START_S:
                raise BenchError(f"the server did not start: see {folder / 'server.log'}")
            time.sleep(0.01)
        self.ready_s = time.perf_counter() - began
        self._name = self.ask("GET", "/v1/models")["data"][0]["id"]

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("GET", "/health"))
        except OSError:
            return False

    def ask(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def longest_gap_s(self, n_tokens: int = N_STREAMED) -> float:
        """The longest gap between two tokens of one stream."""
        body = json.dumps(
            {
                "model": self._name,
                "messages": [{"role": "user", "content": f"Tell me a long story. {time.time()}"}],
                "max_tokens": n_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        gaps, last = [0.0], 0.0
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    gaps.append(now - last if last else 0.0)
                    last = now
        return max(gaps)

    def rss_nbytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._log.close()


@contextmanager
def running(model: str, folder: Path) -> Iterator[RunningServer]:
    server = RunningServer(model, folder)
    try:
        yield server
    finally:
        server.stop()


def sample(model: str, folder: Path) -> Header:
    """The header of a record of this model."""
    with running(model, folder) as server:
        server.longest_gap_s(300)
    for path in (folder / "cache").glob("??/*.pages.*"):
        return unpack(path.read_bytes()).header
    raise BenchError("the server has stored no pages")


def fill(folder: Path, like: Header, n_records: int) -> None:
    """Writes chains of blocks of the same model, with few bytes after their labels."""
    for subfolder in SUBFOLDERS:
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
    block, body, now = len(like.tokens), bytes(2048), time.time()
    random = np.random.default_rng(7)
    tensors = (TensorSpec("U8", (1, len(body))),)
    made = replace(like, part=Part.PAGES, tensors=tensors, places=(((0, 0),),))
    for i in range(n_records):
        depth = i % CHAIN
        parent = made.key if depth else like.root
        tokens = random.integers(0, 100_000, block).astype(np.uint64)
        key = child_key(parent, tokens)
        made = replace(made, key=key, parent=parent, start=depth * block, tokens=tokens)
        path = folder / path_of(str(made.name))
        path.write_bytes(b"".join(pack(made, [body]).pieces))
        os.utime(path, (now, now - 2 * depth))


def while_streaming(server: RunningServer, work: Callable[[], Any]) -> tuple[float, float]:
    """The longest gap of a stream while `work` runs, and the seconds that `work` took."""
    took = []

    def run() -> None:
        time.sleep(0.05)
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    gap = server.longest_gap_s()
    thread.join()
    return gap, took[0]


def measure(model: str, folder: Path, n_records: int) -> dict[str, float]:
    with running(model, folder) as server:

        def n_known() -> int:
            return int(server.ask("GET", "/v1/cache/stats")["ssd"]["records"])

        began = time.perf_counter()
        n_at_start, scan_gap = n_known(), 0.0
        while n_known() < n_records:
            scan_gap = max(scan_gap, server.longest_gap_s(100))
            if time.perf_counter() - began > SCAN_S:
                raise BenchError("the scan does not end")
        scan_s = time.perf_counter() - began
        quiet = max(server.longest_gap_s() for _ in range(3))
        stats_gap, stats_s = while_streaming(server, lambda: server.ask("GET", "/v1/cache/stats"))
        figures = {
            "ready_s": server.ready_s,
            "known_at_start": n_at_start,
            "scan_s": scan_s,
            "rss_nbytes": server.rss_nbytes(),
            "quiet_gap_s": quiet,
            "scan_gap_s": scan_gap,
            "stats_gap_s": stats_gap,
            "stats_s": stats_s,
        }
        gap, took = while_streaming(server, lambda: server.ask("DELETE", "/v1/cache"))
        return figures | {"delete_gap_s": gap, "delete_s": took}


class NoWorker:
    """A tier that does nothing: its records are only learned and forgotten."""

    is_store, deadline_s = False, math.inf

    def __init__(self) -> None:
        self._over: deque[Outcome] = deque()
        self._reads: list[ReadOrder] = []

    @property
    def n_results(self) -> int:
        return len(self._over)

    def submit(self, order: Order) -> bool:
        match order:
            case WriteOrder():
                return False
            case ReadOrder():
                self._reads.append(order)
            case _ if outcome := outcome_of(order, None, 0.0):
                self._over.append(outcome)
        return True

    def answer(self, header: Header) -> None:
        """End all reads, each with the same bytes."""
        waiting, self._reads = self._reads, []
        for order in waiting:
            loaded = Loaded(header, [memoryview(bytes(RECORD_NBYTES))])
            self._over.append(ReadOver(order, loaded, time.monotonic()))

    def poll(self, *, wait_s: float = 0.0) -> Outcome | None:
        return self._over.popleft() if self._over else None

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        return from_host(loaded.header.tensors, loaded.header.places, loaded.buffers)

    def has_room(self, nbytes: int) -> bool:
        return False

    def defer_writes(self, defer: bool) -> None: ...

    def usage(self) -> TierUsage:
        return TierUsage(0, 0)

    def close(self) -> None: ...


def pauses(n_records: int) -> dict[str, list[float]]:
    """Processor time of each piece of work between two steps of the engine."""
    identity = CacheIdentity(b"benchmark", "benchmark", BLOCK)
    records = Records(identity, Needs(pages=True, window=0, state=False), limit_nbytes=1 << 30)
    records.add_tier("none", NoWorker())
    (tier,) = records.tiers
    root = records.catalogue.root(Namespace("")).key
    seconds: dict[str, list[float]] = {"learn a batch": [], "clear": [], "let go of a batch": []}

    def timed(what: str, work: Callable[[], Any]) -> None:
        began = time.thread_time()
        work()
        seconds[what].append(time.thread_time() - began)

    garbage = Garbage()

    def learn(some: Sequence[TierEntry]) -> None:
        records.apply(tier, ScanBatch(some))
        garbage.keep(n_new=len(some))

    entries = _entries(root, n_records)
    while some := tuple(islice(entries, BATCH)):
        timed("learn a batch", partial(learn, some))
    began = time.thread_time()
    gc.unfreeze()
    gc.collect()
    seconds["a full collection, were it not put off"] = [time.thread_time() - began]
    timed("clear", lambda: records.clear(None))
    while records._cleared:
        timed("let go of a batch", records._forget_cleared)
    return seconds


def long_prompt_pauses(n_tokens: int, *, in_memory: bool) -> dict[str, list[float]]:
    """Processor time of each call for a prompt of which everything is stored."""
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    settings = CacheSettings(limit_nbytes=1 << 50, block=BLOCK)
    cache = PrefixCache(Layout.of([layer]), settings, fingerprint=b"benchmark", dtype="f")
    everyone, control = Namespace(""), CacheControl(write=False)
    worker = NoWorker()
    cache.add_tier("none", worker, namespaces=[everyone])
    ids = np.random.default_rng(7).integers(0, 100_000, n_tokens)
    tokens, tree = PackedTokens(ids.astype(np.uint64)), cache.records.tree
    node: Node = cache.records.catalogue.root(everyone)
    stored: list[Record] = []
    payload = Payload((mx.zeros((1, RECORD_NBYTES), dtype=mx.uint8),), (((0, 0),),))
    for start in range(0, n_tokens - BLOCK + 1, BLOCK):
        node = tree.child(node, tokens, start, start + BLOCK)
        record = tree.add(node, Part.PAGES, nbytes=RECORD_NBYTES, kind=CheckpointKind.TURN)
        if in_memory:
            cache.records.hold(record, payload, nbytes=RECORD_NBYTES)
        cache.records.ledger.found(record, 0)
        stored.append(record)
    cache.prefill.observe(0, 2048, 1.0)
    cache.own_process()  # as a server's does, it collects garbage between two steps
    place = "in memory" if in_memory else "in a tier"
    seconds: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        took = time.thread_time() - began
        seconds.setdefault(f"{n_tokens:,} tokens {place}: {what}", []).append(took)
        return result

    label = next(_entries(cache.records.catalogue.root(everyone).key, 1)).label
    tensors = (TensorSpec("U8", (1, RECORD_NBYTES)),)
    known = {f.name: getattr(label, f.name) for f in fields(label)}
    header = Header(**known, tensors=tensors, places=(((0, 0),),))
    for i in range(7):
        prompt = Prompt(ids)
        timed("key tokens, in the tokenize pool", partial(packed_tokens, prompt))
        cursor = timed("open", partial(cache.open, prompt, everyone, control))
        assert isinstance(cursor, PrefixCursor)
        timed("plan", partial(cache.loader.plan, cursor))
        if is_computing := bool(i % 2 and cursor.loads.are_pending):
            timed("restore nothing", cursor.restore)
        while cursor.loads.are_pending:
            worker.answer(header)
            timed("tick with what was read", partial(cache.tick, EngineLoad.DECODING))
        if is_computing:
            restored = timed("advance", partial(cursor.advance, 0))
        else:
            restored = timed("restore", cursor.restore)
        assert restored is not None
        timed("tick", partial(cache.tick, EngineLoad.DECODING))
        timed("close", partial(cursor.close, None))
        for record in stored if not in_memory else ():  # reading has brought it into memory
            cache.records.ledger.release(record)
    return seconds


@dataclass(eq=False)
class Row:
    """A row that has computed its prompt, with room for a fifth more."""

    n_tokens: int
    is_live: bool = True
    layers: list[KVCache] = field(init=False)

    def view(self) -> RowView:
        return RowView(self.layers, At(0, self.n_tokens))

    def __post_init__(self) -> None:
        layer = KVCache()
        shape = (1, 1, self.n_tokens * 6 // 5, 64)
        layer.keys, layer.values = (mx.zeros(shape, dtype=mx.uint8) for _ in range(2))
        layer.offset = self.n_tokens
        mx.eval(layer.keys, layer.values)
        self.layers = [layer]


def eviction_pauses(n_rows: int) -> tuple[dict[str, list[float]], float]:
    """Processor time of making room for a block while many rows are parked, and how much of memory
    records take once it was halved."""
    settings = CacheSettings(limit_nbytes=1 << 50, block=BLOCK)
    cache = PrefixCache(Layout.of(Row(1).layers), settings, fingerprint=b"benchmark", dtype="f")
    random, n_tokens = np.random.default_rng(7), 16 * BLOCK
    cache.own_process()
    for _ in range(n_rows):
        prompt = Prompt(random.integers(0, 100_000, n_tokens + 1))
        cursor, row = cache.open(prompt, Namespace(""), CacheControl()), Row(n_tokens)
        cursor.commit(row)
        cursor.close(row)
        row.is_live = False
    taken, block_nbytes = cache.records.memory.nbytes, BLOCK * 128
    times: list[float] = []
    for limit in range(taken, taken // 2, -block_nbytes):
        began = time.thread_time()
        cache.set_room(limit)
        times.append(time.thread_time() - began)
    held = cache.records.ledger.memory.total_nbytes / cache.records.memory.nbytes
    return {f"{n_rows:,} parked rows: make room for a block": times}, held


def _entries(root: Key, n_records: int) -> Iterator[TierEntry]:
    random, now, parent = np.random.default_rng(7), time.time(), root
    for i in range(n_records):
        depth = i % CHAIN
        parent = parent if depth else root
        tokens = random.integers(0, 100_000, BLOCK).astype(np.uint64)
        label = Label(
            key=child_key(parent, tokens),
            parent=parent,
            root=root,
            part=Part.PAGES,
            start=depth * BLOCK,
            fingerprint=b"benchmark",
            namespace="",
            created=now,
            mark=0,
            tokens=tokens,
            layout="benchmark",
        )
        yield TierEntry(label, 2048, now - 2 * depth, PackedTokens(tokens))
        parent = label.key


def pause_table(seconds: dict[str, list[float]]) -> str:
    rows = [["", "times", "median", "longest"]]
    for what, times in seconds.items():
        middle, longest = statistics.median(times), max(times)
        rows.append(
            [what, f"{len(times):,}", f"{1000 * middle:.2f} ms", f"{1000 * longest:.2f} ms"]
        )
    return grid(rows)


def table(results: dict[str, dict[str, float]]) -> str:
    rows = [["", *results]]
    names = {"ready_s": "ready", "scan_s": "all known after", "rss_nbytes": "memory"}
    for key in next(iter(results.values())):
        if key == "rss_nbytes":
            values = [f"{r[key] / MIB:.0f} MiB" for r in results.values()]
        elif key == "known_at_start":
            values = [f"{r[key]:,.0f}" for r in results.values()]
        elif key in names:
            values = [f"{r[key]:.2f} s" for r in results.values()]
        else:
            values = [f"{1000 * r[key]:.1f} ms" for r in results.values()]
        rows.append([names.get(key, key.removesuffix("_s").replace("_", " ")), *values])
    return grid(rows)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--records", type=int, default=100_000)
    options.add_argument("--model", default="firn-demo")
    options.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options.add_argument("--out", type=Path, help="JSON file with all figures")
    options.add_argument("--tokens", type=int, default=1 << 20, help="of a long prompt (--pauses)")
    options.add_argument("--rows", type=int, default=1000, help="that are parked (--pauses)")
    options.add_argument("--pauses", action="store_true", help="only the engine thread's own work")
    args = options.parse_args()
    if args.pauses:
        found = pauses(args.records)
        for in_memory in (True, False):
            found |= long_prompt_pauses(args.tokens, in_memory=in_memory)
        times, held = eviction_pauses(args.rows)
        print(pause_table(found | times))
        print(f"{held:.0%} of memory is what can be reused")
        return
    root = Path(tempfile.mkdtemp(prefix="firn-many-", dir=args.folder))
    try:
        (root / "empty").mkdir()
        (root / "many").mkdir()
        header = sample(args.model, root / "empty")
        shutil.rmtree(root / "empty" / "cache")
        fill(root / "many" / "cache", header, args.records)
        results = {
            "empty": measure(args.model, root / "empty", 0),
            f"{args.records:,}": measure(args.model, root / "many", args.records),
        }
    finally:
        shutil.rmtree(root)
    print(table(results))
    if args.out:
        save(args.out, "many_records", options=vars(args), result=results)


if __name__ == "__main__":
    cli(main)
