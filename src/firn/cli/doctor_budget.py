"""The memory budget of a machine and a model, as `firn doctor` prints it: what a start would plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from firn.core.memory_plan import (
    MachineMemory,
    MemoryOptions,
    MemoryPlan,
    ModelMemory,
    Transient,
    plan_memory,
)
from firn.host.machine import SystemMemory

if TYPE_CHECKING:
    from firn.backends.report import DeviceReport
    from firn.models.inspect import ModelReport


def machine_of(device: DeviceReport, system: SystemMemory) -> MachineMemory:
    has_own = device.profile.has_own_memory
    return MachineMemory(
        device.profile.name,
        device.working_set_nbytes or device.memory_nbytes or system.total,
        system.total,
        None if has_own else system.available,
        has_own_memory=has_own,
    )


def model_of(report: ModelReport) -> ModelMemory:
    cost = report.cache
    return ModelMemory(
        report.weights_nbytes,
        cost.per_token_nbytes if cost else 0,
        cost.fixed_nbytes if cost else 0,
        report.transient or Transient(0),
        report.context_length,
    )


def as_computed(report: ModelReport, device: DeviceReport, system: SystemMemory) -> ModelReport:
    """The report in float32, if the device would compute in it: larger weights, twice the cache."""
    wide, share = report.float32_nbytes, device.profile.widened_share
    most = math.inf if system.available is None else share * system.available
    if not share or not report.weights_nbytes < wide <= most:
        return report
    cost = report.cache and replace(
        report.cache,
        per_token_nbytes=2 * report.cache.per_token_nbytes,
        fixed_nbytes=2 * report.cache.fixed_nbytes,
    )
    return replace(report, weights_nbytes=wide, cache=cost)


def verdict(
    machine: MachineMemory, model: ModelMemory, options: MemoryOptions
) -> tuple[MemoryPlan, bool]:
    """The plan, and whether the model would fit if nothing else ran."""
    alone = replace(machine, available_nbytes=None, reserved_nbytes=0, unclaimed_nbytes=0)
    return plan_memory(machine, model, options), plan_memory(alone, model, options).fits


def budget_rows(
    machine: MachineMemory, plan: MemoryPlan, *, memory_name: str
) -> Iterator[tuple[int, str]]:
    """Bytes and what they are for; deductions are negative, and the last row is the rest."""
    yield machine.device_nbytes, memory_name
    if machine.reserved_nbytes:
        yield -machine.reserved_nbytes, "reserved by other firn servers"
    if plan.headroom_nbytes:
        yield -plan.headroom_nbytes, "left free"
    before = machine.device_nbytes - machine.reserved_nbytes - plan.headroom_nbytes
    if plan.limit_nbytes < before:
        yield plan.limit_nbytes - before, "used by other programs"
    yield -plan.weights_nbytes, "weights"
    yield -plan.chunk_nbytes, "a prefill chunk while it runs"
    yield -plan.buffer_cache_nbytes, "buffers that MLX keeps for reuse"
    yield -plan.write_queue_nbytes, "records waiting to be written"
    if plan.store_queues_nbytes:
        yield -plan.store_queues_nbytes, "records waiting to be sent to stores"
    yield (
        plan.limit_nbytes - plan.total_nbytes + plan.capacity_nbytes,
        "requests and stored prefixes",
    )
