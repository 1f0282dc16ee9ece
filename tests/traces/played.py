"""Plays a trace against the real cache, request by request; the simulation must agree with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.faults import Missing, TierFull
from firn.cache.storage.orders import ReadOrder, WriteOrder
from firn.cache.tiers import WriteResult
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, Prompt
from firn.traces.trace import Trace
from tests.cache.fake_worker import FakeWorker
from tests.cache.lab import DENSE, LabLayer, LabRow, Steady, tree

BLOCK = 4
BLOCK_NBYTES = 2 * 4 * BLOCK
"""The lab's plain attention keeps two arrays of 32-bit numbers."""
NOBODY = Namespace("")


class RecordWorker(FakeWorker):
    """Keeps the tier contract, completes every order immediately, and has room for `n_records`."""

    def __init__(self, n_records: int) -> None:
        super().__init__()
        self._n_records = n_records
        self._held: dict[Name, Loaded] = {}
        self._stamps: dict[Name, float] = {}

    def write(self, order: WriteOrder) -> bool:
        name, evicted = order.header.name, ()
        if len(self._held) >= self._n_records:
            oldest, stamp = min(self._stamps.items(), key=itemgetter(1))
            if stamp > order.used_at:
                self.end(order, TierFull())
                return True
            del self._held[oldest], self._stamps[oldest]
            evicted = (oldest,)
        assert order.content is not None
        buffers = [memoryview(bytearray(b)) for b in order.content.fetch()]
        self._held[name] = Loaded(order.header, buffers)
        self._stamps[name] = order.used_at
        self.end(order, WriteResult(BLOCK_NBYTES, new=True, evicted=evicted))
        return True

    def read(self, order: ReadOrder) -> None:
        self.end(order, self._held.get(order.name) or Missing())

    def delete(self, names: Iterable[Name]) -> None:
        for name in names:
            self._held.pop(name, None)
            self._stamps.pop(name, None)

    def touch(self, stamps: Mapping[Name, float]) -> None:
        for name, stamp in stamps.items():
            if name in self._stamps:
                self._stamps[name] = max(self._stamps[name], stamp)


class Eager(Steady):
    """Estimates with which every load pays off."""

    @property
    def knows_prefill(self) -> bool:
        return True

    def prefill_s(self, start: int, end: int) -> float:
        return 1e6 * (end - start)

    def load_s(self, tier: str, nbytes: int) -> float:
        return 1e-3


def play_for_real(
    trace: Trace, *, memory_blocks: int, ssd_blocks: int = 0, keeps_memory: bool = True
) -> list[int]:
    """Blocks of each prompt that the cache had. keeps_memory: if False, memory is emptied after
    each request."""
    now = [0.0]
    cache = tree(
        DENSE,
        block=BLOCK,
        limit_nbytes=memory_blocks * BLOCK_NBYTES,
        clock=lambda: now[0],
        wall=lambda: now[0],
    )
    cache.records.estimates = Eager()
    if ssd_blocks:
        cache.add_tier("ssd", RecordWorker(ssd_blocks), namespaces=[NOBODY])
    found = []
    for i in range(len(trace)):
        now[0] = float(trace.at[i])
        path, n_prompt_blocks = trace.path(i), int(trace.n_prompt_blocks[i])
        tokens = (path[:, None] * BLOCK + np.arange(1, BLOCK + 1)).ravel().astype(np.int64)
        tokens = np.append(tokens, [(1 << 20) + i])  # a prompt's last token is always computed
        cursor = cache.open(Prompt(tokens[: n_prompt_blocks * BLOCK + 1]), NOBODY, CacheControl())
        while cursor.racing:
            cache.tick(EngineLoad.NONE)
        row = LabRow(LabLayer([[]], DENSE))
        restored = cursor.restore()
        if restored is not None:
            restored.fill([row.layer])
            row.n_tokens = restored.n_tokens
        found.append(cursor.admission.n_cached // BLOCK)
        row.consume(tokens[row.n_tokens : n_prompt_blocks * BLOCK])
        cursor.commit(row)
        reply = tokens[n_prompt_blocks * BLOCK + 1 : -1].tolist()
        answer = cursor.fork(reply)
        cursor.close(None)
        row.consume(tokens[n_prompt_blocks * BLOCK : len(path) * BLOCK])
        answer.commit(row)
        answer.close(row)
        cache.tick(EngineLoad.NONE)
        if not keeps_memory:
            _empty_memory(cache)
    assert not cache.stats.faults
    return found


def _empty_memory(cache: Any) -> None:
    cache.set_room(0)
    cache.tick(EngineLoad.NONE)
    cache.set_room(1 << 40)
