"""What is computed, loaded and kept: each of these once went wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.cache import records
from firn.cache.admin import control as admin
from firn.cache.parts import Part
from firn.cache.planning.estimates import Estimates
from firn.cache.prefix import PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers._folder import Disk
from firn.cache.tiers.ssd import SsdTier
from firn.core.errors import BadRequest
from firn.core.events import Admitted, Advanced
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import (
    DENSE,
    HYBRID,
    IN_ROWS,
    WINDOWED,
    LabEngine,
    Shape,
    check_tree,
    records_of,
    tree,
)
from tests.cache.lab import prompt_of as lab_prompt
from tests.harness import Eager
from tests.hash_engine import Outcome
from tests.hash_runner import prompt_of as words
from tests.slow_disk import SlowDisk
from tests.waiting import wait_until

BLOCK = 8
GIB = 1 << 30


class Patient(Eager):
    """Loads are waited for."""


class Hasty(Estimates):
    """A load is begun whatever is known, and never waited for.

    Each token costs a tenth of all that is left to compute, so no load is too small.
    """

    def load_s(self, tier: str, nbytes: int) -> float:
        return 0.0

    def prefill_s(self, start: int, end: int) -> float:
        return 1e9 * (0.9**start - 0.9**end)

    @property
    def knows_prefill(self) -> bool:
        return True

    def chunk_s(self, start: int) -> float:
        return -1.0


class Refusing(Hasty):
    """Nothing is worth loading."""

    def load_s(self, tier: str, nbytes: int) -> float:
        return 1e12


@contextmanager
def server(
    folder: Path,
    shape: Shape = DENSE,
    *,
    estimates: Callable[[], Estimates] = Patient,
    disk: Disk | None = None,
    tier: SsdTier | None = None,
    limit_nbytes: int = GIB,
    chunk: int = 16,
) -> Iterator[LabEngine]:
    """An engine over a folder; on exit, everything it queued has been written."""
    cache = tree(shape, block=BLOCK, limit_nbytes=limit_nbytes, clock=time.monotonic)
    cache.records.estimates = estimates()
    options = TierOptions(str(folder), GIB)
    with LabEngine(shape, cache=cache, chunk=chunk) as lab:
        names = [Namespace("")]
        worker = TierWorker(tier or SsdTier(options, disk=disk), wake=lab.engine.wake)
        lab.between_steps(lambda: cache.add_tier("ssd", worker, namespaces=names))
        yield lab
        settle(lab)


def settle(lab: LabEngine) -> None:
    """Wait until everything is written."""

    def left() -> bool:
        (tier,) = lab.tree.records.tiers
        lab.tree.tick(EngineLoad.NONE)
        return not tier.idle or any(r.writing for r in records_of(lab.tree))

    wait_until(lambda: not lab.between_steps(left))


def ask(lab: LabEngine, ids: list[int], n_reply: int = 4, **options: object) -> Outcome:
    outcome = lab.submit(ids, n_reply, **options).wait()
    outcome.check()
    return outcome


def admission(outcome: Outcome) -> Admitted:
    """What the cache did for the request in the end."""
    said = [*outcome.of(Admitted), *(a.admission for a in outcome.of(Advanced))]
    return said[-1]


def drop_memory(lab: LabEngine) -> None:
    lab.between_steps(lambda: lab.tree.set_room(0))
    lab.between_steps(lambda: lab.tree.set_room(GIB))


def in_memory(cache: PrefixCache) -> int:
    return sum(r.arrays is not None for r in records_of(cache))


# --- computed once -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_what_is_computed_although_it_is_stored_is_in_memory_afterwards(
    tmp_path: Path, shape: Shape
) -> None:
    ids = words(1, 100)
    with server(tmp_path, shape) as lab:
        ask(lab, ids, boundaries=[50])
    with server(tmp_path, shape, estimates=Refusing) as lab:
        assert admission(ask(lab, ids, boundaries=[50])).why == "slower to load"
        assert admission(ask(lab, ids, boundaries=[50])).tiers == (("memory", 99),)


@pytest.mark.parametrize("shape", [DENSE, WINDOWED, IN_ROWS], ids=["dense", "window", "rows"])
def test_a_reply_that_is_computed_although_it_is_stored_is_in_memory_afterwards(
    tmp_path: Path, shape: Shape
) -> None:
    """The prompt ends at the end of a block: the last record has nothing but the reply."""
    ids = words(1, 8 * BLOCK)
    with server(tmp_path, shape) as lab:
        ask(lab, ids)
    with server(tmp_path, shape) as lab:
        assert admission(ask(lab, ids)).tiers == (("ssd", 8 * BLOCK - 1),)
        records = lab.between_steps(lambda: records_of(lab.tree))
        tail = [r for r in records if r.node.end > 8 * BLOCK]
        assert tail
        assert all(r.arrays is not None for r in tail)
        lab.check()


def test_a_lifetime_that_ends_no_more_is_worth_a_file(tmp_path: Path) -> None:
    ids = words(1, 60)
    with server(tmp_path) as lab:
        ask(lab, ids, control=CacheControl(ttl_s=600.0))
        settle(lab)
        assert not any(r.stored for r in records_of(lab.tree))
        ask(lab, ids)
        settle(lab)
        assert all(r.stored for r in records_of(lab.tree))
    with server(tmp_path) as lab:
        assert admission(ask(lab, ids)).n_cached == 59


def test_the_only_state_of_a_prompt_outlives_the_process(tmp_path: Path) -> None:
    ids = words(1, 300)  # a raw prompt: no messages, so no boundaries
    with server(tmp_path, HYBRID) as lab:
        ask(lab, ids)
    with server(tmp_path, HYBRID) as lab:
        assert admission(ask(lab, ids)).n_cached == 299


def test_nothing_is_lost_when_eviction_outruns_writing(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    prompts = [words(i, 65) for i in range(12)]
    with server(tmp_path, disk=disk, limit_nbytes=3 * 8 * 64) as lab:
        disk.stall()
        for ids in prompts[:3]:
            ask(lab, ids, 1)
        assert lab.tree.stats.dropped == {}
        held = {r.node.key for r in records_of(lab.tree) if r.arrays is not None}
        assert len(held) == len(records_of(lab.tree)), "what is being written can be resumed from"
        disk.resume()
        for ids in prompts:
            ask(lab, ids, 1)
            settle(lab)
        for ids in prompts:
            assert admission(ask(lab, ids, 1)).n_cached == 64


# --- never slower than the better way ------------------------------------------------------


def test_a_stalled_load_keeps_nobody_waiting(tmp_path: Path) -> None:
    ids = words(1, 200)
    with server(tmp_path) as lab:
        ask(lab, ids)
    disk = SlowDisk(tmp_path)
    with server(tmp_path, disk=disk, estimates=Hasty) as lab:
        disk.stall()
        outcome = ask(lab, ids)
        assert admission(outcome).n_cached == 0
        assert admission(outcome).why == "not yet loaded"
        disk.resume()


@pytest.mark.parametrize("shape", [DENSE, HYBRID, WINDOWED], ids=["dense", "hybrid", "window"])
def test_less_than_a_block_is_loaded_after_a_restart(tmp_path: Path, shape: Shape) -> None:
    """What was waited for is used, even after a few tokens that memory has."""
    ids = words(1, BLOCK - 1)
    with server(tmp_path, shape) as lab:
        ask(lab, ids, boundaries=[3])
    for before, n_computed in (([], 0), ([*ids[:3], *words(2, 3)], 3)):
        with server(tmp_path, shape) as lab:
            if before:
                ask(lab, before, 1)
            outcome = ask(lab, ids)
            assert admission(outcome).n_cached == len(ids) - 1
            assert lab.runner.n_prefilled <= n_computed
            lab.check()


def test_a_row_jumps_ahead_when_the_load_lands_first(tmp_path: Path) -> None:
    ids = words(1, 400)
    with server(tmp_path) as lab:
        ask(lab, ids)
    disk = SlowDisk(tmp_path)
    with server(tmp_path, disk=disk, estimates=Hasty) as lab:
        (tier,) = lab.tree.records.tiers

        def land(*_: object) -> None:
            if len(lab.runner.prefills) == 2:
                disk.resume()
                wait_until(lambda: tier._worker.n_results >= len(tier._reading))

        disk.stall()
        lab.runner.faults.prefill = land
        got = admission(ask(lab, ids))
        assert got.n_cached > 0
        assert got.n_cached + lab.runner.n_prefilled == 399, "each token once"
        assert set(dict(got.tiers)) == {"ssd"}


@pytest.mark.parametrize("shape", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_loads_and_computing_meet(tmp_path: Path, shape: Shape) -> None:
    """Whatever the disk does, the answer is right, and what is loaded is not computed."""
    ids = words(1, 600)
    with server(tmp_path, shape) as lab:
        ask(lab, ids, boundaries=[300])
    for latency in (0.0, 0.001, 0.01):
        disk = SlowDisk(tmp_path, latency_s=latency)
        with server(tmp_path, shape, disk=disk, estimates=Hasty) as lab:
            outcome = ask(lab, ids, boundaries=[300])
            assert admission(outcome).n_cached + lab.runner.n_prefilled == 599
            lab.check()


def test_a_tiny_load_says_nothing_of_a_large_one() -> None:
    known = Estimates()
    known.prefill.observe(0, 512, 0.1)
    known.observe_load("ssd", 50_000, 0.06)  # "hi", right after the start
    assert known.load_s("ssd", 100 << 20) < known.prefill_s(0, 1484)


# --- true reasons --------------------------------------------------------------------------


def test_reasons_are_true(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        assert admission(ask(lab, ids)).why == "cold"
        assert admission(ask(lab, ids)).why == ""
        other = ids[:50] + words(2, 50)
        assert admission(ask(lab, other)).why == "diverged at token 50"
        other = ids[:50] + words(2, 53)
        chat = other + ask(lab, other).tokens()
        assert len(chat) % BLOCK, "its end is no block's"
        reason = f"new from token {len(chat)}"
        assert admission(ask(lab, chat + words(3, 20))).why == reason
        reason = f"diverged at token {len(chat) - 1}"
        assert admission(ask(lab, chat[:-1] + words(4, 20))).why == reason
        control = CacheControl(read=False)
        assert admission(ask(lab, ids, control=control)).why == "reading off"


def test_an_evicted_prompt_says_so_and_an_unknown_one_does_not() -> None:
    with LabEngine(DENSE, cache=tree(DENSE, block=BLOCK)) as lab:
        ids = words(1, 100)
        ask(lab, ids)
        drop_memory(lab)
        assert admission(ask(lab, ids)).why == "evicted"
        assert admission(ask(lab, words(2, 100))).why == "cold"


def test_a_damaged_record_says_so(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
    with server(tmp_path) as lab:
        first = min((r for r in records_of(lab.tree)), key=lambda r: r.node.start)
        path = next(tmp_path.glob(f"??/{first.node.key.hex()}.*"))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert admission(ask(lab, ids)).why == "damaged"
        assert admission(ask(lab, ids)).why == ""


def test_exact_reuse_of_the_same_prompt_did_not_diverge() -> None:
    cache = tree(DENSE, block=BLOCK, exact_chunk=16)
    with LabEngine(DENSE, cache=cache, chunk=16) as lab:
        ids = words(1, 100)
        ask(lab, ids)
        again = admission(ask(lab, ids))
        assert (again.n_cached, again.why) == (96, "whole chunks only")


# --- every resume point --------------------------------------------------------------------


def test_a_sibling_in_memory_is_not_hidden_by_one_on_disk(tmp_path: Path) -> None:
    """A and B share a system prompt that ends inside a block; after a restart A, then B."""
    system = words(1, 4 * BLOCK + 5)
    a, b = system + words(2, 30), system + words(3, 30)
    with server(tmp_path) as lab:
        ask(lab, a)
        ask(lab, b)
    with server(tmp_path) as lab:
        ask(lab, a)
        lab.tree.records.estimates = Refusing()
        got = admission(ask(lab, b))
        assert got.n_cached >= len(system)
        assert set(dict(got.tiers)) == {"memory"}


def test_admission_does_not_evict_what_is_about_to_be_resumed() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache) as lab:
        ids = words(1, 200)
        ask(lab, ids)
    cursor = cache.open(lab_prompt([*ids, 1]), Namespace(""), CacheControl())
    cache.set_room(0)
    restored = cursor.restore()
    assert restored is not None
    assert restored.n_tokens == 200
    cursor.close(None)


# --- pins, clearing ------------------------------------------------------------------------


def test_pins_are_bounded_by_the_memory_there_is() -> None:
    cache = tree(DENSE, block=BLOCK, limit_nbytes=4000)
    with LabEngine(DENSE, cache=cache) as lab:
        for i, name in enumerate(("alice", "bob")):
            ask(lab, words(i, 120), 1, namespace=name)
        pin = partial(admin.pin, cache, cap_nbytes=1 << 30)
        lab.between_steps(lambda: pin(lab_prompt(words(0, 120)), Namespace("alice")))
        lab.between_steps(lambda: pin(lab_prompt(words(1, 120)), Namespace("bob")))
        ask(lab, words(5, 120), 1, namespace="alice")
        with pytest.raises(BadRequest, match="the limit is"):
            lab.between_steps(lambda: pin(lab_prompt(words(5, 120)), Namespace("alice")))
        lab.between_steps(lambda: cache.set_room(3000))
        lab.between_steps(lambda: check_tree(cache))


def _files(folder: Path) -> list[str]:
    """Records in a folder that is being emptied."""
    return [f for _, _, files in os.walk(folder) for f in files if f.endswith(".safetensors")]


def test_a_scan_does_not_bring_back_what_was_cleared_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cleared, real = words(1, 100), threading.Event(), SsdTier.scan
    with server(tmp_path) as lab:
        ask(lab, ids)
        settle(lab)
    assert list(tmp_path.glob("??/*.safetensors"))

    def late(self: SsdTier) -> Iterator[Any]:
        entries = list(real(self))  # read before the clear, reported after it
        assert cleared.wait(60)
        yield from entries

    monkeypatch.setattr(SsdTier, "scan", late)
    with server(tmp_path) as lab:
        lab.between_steps(lambda: admin.clear(lab.tree))
        cleared.set()
        settle(lab)
        assert admission(ask(lab, ids, control=CacheControl(write=False))).n_cached == 0
        until = time.monotonic() + 30  # on a busy machine the scan may end later
        while _files(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
    assert not list(tmp_path.glob("??/*.safetensors"))


def test_what_is_cleared_does_not_come_back_after_a_restart(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
        lab.between_steps(lambda: admin.clear(lab.tree))
        settle(lab)
        assert admission(ask(lab, ids, control=CacheControl(write=False))).n_cached == 0
    with server(tmp_path) as lab:
        assert admission(ask(lab, ids, control=CacheControl(write=False))).n_cached == 0
    assert list(tmp_path.glob("??/*.safetensors")) == []


@pytest.mark.parametrize("n_clears", [1, 2])
def test_what_is_computed_again_while_it_is_cleared_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_clears: int
) -> None:
    """A large cache is cleared little by little. Nothing but the newest is left in the end."""
    monkeypatch.setattr(records, "N_CLEARED", 1)
    ids = words(1, 100)
    with server(tmp_path) as lab:
        for i in (1, 2, 1):
            ask(lab, words(i, 100))
        settle(lab)
        for _ in range(n_clears):
            ask(lab, ids)
            lab.between_steps(lambda: admin.clear(lab.tree))
        ask(lab, ids, 1)
        while not lab.between_steps(lambda: lab.tree.settled):
            settle(lab)
    with server(tmp_path) as lab:
        assert admission(ask(lab, ids, control=CacheControl(write=False))).n_cached == 99
        other = admission(ask(lab, words(2, 100), control=CacheControl(write=False)))
        assert other.n_cached == 0
        lab.between_steps(lambda: admin.clear(lab.tree))
        settle(lab)
    assert _files(tmp_path) == []


def test_many_prompts_under_one_root_are_found_by_what_matches() -> None:
    """The lookup touches a few children, however many there are."""
    cache = tree(DENSE, block=BLOCK)
    from firn.cache.planning.match import Walk
    from firn.cache.tree import CheckpointKind
    from firn.core.values import PackedTokens

    inner, root = cache.records.tree, cache.records.catalogue.root(Namespace(""))
    rng = np.random.default_rng(3)
    for tokens in rng.integers(0, 1000, size=(2000, BLOCK)).astype(np.uint64):
        node = inner.child(root, PackedTokens(tokens), 0, BLOCK)
        inner.add(node, Part.PAGES, nbytes=1, kind=CheckpointKind.TURN)
    looked = 0
    real = type(root.children)._key

    def key(self: object, child: object) -> bytes:
        nonlocal looked
        looked += 1
        return real(self, child)  # type: ignore[arg-type]

    type(root.children)._key = key  # type: ignore[method-assign,assignment]
    try:
        Walk.of(inner, root, PackedTokens(np.arange(40, dtype=np.uint64)))
    finally:
        type(root.children)._key = real  # type: ignore[method-assign]
    assert looked < 60
