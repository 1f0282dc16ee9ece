"""The stamps that tiers evict by: what a record needs is evicted after it.

This holds in old and copied folders, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from firn.cache.admin import control as admin
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.tree import BLOCK_S, DAY_S
from firn.core.values import Namespace
from tests.cache.lab import ALL_KINDS, DENSE, HYBRID, LabEngine, Shape, nodes_of, records_of
from tests.cache.lab import prompt_of as lab_prompt
from tests.cache.test_decisions import BLOCK, admission, ask, server, settle
from tests.hash_runner import prompt_of as words
from tests.slow_disk import SlowDisk

EACH = pytest.mark.parametrize(
    "shape", [DENSE, HYBRID, ALL_KINDS], ids=["dense", "hybrid", "all kinds"]
)


def stamps(folder: Path) -> dict[str, float]:
    return {p.name.removesuffix(".safetensors"): p.stat().st_mtime for p in folder.glob("??/*")}


def needs(cache: PrefixCache) -> list[tuple[str, str]]:
    """Stored records, and what each of them needs: its own pages, or those of the block before."""
    pairs = []
    for record in (r for r in records_of(cache) if r.stored):
        node = record.node if record.part is not Part.PAGES else record.node.parent
        if node is not None and node.parent is not None:
            name = f"{record.node.key.hex()}.{record.part.value}"
            pairs.append((name, f"{node.key.hex()}.{Part.PAGES.value}"))
    return pairs


def check_stamps(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """What is needed is a step above what needs it."""
    at = stamps(folder)
    assert len(pairs) > 3
    for name, needed in pairs:
        assert at[name] <= at[needed] - BLOCK_S + 1e-6


@EACH
def test_what_a_record_needs_is_stamped_above_it(tmp_path: Path, shape: Shape) -> None:
    ids = words(1, 100)
    with server(tmp_path, shape) as lab:
        ask(lab, ids, boundaries=[40, 90])
        ask(lab, ids[:50] + words(2, 30), boundaries=[40, 70])
        settle(lab)
        pairs = needs(lab.tree)
    check_stamps(tmp_path, pairs)
    assert min(stamps(tmp_path).values()) > time.time() - 2 * DAY_S, "written before it was used"


@EACH
@pytest.mark.parametrize("order", ["upside down", "all alike"])
def test_a_copied_folder_comes_into_order(tmp_path: Path, shape: Shape, order: str) -> None:
    """A copy's files have the time of the copying; a child may be younger than its parent."""
    ids = words(1, 100)
    with server(tmp_path, shape) as lab:
        ask(lab, ids, boundaries=[40, 90])
        ask(lab, ids[:50] + words(2, 30), boundaries=[40, 70])
    latest = max(stamps(tmp_path).values())
    for path in tmp_path.glob("??/*"):
        at = 2 * latest - path.stat().st_mtime - 1000 if order == "upside down" else latest - 1000
        os.utime(path, (at, at))
    with server(tmp_path, shape) as lab:
        settle(lab)
        pairs = needs(lab.tree)
    check_stamps(tmp_path, pairs)


def test_a_use_while_it_is_being_written_counts(tmp_path: Path) -> None:
    """Its parent is used again, and stamped again, before the child's bytes are on the disk."""
    ids = words(1, 5 * BLOCK + 1)
    disk = SlowDisk(tmp_path)
    with server(tmp_path, disk=disk) as lab:
        ask(lab, ids[: 2 * BLOCK + 1], 1)
        settle(lab)
        disk.stall()
        ask(lab, ids, 1)
        ask(lab, ids, 1)
        disk.resume()
        settle(lab)
        pairs = needs(lab.tree)
    check_stamps(tmp_path, pairs)


# --- records whose parent is gone ----------------------------------------------------------


def lose_a_block(lab: LabEngine, folder: Path, start: int) -> None:
    (node,) = (n for n in nodes_of(lab.tree.records.tree) if n.start == start)
    next(folder.glob(f"??/{node.key.hex()}.pages.*")).unlink()


def test_what_lost_its_parent_is_found_again_when_that_is_computed(tmp_path: Path) -> None:
    trunk = words(1, 5 * BLOCK)
    a, b = trunk + words(2, 4 * BLOCK + 1), trunk + words(3, 2 * BLOCK)
    with server(tmp_path) as lab:
        ask(lab, a, 1)
        settle(lab)
        lose_a_block(lab, tmp_path, 3 * BLOCK)
    with server(tmp_path) as lab:
        assert admission(ask(lab, b, 1)).n_cached == 3 * BLOCK
        settle(lab)
        got = admission(ask(lab, a, 1))
        assert got.n_cached == len(a) - 1
        assert dict(got.tiers)["ssd"] == 4 * BLOCK


def test_what_lost_its_parent_is_cleared_with_the_rest(tmp_path: Path) -> None:
    ids = words(1, 10 * BLOCK)
    with server(tmp_path) as lab:
        ask(lab, ids, 1)
        settle(lab)
        lose_a_block(lab, tmp_path, 3 * BLOCK)
    with server(tmp_path) as lab:
        lab.between_steps(lambda: admin.clear(lab.tree))
        settle(lab)
    assert stamps(tmp_path) == {}


# --- pins ----------------------------------------------------------------------------------


def test_a_pin_keeps_what_is_about_to_leave(tmp_path: Path) -> None:
    """Its write may fail: the pin must not depend on it."""
    ids = words(1, 4 * BLOCK + 1)
    disk = SlowDisk(tmp_path)
    with server(tmp_path, disk=disk) as lab:
        disk.stall()
        ask(lab, ids, 1)

        def pin() -> None:
            memory = lab.tree.records.memory
            lab.tree.set_room(memory.nbytes - 1)
            assert any(r.leaving for r in records_of(lab.tree))
            lab.tree.set_room(1 << 30)
            admin.pin(lab.tree, lab_prompt([*ids, 1, 2]), Namespace(""), cap_nbytes=1 << 20)
            assert not any(r.leaving for r in records_of(lab.tree))

        lab.between_steps(pin)
        disk.resume()
        settle(lab)
        assert all(r.arrays is not None for r in records_of(lab.tree))
