"""Tests a shared store: one small record is written, read and deleted.

For people who set one up (`firn doctor`). The server does not need this: a store that fails only
costs hits.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass

from firn.cache.storage.faults import TierError
from firn.cache.tiers import Store

PROBE_NBYTES = 1 << 20
N_QUESTIONS = 5
"""Lookups made; the reported time is their median."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What the probe saw, or which step failed."""

    failed: str = ""
    """The step that failed: ask, write, read or delete; '': none."""
    error: TierError | None = None
    answer_s: float = 0.0
    """How long the store takes to report that a record is missing."""
    write_s: float = 0.0
    read_s: float = 0.0
    """Both times are for PROBE_NBYTES."""
    same_bytes: bool = False
    """Whether the bytes read are those that were written."""
    writes_once: bool = False
    """Whether the store kept the first record of a name and refused the second."""


def probe(store: Store) -> StoreReport:
    """Each call takes at most the store's deadline. Leaves nothing behind if it may delete."""
    name = f"{os.urandom(32).hex()}.probe"
    data, other = os.urandom(PROBE_NBYTES), os.urandom(PROBE_NBYTES)
    answers: list[float] = []
    step = "ask"
    try:
        for _ in range(N_QUESTIONS):
            began = time.perf_counter()
            store.find([name])
            answers.append(time.perf_counter() - began)
        step, began = "write", time.perf_counter()
        store.write(name, [data], used_at=time.time())
        write_s = time.perf_counter() - began
        writes_once = not store.write(name, [other], used_at=time.time()).new
        step, began = "read", time.perf_counter()
        read = store.read(name)
        read_s = time.perf_counter() - began
        step = "delete"
        store.delete(name)
    except TierError as error:
        if step != "ask":
            with suppress(TierError):
                store.delete(name)
        return StoreReport(step, error)
    kept = data if writes_once else other
    return StoreReport(
        answer_s=statistics.median(answers),
        write_s=write_s,
        read_s=read_s,
        same_bytes=read == kept,
        writes_once=writes_once,
    )
