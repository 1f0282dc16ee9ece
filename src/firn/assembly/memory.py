"""The memory of a server with one model: planned when the model is loaded, watched while it serves.

Every few seconds, the watch checks what the machine has left and what other firn servers have
reserved, and tells the engine how much it may use now. Owner: `app.Server`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from firn.config import Config, default_cache_dir
from firn.core.memory_plan import (
    LEAST_TOKENS,
    MIN_CAPACITY_NBYTES,
    MachineMemory,
    MemoryOptions,
    MemoryPlan,
    ModelMemory,
    Transient,
    plan_memory,
)
from firn.core.units import GIB, MIB
from firn.host.reservations import Reservation, Reserved, others

if TYPE_CHECKING:  # `firn doctor` plans memory without loading mlx
    from firn.assembly.compute import ComputeSettings
    from firn.engine import RowCost

log = logging.getLogger("firn")

CHECK_EVERY_S = 10.0
WORTH_TELLING = 0.02
"""Share of the capacity. Smaller changes are noise."""
SHORT = 0.75
"""The capacity's fall below this share of its former value is logged."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its inputs, so that it can be made again when the machine's memory changes."""

    plan: MemoryPlan
    model: ModelMemory
    options: MemoryOptions
    alone_nbytes: int
    """The capacity if nothing else ran on the machine."""

    def log_plan(self) -> None:
        """Log the plan, with a warning if the model is too large."""
        plan = self.plan
        parts = (
            f"weights {plan.weights_nbytes // MIB}, requests and cache {plan.capacity_nbytes // MIB}, "
            f"prefill chunk {plan.chunk_nbytes // MIB}, buffer cache {plan.buffer_cache_nbytes // MIB}, "
            f"write queue {(plan.write_queue_nbytes + plan.store_queues_nbytes) // MIB}"
        )
        if plan.draft_cache_nbytes:
            parts += f", draft model's cache {plan.draft_cache_nbytes // MIB}"
        log.debug("memory plan (MiB): %s; limit %d", parts, plan.limit_nbytes // MIB)
        if not plan.fits:
            log.warning(
                "this model is too large: its weights need %.1f GiB of the %.1f GiB that it may "
                "use. It will be slow or fail; `firn doctor MODEL` shows the budget",
                plan.weights_nbytes / GIB,
                plan.limit_nbytes / GIB,
            )

    def reserved_nbytes(self, held_nbytes: int) -> int:
        """The least that this server needs: everything except stored prefixes, which give way.

        held_nbytes: memory that live requests hold.
        """
        plan, model = self.plan, self.model
        fixed = plan.total_nbytes - plan.capacity_nbytes
        return fixed + max(held_nbytes, min(model.row_nbytes(LEAST_TOKENS), plan.capacity_nbytes))

    def adapted(self, now: MachineMemory) -> MemoryPlan:
        """The plan for what the machine has now. Only the limit, the buffer cache and the capacity
        change."""
        plan, again = self.plan, plan_memory(now, self.model, self.options)
        buffers = min(again.buffer_cache_nbytes, plan.buffer_cache_nbytes)
        fixed = plan.total_nbytes - plan.capacity_nbytes - plan.buffer_cache_nbytes
        return replace(
            plan,
            limit_nbytes=again.limit_nbytes,
            buffer_cache_nbytes=buffers,
            capacity_nbytes=max(again.limit_nbytes - fixed - buffers, MIN_CAPACITY_NBYTES),
        )


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans the memory of one loaded model on this machine."""

    config: Config
    machine: MachineMemory
    """Before the model was loaded."""
    compute: ComputeSettings
    transient: Transient
    context_length: int

    def plan(self, cost: RowCost, weights_nbytes: int, *, draft_cache_nbytes: int = 0) -> Planned:
        rows = (cost.per_token_nbytes, cost.fixed_nbytes)
        needs = ModelMemory(
            weights_nbytes, *rows, self.transient, self.context_length, draft_cache_nbytes
        )
        compute = self.compute
        return plan_server(
            self.config, self.machine, needs, chunk=compute.largest_chunk, exact=compute.exact
        )


