"""Spilling while rows decode: a few records at a time, in spells, within the allowed cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from firn.cache.storage import client
from firn.cache.storage.container import Name
from firn.cache.storage.io import Changes, WriteOrder
from firn.cache.storage.pace import LEAST_STEPS, MAX_COST
from firn.cache.storage.threads import Done
from firn.cache.tiers import TierStatus, TierUsage, WriteResult
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.lab import DENSE, LabLayer, LabRow, tree
from tests.hash_runner import prompt_of as words

BLOCK, N_BLOCKS = 8, 200
STEP_S = 0.01


@dataclass
class SlowIo:
    """Each write takes two steps of the engine."""

    orders: deque[list[Done[WriteResult[Name]] | int]] = field(default_factory=deque)
    n_written: int = 0
    n_most: int = 0

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        self.orders.append([done, 2])
        self.n_most = max(self.n_most, len(self.orders))
        return True

    def step(self) -> bool:
        """Whether something was being written."""
        if not self.orders:
            return False
        done, left = self.orders[0]
        assert isinstance(left, int)
        assert not isinstance(done, int)
        self.orders[0][1] = left - 1
        if left == 1:
            self.orders.popleft()
            self.n_written += 1
            done(WriteResult(1, new=True))
        return True

    def has_room(self, nbytes: int) -> bool:
        return True

    def defer_writes(self, defer: bool) -> None: ...

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        done(None)

    def touch(self, stamps: object) -> None: ...

    def usage(self) -> TierUsage:
        return TierUsage(0, 1 << 20, TierStatus())

    def close(self) -> None: ...


@dataclass
class Server:
    """Takes decode steps, which are slower while something is written."""

    slowdown: float
    io: SlowIo = field(default_factory=SlowIo)
    now: float = 0.0
    n_steps: int = 0
    n_writing: int = 0

    def __post_init__(self) -> None:
        self.cache = tree(DENSE, block=BLOCK, clock=lambda: self.now)
        self.cache.add_tier("ssd", self.io, namespaces=[Namespace("")], wake=lambda: None)  # type: ignore[arg-type]
        ids = words(1, N_BLOCKS * BLOCK + 1)
        prompt = Prompt(np.array(ids, dtype=np.int64))
        self.cursor = self.cache.open(prompt, Namespace(""), CacheControl())
        row = LabRow(LabLayer([[]], DENSE))
        row.consume(ids[:-1])
        self.cursor.commit(row)
        self.cache.confirm()

    def decode(self, n_steps: int) -> None:
        for _ in range(n_steps):
            is_writing = self.io.step()
            self.now += STEP_S * (self.slowdown if is_writing else 1.0)
            self.n_steps += 1
            self.n_writing += is_writing
            self.cache.tick(EngineLoad.DECODING)


def test_few_records_are_handed_over_at_a_time() -> None:
    server = Server(1.0)
    server.decode(100)
    assert server.io.n_written > 5
    assert server.io.n_most <= client.MAX_PENDING_WRITES


def test_a_first_spell_comes_at_once_and_is_short() -> None:
    server = Server(1.5)
    server.decode(1)
    assert server.io.orders
    server.decode(3 * LEAST_STEPS)
    assert server.io.n_written <= LEAST_STEPS // 2 + client.MAX_PENDING_WRITES


def test_writes_that_slow_decoding_down_are_rare() -> None:
    server = Server(1.5)
    server.decode(800)
    cost = server.now / (server.n_steps * STEP_S) - 1
    assert 0 < cost < 2 * MAX_COST
    assert server.io.n_written < 40


def test_what_waits_behind_a_long_prompt_is_written_meanwhile() -> None:
    """Its chunks may take a second each, and are the costliest loss in a crash."""
    server = Server(1.5)
    server.now += client.PATIENCE_S
    for _ in range(10):
        server.now += 1.0
        server.cache.tick(EngineLoad.PREFILLING)
    assert len(server.io.orders) == N_BLOCKS


def test_an_idle_server_writes_whatever_is_left() -> None:
    server = Server(1.5)
    server.decode(50)
    for _ in range(4 * N_BLOCKS):
        server.io.step()
        server.cache.tick(EngineLoad.NONE)
    assert server.io.n_written == N_BLOCKS
