"""Spilling while rows decode: a few records at a time, in spells, within the allowed cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from firn.cache.storage import spill
from firn.cache.storage.orders import WriteOrder
from firn.cache.storage.pace import LEAST_STEPS, MAX_COST
from firn.cache.tiers import WriteResult
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.fake_worker import FakeWorker
from tests.cache.lab import DENSE, LabLayer, LabRow, tree
from tests.hash_runner import prompt_of as words

BLOCK, N_BLOCKS = 8, 200
STEP_S = 0.01


class SlowWorker(FakeWorker):
    """Each write takes two steps of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: deque[tuple[WriteOrder, int]] = deque()
        self.n_written = self.n_most = 0

    def write(self, order: WriteOrder) -> bool:
        self.orders.append((order, 2))
        self.n_most = max(self.n_most, len(self.orders))
        return True

    def step(self) -> bool:
        """Whether something was being written."""
        if not self.orders:
            return False
        order, left = self.orders.popleft()
        if left > 1:
            self.orders.appendleft((order, left - 1))
        else:
            self.n_written += 1
            self.end(order, WriteResult(1, new=True))
        return True


@dataclass
class Server:
    """Takes decode steps, which are slower while something is written."""

    slowdown: float
    worker: SlowWorker = field(default_factory=SlowWorker)
    now: float = 0.0
    n_steps: int = 0
    n_writing: int = 0

    def __post_init__(self) -> None:
        self.cache = tree(DENSE, block=BLOCK, clock=lambda: self.now)
        self.cache.add_tier("ssd", self.worker, namespaces=[Namespace("")])
        ids = words(1, N_BLOCKS * BLOCK + 1)
        prompt = Prompt(np.array(ids, dtype=np.int64))
        self.cursor = self.cache.open(prompt, Namespace(""), CacheControl())
        row = LabRow(LabLayer([[]], DENSE))
        row.consume(ids[:-1])
        self.cursor.commit(row)
        self.cache.confirm()

    def decode(self, n_steps: int) -> None:
        for _ in range(n_steps):
            is_writing = self.worker.step()
            self.now += STEP_S * (self.slowdown if is_writing else 1.0)
            self.n_steps += 1
            self.n_writing += is_writing
            self.cache.tick(EngineLoad.DECODING)


def test_few_records_are_handed_over_at_a_time() -> None:
    server = Server(1.0)
    server.decode(100)
    assert server.worker.n_written > 5
    assert server.worker.n_most <= spill.MAX_PENDING_WRITES


def test_a_first_spell_comes_at_once_and_is_short() -> None:
    server = Server(1.5)
    server.decode(1)
    assert server.worker.orders
    server.decode(3 * LEAST_STEPS)
    assert server.worker.n_written <= LEAST_STEPS // 2 + spill.MAX_PENDING_WRITES


def test_writes_that_slow_decoding_down_are_rare() -> None:
    server = Server(1.5)
    server.decode(800)
    cost = server.now / (server.n_steps * STEP_S) - 1
    assert 0 < cost < 2 * MAX_COST
    assert server.worker.n_written < 40


def test_what_waits_behind_a_long_prompt_is_written_meanwhile() -> None:
    """Its chunks may take a second each, and are the costliest loss in a crash."""
    server = Server(1.5)
    server.now += spill.PATIENCE_S
    for _ in range(10):
        server.now += 1.0
        server.cache.tick(EngineLoad.PREFILLING)
    assert len(server.worker.orders) == N_BLOCKS


def test_an_idle_server_writes_whatever_is_left() -> None:
    server = Server(1.5)
    server.decode(50)
    for _ in range(4 * N_BLOCKS):
        server.worker.step()
        server.cache.tick(EngineLoad.NONE)
    assert server.worker.n_written == N_BLOCKS