def plan_server(
    config: Config, machine: MachineMemory, model: ModelMemory, *, chunk: int, exact: bool
) -> Planned:
    """The plan at a server's start."""
    options = options_of(config, chunk=chunk, exact=exact)
    plan = plan_memory(machine, model, options)
    alone = replace(machine, available_nbytes=None, reserved_nbytes=0, unclaimed_nbytes=0)
    return Planned(plan, model, options, plan_memory(alone, model, options).capacity_nbytes)


def options_of(config: Config, *, chunk: int, exact: bool) -> MemoryOptions:
    engine = config.engine
    headroom = engine.scheduler_headroom_gb
    return MemoryOptions(
        chunk=chunk,
        fixed_chunk=exact,
        headroom_nbytes=None if headroom is None else int(headroom * GIB),
        device_share=engine.gpu_memory_utilization,
        wired_nbytes=int(engine.wired_limit * GIB),
        n_store_queues=len(config.cache.tiers) * (2 if engine.draft_model else 1),
    )


def reservations_folder() -> Path:
    return default_cache_dir() / "reservations"


def with_reservations(
    now: MachineMemory, *, group: int | None = None, folder: Path | None = None
) -> MachineMemory:
    """The machine's memory, with what other servers of this user have reserved.

    group: servers of this group share one budget and are not counted; None: only this server.
    """
    servers = others(
        folder or reservations_folder(),
        device=now.device,
        group=os.getpid() if group is None else group,
    )
    return replace(
        now,
        reserved_nbytes=sum(r.reserved_nbytes for r in servers),
        unclaimed_nbytes=sum(r.unclaimed_nbytes for r in servers),
    )


class MemoryWatch:
    """Adapts a server's capacity to what the machine has left. It has its own thread, which `stop`
    ends."""

    def __init__(
        self,
        planned: Planned,
        *,
        look: Callable[[], MachineMemory],
        used_nbytes: Callable[[], int],
        held_nbytes: Callable[[], int],
        capacity_nbytes: Callable[[], int],
        adapt: Callable[[MemoryPlan], None] | None,
        group: int | None = None,
        folder: Path | None = None,
        every_s: float = CHECK_EVERY_S,
    ) -> None:
        """held_nbytes: memory that live requests hold. adapt: called with a plan whose capacity has
        changed; None: the capacity is decided elsewhere."""
        self._planned = planned
        self._look = look
        self._used_nbytes = used_nbytes
        self._held_nbytes = held_nbytes
        self._capacity_nbytes = capacity_nbytes
        self._adapt = adapt
        self._group = os.getpid() if group is None else group
        self._folder = folder or reservations_folder()
        self._every_s = every_s
        self._reservation = Reservation(self._folder)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="firn-memory", daemon=True)

    def start(self) -> None:
        self.check()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._reservation.close()

    def check(self) -> None:
        """Reserve what this server needs, and adapt to what the machine has left."""
        now = self._look()
        needs = self._planned.reserved_nbytes(self._held_nbytes())
        self._reservation.put(Reserved(now.device, self._group, needs, self._used_nbytes()))
        if self._adapt is None:
            return
        capacity = self._capacity_nbytes()
        plan = self._planned.adapted(with_reservations(now, folder=self._folder, group=self._group))
        new_capacity = plan.capacity_nbytes
        if abs(new_capacity - capacity) > WORTH_TELLING * capacity:
            if new_capacity < SHORT * capacity:
                log.info(
                    "memory is low: other programs use more, requests and cache get %d MiB less",
                    (capacity - new_capacity) // MIB,
                )
            self._adapt(plan)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.check()
            except Exception as e:  # the machine's memory is unknown, or the engine is gone
                log.debug("checking memory failed: %r", e)
