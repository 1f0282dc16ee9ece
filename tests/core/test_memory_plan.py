"""What must be true of the defaults for Macs of 8 to 512 GB and models of 1 to 200 GB."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.core.memory_plan import (
    GIB,
    LEAST_TOKENS,
    MIN_CHUNK,
    STORE_QUEUE_NBYTES,
    MachineMemory,
    MemoryOptions,
    MemoryPlan,
    ModelMemory,
    Transient,
    plan_memory,
)

MACS = (8, 16, 32, 64, 128, 512)
MODELS = (1, 2, 4, 8, 16, 20, 40, 70, 100, 200)
KIB = 1 << 10
METAL = MemoryOptions(chunk=2048)


def mac(gb: int, **more: int) -> MachineMemory:
    """As Metal recommends: two thirds of a small Mac, three quarters of a larger one."""
    physical = gb * GIB
    working_set = physical * 2 // 3 if gb <= 36 else physical * 3 // 4
    return MachineMemory("metal", working_set, physical, **more)


def model(gb: int, *, fused: bool = True) -> ModelMemory:
    """Sizes between those of a 1B and of a 400B model in 4 bits."""
    n_heads = 16 if gb < 8 else 32 if gb < 40 else 64
    per_token = min(32 + 8 * gb, 320) * KIB
    transient = Transient(256 * KIB, 0 if fused else 2 * n_heads)
    return ModelMemory(gb * GIB, per_token, 0, transient, context_length=131072)


PAIRS = [
    pytest.param(mac(ram), model(weights, fused=fused), id=f"{ram}-{weights}-{fused}")
    for ram, weights, fused in itertools.product(MACS, MODELS, (True, False))
]


def check(
    plan: MemoryPlan, machine: MachineMemory, of: ModelMemory, options: MemoryOptions
) -> None:
    """Checks what must be true of every plan for a model that fits."""
    assert plan.total_nbytes <= plan.limit_nbytes <= machine.device_nbytes
    assert machine.physical_nbytes - plan.total_nbytes >= machine.physical_nbytes // 8 or (
        machine.physical_nbytes - plan.total_nbytes >= 8 * GIB
    ), "headroom for the system"
    n_least = min(LEAST_TOKENS, of.context_length or LEAST_TOKENS)
    assert plan.capacity_nbytes >= of.row_nbytes(n_least), "room for one request"
    assert plan.context_tokens >= n_least
    assert plan.wired_nbytes <= plan.weights_nbytes
    chunk = of.transient.largest_chunk(n_least - 64, plan.chunk_nbytes, most=options.chunk)
    assert (
        of.transient.chunk_nbytes(chunk, n_least - chunk) <= plan.chunk_nbytes or chunk == MIN_CHUNK
    )


@pytest.mark.parametrize(("machine", "of"), PAIRS)
def test_the_defaults_of_every_mac_hold(machine: MachineMemory, of: ModelMemory) -> None:
    plan = plan_memory(machine, of, METAL)
    if plan.fits:
        check(plan, machine, of, METAL)
    else:
        smallest = of.weights_nbytes + of.row_nbytes(LEAST_TOKENS) + 64 * (1 << 20)
        least_chunk = of.transient.chunk_nbytes(MIN_CHUNK, LEAST_TOKENS)
        assert smallest + least_chunk > machine.device_nbytes, "it is refused what would fit"
    if of.weights_nbytes <= machine.physical_nbytes // 2:
        assert plan.fits, "half of a Mac's memory can always be a model"


@pytest.mark.parametrize(("machine", "of"), PAIRS)
def test_what_waits_for_stores_is_in_the_plan(machine: MachineMemory, of: ModelMemory) -> None:
    """Two stores, each for the model and for its draft model."""
    options = replace(METAL, n_store_queues=4)
    plan, without = plan_memory(machine, of, options), plan_memory(machine, of, METAL)
    assert plan.store_queues_nbytes == 4 * STORE_QUEUE_NBYTES
    if plan.fits:
        check(plan, machine, of, options)
        assert without.fits


@pytest.mark.parametrize(("machine", "of"), PAIRS)
def test_a_draft_models_prefixes_are_in_the_plan(machine: MachineMemory, of: ModelMemory) -> None:
    """They take part of the capacity, but never what one request needs."""
    without = plan_memory(machine, of, METAL)
    for nbytes in (1 << 20, GIB, 1 << 60):
        plan = plan_memory(machine, replace(of, draft_cache_nbytes=nbytes), METAL)
        assert plan.fits == without.fits
        assert plan.draft_cache_nbytes <= min(nbytes, without.capacity_nbytes // 8)
        if plan.fits:
            check(plan, machine, of, METAL)
            both = plan.capacity_nbytes + plan.draft_cache_nbytes
            assert both == without.capacity_nbytes
            assert (
                plan.draft_cache_nbytes
                or without.capacity_nbytes < of.row_nbytes(LEAST_TOKENS) + GIB
            )


@pytest.mark.parametrize(("machine", "of"), PAIRS)
def test_exact_mode_keeps_its_chunk(machine: MachineMemory, of: ModelMemory) -> None:
    options = MemoryOptions(chunk=512, fixed_chunk=True)
    plan = plan_memory(machine, of, options)
    if plan.fits:
        check(plan, machine, of, options)
        depth = min(plan.context_tokens, LEAST_TOKENS)
        assert of.transient.chunk_nbytes(512, depth - 512) <= plan.chunk_nbytes


def test_other_programs_and_other_servers_count() -> None:
    alone = plan_memory(mac(64), model(8), METAL)
    beside = plan_memory(mac(64, reserved_nbytes=20 * GIB), model(8), METAL)
    busy = plan_memory(mac(64, available_nbytes=20 * GIB), model(8), METAL)
    both = plan_memory(
        mac(64, available_nbytes=30 * GIB, reserved_nbytes=20 * GIB, unclaimed_nbytes=12 * GIB),
        model(8),
        METAL,
    )
    assert alone.limited_by == "the device"
    assert (beside.limited_by, alone.limit_nbytes - beside.limit_nbytes) == (
        "other firn servers",
        20 * GIB,
    )
    assert busy.limited_by == "other programs"
    assert busy.total_nbytes < 20 * GIB
    assert both.total_nbytes < 18 * GIB, "what a neighbour has not taken yet is not there"


def test_a_raised_working_set_still_leaves_the_system_its_part() -> None:
    """`sysctl iogpu.wired_limit_mb` can be set to nearly all of memory."""
    raised = MachineMemory("metal", 63 * GIB, 64 * GIB)
    assert plan_memory(raised, model(40), METAL).limit_nbytes <= 56 * GIB


def test_unfused_attention_is_in_the_plan_and_shortens_the_context() -> None:
    """24 heads of 256 dimensions, 100K tokens: a chunk of 512 takes 2.3 GiB."""
    scores = Transient(0, 2 * 24)
    assert scores.chunk_nbytes(512, 100_000) == pytest.approx(2.3 * GIB, rel=0.01)
    small, fused = model(4), model(4)
    unfused = replace(small, transient=replace(small.transient, per_score_nbytes=64))
    plan = plan_memory(mac(8), unfused, METAL)
    assert plan.fits
    assert plan.chunk_nbytes >= unfused.transient.chunk_nbytes(MIN_CHUNK, LEAST_TOKENS - MIN_CHUNK)
    assert plan.context_tokens <= plan_memory(mac(8), fused, METAL).context_tokens


@pytest.mark.parametrize("depth", [0, 1000, 30_000, 60_000, 120_000])
def test_chunks_shrink_with_depth(depth: int) -> None:
    of = Transient(256 * KIB, 64)
    chunk = of.largest_chunk(depth, 512 << 20, most=2048)
    assert of.chunk_nbytes(chunk, depth) <= 512 << 20 or chunk == MIN_CHUNK
    assert chunk >= of.largest_chunk(depth + 1, 512 << 20, most=2048)


def test_the_wired_limit_never_passes_the_weights() -> None:
    plan = plan_memory(mac(64), model(8), replace(METAL, wired_nbytes=40 * GIB))
    assert plan.wired_nbytes == 8 * GIB
    assert plan_memory(mac(64), model(8), METAL).wired_nbytes == 0, "off unless it is asked for"


def test_a_share_of_the_device_takes_the_place_of_the_headroom() -> None:
    gpu = MachineMemory("gpu", 80 * GIB, 512 * GIB, has_own_memory=True)
    half = plan_memory(gpu, model(16), replace(METAL, device_share=0.5))
    assert half.limit_nbytes == 40 * GIB
    assert plan_memory(gpu, model(16), METAL).limit_nbytes == 78 * GIB
    asked = plan_memory(gpu, model(16), replace(METAL, headroom_nbytes=10 * GIB))
    assert asked.limit_nbytes == 70 * GIB


@given(
    st.booleans(),
    st.integers(1, 1024),
    st.floats(0.1, 1.0),
    st.one_of(st.none(), st.integers(0, 1024)),
    st.integers(0, 400),
    st.integers(0, 1 << 20),
    st.integers(0, 128),
)
def test_any_plan_that_fits_stays_within_its_limit(
    has_own_memory: bool,
    ram: int,
    share: float,
    available: int | None,
    weights: int,
    per_token: int,
    score: int,
) -> None:
    machine = MachineMemory(
        "gpu",
        int(ram * GIB * share),
        ram * GIB,
        None if available is None else available * GIB,
        has_own_memory=has_own_memory,
    )
    of = ModelMemory(weights * GIB, per_token, 1 << 20, Transient(1 << 16, score), 40_000)
    plan = plan_memory(machine, of, METAL)
    assert plan.capacity_nbytes > 0
    if plan.fits:
        assert plan.total_nbytes <= plan.limit_nbytes
        assert plan.context_tokens >= LEAST_TOKENS
