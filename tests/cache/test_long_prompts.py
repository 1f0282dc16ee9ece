"""Prompts longer than memory, of models whose blocks are cut out of the row immediately."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firn.cache import records
from firn.cache.admin import control as admin
from firn.cache.prefix import PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.lab import (
    ALL_KINDS,
    DENSE,
    HYBRID,
    WINDOWED,
    LabLayer,
    LabRow,
    Shape,
    records_of,
    tree,
)
from tests.cache.test_decisions import admission, ask, server, settle
from tests.dict_tier import DictTier
from tests.hash_runner import prompt_of as words

BLOCK = 8
N = 200
NS = Namespace("")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long for a write."""
    monkeypatch.setattr(records, "WRITE_WAIT_S", 30.0)


@pytest.mark.parametrize(
    ("shape", "limit_nbytes"),
    [(DENSE, 400), (WINDOWED, 800), (HYBRID, 2000), (ALL_KINDS, 2400)],
    ids=["dense", "window", "hybrid", "all"],
)
def test_a_prompt_that_is_longer_than_memory_is_stored_to_its_end(
    tmp_path: Path, shape: Shape, limit_nbytes: int
) -> None:
    ids = words(1, N)
    with server(tmp_path, shape, limit_nbytes=limit_nbytes) as lab:
        ask(lab, ids)
        settle(lab)
        counted = lab.between_steps(lambda: admin.stats(lab.tree, None))
        assert counted["dropped"] == {}
        assert counted["memory"]["used_bytes"] <= limit_nbytes
        assert counted["ssd"]["used_bytes"] > limit_nbytes
        lab.check()
    with server(tmp_path, shape) as lab:
        assert dict(admission(ask(lab, ids)).tiers) == {"ssd": N - 1}


def opened(stored: dict[str, bytes], *, limit_nbytes: int) -> PrefixCache:
    cache = tree(DENSE, block=BLOCK, limit_nbytes=limit_nbytes)
    io = TierWorker(DictTier(1 << 20, stored), n_threads=1)
    cache.add_tier("ssd", io, namespaces=[NS])
    return cache


def test_a_device_in_doubt_takes_back_what_had_to_leave_memory() -> None:
    stored: dict[str, bytes] = {}
    cache = opened(stored, limit_nbytes=300)
    cache.confirm()  # from now on, commits wait for a confirm
    ids = words(1, 81)
    cursor = cache.open(Prompt(np.array(ids, dtype=np.int64)), NS, CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    for start in range(0, 80, 16):
        row.consume(ids[start : start + 16])
        cursor.commit(row)
    assert len(stored) > 4, "written before it was confirmed: there was no room for more"
    cache.discard_unconfirmed()
    cursor.close(None)
    assert records_of(cache) == []
    for _ in range(3):
        cache.tick(EngineLoad.NONE)
    cache.close()
    assert stored == {}


def test_what_another_request_leads_to_stays_in_memory() -> None:
    cache = opened({}, limit_nbytes=600)
    ids = words(1, 161)
    prompt = Prompt(np.array(ids, dtype=np.int64))
    first, row = cache.open(prompt, NS, CacheControl()), LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:64])
    first.commit(row)
    in_use = [r for r in records_of(cache) if r.arrays is not None]
    other = cache.open(prompt, NS, CacheControl())
    assert other.restore() is not None
    row.consume(ids[64:160])
    first.commit(row)
    assert all(r.arrays is not None for r in in_use), "the other request may be about to fill a row"
    for cursor in (first, other):
        cursor.close(None)
    cache.close()
