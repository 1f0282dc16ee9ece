"""A server's memory while it serves: it follows the machine, and tells other servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from firn.assembly.memory import (
    MemoryWatch,
    Planned,
    plan_server,
    with_reservations,
)
from firn.assembly.parts import watch_engine
from firn.assembly.speculation import Drafting
from firn.config import CacheConfig, Config, EngineConfig
from firn.core.memory_plan import (
    GIB,
    MIN_CAPACITY_NBYTES,
    MachineMemory,
    MemoryPlan,
    ModelMemory,
)
from firn.engine import Budget, RowCost
from firn.host.reservations import Reservation, Reserved
from tests.backends.fakes import pretend, with_memory

MAC = MachineMemory("metal", 48 * GIB, 64 * GIB, available_nbytes=50 * GIB)
MODEL = ModelMemory(8 * GIB, 100 << 10, 0, context_length=100_000)


@pytest.fixture
def planned() -> Planned:
    return plan_server(Config(), MAC, MODEL, chunk=512, exact=False)


def test_each_store_has_a_queue_for_each_cache() -> None:
    def n_queues(*tiers: str, **engine: str) -> int:
        config = Config(cache=CacheConfig(tiers=tiers), engine=EngineConfig(**engine))
        return plan_server(config, MAC, MODEL, chunk=512, exact=False).options.n_store_queues

    assert n_queues() == n_queues(draft_model="small") == 0
    assert n_queues("redis://a/0", "s3://b") == 2
    assert n_queues("redis://a/0", "s3://b", draft_model="small") == 4


def test_a_rows_cost_is_counted_in_steps_of_its_buffers_with_any_drafter() -> None:
    model = RowCost(100, 7, step_tokens=256)
    assert Drafting().with_rows(model) == model
    both = Drafting(row_cost=RowCost(10, 1)).with_rows(model)
    assert both.of(1) == 8 + 256 * 110


class Machine:
    """A fake machine: the memory that it has left, and the capacity that its server was given."""

    def __init__(self, planned: Planned, folder: Path) -> None:
        self.now = MAC
        self._adapt(planned.plan)
        self.folder = folder
        self.watch = MemoryWatch(
            planned,
            look=lambda: self.now,
            used_nbytes=lambda: 9 * GIB,
            held_nbytes=lambda: 0,
            capacity_nbytes=lambda: self.capacity,
            adapt=self._adapt,
            folder=folder,
            every_s=3600,
        )

    def _adapt(self, plan: MemoryPlan) -> None:
        self.capacity, self.buffers = plan.capacity_nbytes, plan.buffer_cache_nbytes


def test_capacity_follows_what_other_programs_leave(planned: Planned, tmp_path: Path) -> None:
    mac = Machine(planned, tmp_path)
    full, buffers = mac.capacity, mac.buffers
    mac.watch.check()
    assert mac.capacity == full, "nothing has changed"
    mac.now = replace(MAC, available_nbytes=30 * GIB)
    mac.watch.check()
    assert mac.capacity < full - 10 * GIB
    assert mac.buffers < 0.8 * buffers, "what MLX keeps for reuse gives way, too"
    mac.now = replace(MAC, available_nbytes=1 * GIB)
    mac.watch.check()
    assert mac.capacity == MIN_CAPACITY_NBYTES
    mac.now = MAC
    mac.watch.check()
    assert (mac.capacity, mac.buffers) == (full, buffers)
    mac.watch.stop()


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
def test_a_running_servers_memory_is_watched_on_every_device(
    kind: str, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = replace(MAC, device=kind, available_nbytes=30 * GIB)
    with_memory(pretend(kind, monkeypatch), now, monkeypatch)
    monkeypatch.setattr("firn.assembly.memory.reservations_folder", lambda: tmp_path)
    engine = FakeEngine(planned)
    watch = watch_engine(cast("Any", engine), front=None, is_sharded=False)
    assert watch is not None
    watch.stop()
    assert engine.parts.budget.capacity_nbytes < planned.plan.capacity_nbytes - 10 * GIB


class FakeEngine:
    """Runs every call immediately, on the caller's thread."""

    def __init__(self, planned: Planned) -> None:
        self.parts = FakeParts(
            planned, Budget(RowCost(1, 0), capacity_nbytes=planned.plan.capacity_nbytes)
        )

    def call(self, do: Callable[[FakeParts], object]) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(do(self.parts))
        return done


@dataclass
class FakeParts:
    planned: Planned
    budget: Budget

    def set_capacity(self, nbytes: int) -> None:
        self.budget.capacity_nbytes = nbytes


def test_two_servers_share_a_machine(planned: Planned, tmp_path: Path) -> None:
    """A server gives up what another one reserves, and takes it back when that one ends."""
    mac = Machine(planned, tmp_path)
    mac.watch.check()
    second = Reservation(tmp_path, pid=1)
    second.put(Reserved("metal", 1, 20 * GIB, 5 * GIB))
    before = mac.capacity
    mac.watch.check()
    assert mac.capacity <= before - 15 * GIB
    seen = with_reservations(MAC, group=1, folder=tmp_path)
    assert (seen.reserved_nbytes, seen.unclaimed_nbytes) == (0, 0), "its own does not count"
    second.close()
    mac.watch.check()
    assert mac.capacity == before
    mac.watch.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_server_reserves_what_it_needs_and_not_what_it_would_like(planned: Planned) -> None:
    """Two of them fit on a machine: one's stored prefixes give way to the other's requests."""
    idle, busy = planned.reserved_nbytes(0), planned.reserved_nbytes(20 * GIB)
    assert planned.plan.weights_nbytes < idle < planned.plan.total_nbytes // 2
    assert busy - planned.reserved_nbytes(10 * GIB) == 10 * GIB
    now = replace(MAC, available_nbytes=MAC.physical_nbytes - 9 * GIB, reserved_nbytes=idle)
    second = plan_server(Config(), now, MODEL, chunk=512, exact=False).plan
    assert second.fits
    assert second.capacity_nbytes > 10 * GIB


def test_where_a_front_decides_the_watch_only_tells(planned: Planned, tmp_path: Path) -> None:
    watch = MemoryWatch(
        planned,
        look=lambda: replace(MAC, available_nbytes=0),
        used_nbytes=lambda: 0,
        held_nbytes=lambda: 0,
        capacity_nbytes=lambda: 5 * GIB,
        adapt=None,
        group=77,
        folder=tmp_path,
        every_s=3600,
    )
    watch.start()
    (path,) = tmp_path.iterdir()
    assert '"group": 77' in path.read_text()
    watch.stop()


def test_options_reach_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineConfig(scheduler_headroom_gb=20.0, wired_limit=4.0)
    plan = plan_server(Config(engine=engine), MAC, MODEL, chunk=512, exact=False).plan
    assert (plan.headroom_nbytes, plan.wired_nbytes) == (20 * GIB, 4 * GIB)
    with caplog.at_level("WARNING", "firn"):
        large = replace(MODEL, weights_nbytes=60 * GIB)
        plan_server(Config(), MAC, large, chunk=512, exact=False).log_plan()
    assert "too large" in caplog.text
