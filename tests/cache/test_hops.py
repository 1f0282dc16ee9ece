"""How far a reader goes to follow one record out to the disk and back: functions and files, counted.

A way is a list of waypoints: what happens to the record, and the function that does it. Whenever one
of them is called, every function of the cache on the stack of its thread is a hop: what a reader goes
through to get there. Functions that are called and return on the way are not: nothing leads through
them.
docs/ARCHITECTURE.md tells the same two ways in words.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.core.ports import At, Cursor, EngineLoad, RowView
from firn.core.values import CacheControl, Namespace, Prompt
from tests.test_docs import INLINE_CODE
from tests.test_imports import SOURCES
from tests.waiting import POLL_S

CACHE = str(SOURCES / "cache")
OUT = {
    "committed": "Committer.commit",
    "cut": "KVCodec.cut",
    "held": "Ledger.hold",
    "spilled": "SpillQueue.add",
    "ordered": "TierWorker.submit",
    "packed": "pack",
    "written": "SsdTier.write",
    "known as stored": "Ledger.end_write",
}
BACK = {
    "looked up": "Walk.of",
    "planned": "make_plan",
    "ordered": "TierWorker.submit",
    "read": "SsdTier.read",
    "verified": "unpack",
    "made arrays": "from_host",
    "given to the cursor": "Loader.was_read",
    "made a value": "Restorer.restore",
    "filled into the row": "KVCodec.fill",
}
MAX_OUT, MAX_BACK, MAX_FILES = 29, 28, 18
BLOCK = 8
DEADLINE_S = 30.0


class Trace:
    """The functions of the cache on the stacks of all threads, whenever a waypoint is called."""

    def __init__(self, waypoints: Mapping[str, str]) -> None:
        self._names = set(waypoints.values())
        self.reached: set[str] = set()
        self.hops: set[tuple[str, str]] = set()
        """(file, function)"""
        self.is_counting = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_waypoint = event == "call" and code.co_qualname in self._names and is_ours(code)
        if is_waypoint and self.is_counting:
            self.reached.add(code.co_qualname)
            self.hops |= set(hops_of(frame))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.hops}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and those that are started inside."""
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(CACHE)


def hops_of(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """A comprehension is read with the function that it is in; a function inside another is not."""
    while frame is not None:
        code = frame.f_code
        if is_ours(code):
            name = code.co_qualname
            while name.endswith(("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")):
                name = name.rpartition(".<locals>.")[0]
            yield Path(code.co_filename).relative_to(CACHE).as_posix(), name
        frame = frame.f_back


class KVRow:
    """A lone row of one layer of keys and values."""

    is_live = True

    def __init__(self) -> None:
        self.layers = [KVCache()]

    @property
    def n_tokens(self) -> int:
        return int(self.layers[0].offset)

    def view(self) -> RowView:
        return RowView(self.layers, At(0, self.n_tokens))

    def compute(self, n_tokens: int) -> None:
        array = mx.random.normal((1, 1, n_tokens, 4))
        self.layers[0].update_and_fetch(array, array + 1)


def cache_over(folder: Path) -> PrefixCache:
    cache = PrefixCache(
        Layout.of([KVCache()]),
        CacheSettings(limit_nbytes=1 << 30, block=BLOCK),
        fingerprint=b"hops",
        dtype="float32",
    )
    tier = SsdTier(TierOptions(str(folder), limit_nbytes=1 << 30))
    cache.add_tier("ssd", TierWorker(tier), namespaces=[Namespace("")])
    cache.confirm()
    return cache


PROMPT = Prompt(np.arange(BLOCK + 1, dtype=np.int64))


def write_a_record(cache: PrefixCache) -> Cursor:
    row = KVRow()
    cursor = cache.open(PROMPT, Namespace(""), CacheControl())
    assert cursor.restore() is None
    row.compute(BLOCK)
    cursor.commit(row)
    cache.confirm()
    (totals,) = cache.records.ledger.tiers
    tick_until(cache, lambda: totals.total_records == 1)
    return cursor


def read_it_back(cache: PrefixCache) -> tuple[Cursor, KVRow]:
    row = KVRow()
    cursor = cache.open(PROMPT, Namespace(""), CacheControl())
    tick_until(cache, lambda: not cursor.racing)
    restored = cursor.restore()
    assert restored is not None
    restored.fill(row.layers)
    cursor.filled(row)
    assert row.n_tokens == BLOCK
    return cursor, row


def tick_until(cache: PrefixCache, is_done: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_done():
        cache.tick(EngineLoad.NONE)
        assert time.monotonic() < until
        time.sleep(POLL_S)


def walked(folder: Path) -> tuple[Trace, Trace]:
    out, back = Trace(OUT), Trace(BACK)
    with out.watching():
        cache = cache_over(folder)
        with out.counting():
            cursor = write_a_record(cache)
        cursor.close(None)
    cache.close()
    with back.watching():
        cache = cache_over(folder)
        with back.counting():
            cursor, row = read_it_back(cache)
        cursor.close(row)
    cache.close()
    return out, back


def test_a_records_way_out_and_back_is_short(tmp_path: Path) -> None:
    out, back = walked(tmp_path)
    assert out.reached == set(OUT.values()), "a waypoint has another name"
    assert back.reached == set(BACK.values()), "a waypoint has another name"
    assert len(out.hops) <= MAX_OUT, listed(out.hops)
    assert len(back.hops) <= MAX_BACK, listed(back.hops)
    assert len(out.files | back.files) <= MAX_FILES, sorted(out.files | back.files)


def test_the_walk_in_the_docs_names_every_waypoint() -> None:
    text = (SOURCES.parents[1] / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walk = text.partition("### A record,")[2].partition("\n### ")[0]
    named = {name.rpartition(":")[2] for name in INLINE_CODE.findall(walk)}
    assert {*OUT.values(), *BACK.values()} - named == set()


def listed(hops: set[tuple[str, str]]) -> str:
    return "\n".join(f"{file}: {name}" for file, name in sorted(hops))
