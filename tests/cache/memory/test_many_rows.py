"""Many parked rows: their room goes before what they hold, and an eviction looks at few of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.core.ports import At, RowView
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.lab import check_tree, records_of

BLOCK, N_BLOCKS = 16, 8
TOKEN_NBYTES = 2 * 4
ROW_NBYTES = N_BLOCKS * BLOCK * TOKEN_NBYTES
EVERYONE = Namespace("")


def layer_of(n_tokens: int, n_room: int) -> KVCache:
    layer = KVCache()
    layer.keys, layer.values = (mx.zeros((1, 1, n_room, 4), dtype=mx.uint8) for _ in range(2))
    layer.offset = n_tokens
    return layer


@dataclass(eq=False)
class Row:
    n_tokens: int
    n_room: int
    is_live: bool = True
    layers: list[Any] = field(init=False)

    def view(self) -> RowView:
        return RowView(self.layers, At(0, self.n_tokens))

    def __post_init__(self) -> None:
        self.layers = [layer_of(self.n_tokens, self.n_room)]


def cache_of(limit_nbytes: int = 1 << 40) -> PrefixCache:
    settings = CacheSettings(limit_nbytes=limit_nbytes, block=BLOCK)
    return PrefixCache(Layout.of([layer_of(1, 1)]), settings, fingerprint=b"", dtype="u8")


def talk(cache: PrefixCache, seed: int, *, room: float = 1.0) -> Prompt:
    """A conversation that is computed and parked. room: of its buffers, as a share of its tokens."""
    n = N_BLOCKS * BLOCK
    prompt = Prompt(np.random.default_rng(seed).integers(0, 100_000, n + 1))
    cursor = cache.open(prompt, EVERYONE, CacheControl())
    cursor.restore()
    row = Row(n, int(n * room))
    cursor.commit(row)
    cursor.close(row)
    row.is_live = False
    return prompt


def n_cached(cache: PrefixCache, prompt: Prompt) -> int:
    cursor = cache.open(prompt, EVERYONE, CacheControl(write=False))
    cursor.restore()
    cursor.close(None)
    return cursor.admission.n_cached


def n_calls(work: Callable[[], object]) -> int:
    """How many functions this calls."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def evict(cache: PrefixCache, n_blocks: int) -> None:
    """Evict so many blocks more, one after the other."""

    def so_far() -> int:
        return cache.stats.evictions[Part.PAGES.value]

    before = so_far()
    while so_far() < before + n_blocks:
        cache.set_room(cache.records.memory.nbytes - 1)


def test_to_evict_a_record_costs_the_same_however_many_rows_are_parked() -> None:
    few, many = cache_of(), cache_of()
    for i in range(25):
        talk(few, i)
    for i in range(400):
        talk(many, i)
    n_few, n_many = (n_calls(partial(evict, cache, 24)) for cache in (few, many))
    assert n_many < 2 * n_few
    check_tree(many)


def test_to_drop_every_row_costs_the_same_for_each() -> None:
    """As when the device has no memory to copy anything out of them."""
    few, many = cache_of(), cache_of()
    for i in range(25):
        talk(few, i)
    for i in range(200):
        talk(many, i)
    n_few, n_many = (n_calls(cache.parking.drop_all) for cache in (few, many))
    assert n_many < 1.2 * n_few * 200 / 25
    assert many.records.memory.nbytes == 0
    check_tree(many)


def test_room_of_parked_rows_goes_before_what_they_hold() -> None:
    """Each row has a fifth more room than it uses: too little to be trimmed without need."""
    cache = cache_of(10 * ROW_NBYTES)
    prompts = [talk(cache, i, room=1.2) for i in range(8)]
    cache.set_room(10 * ROW_NBYTES)
    assert cache.records.memory.nbytes > 9 * ROW_NBYTES
    for i in (8, 9):
        prompts.append(talk(cache, i, room=1.2))
        cache.set_room(10 * ROW_NBYTES)
        assert cache.records.memory.nbytes <= 10 * ROW_NBYTES
    assert not cache.stats.evictions
    assert all(n_cached(cache, prompt) == N_BLOCKS * BLOCK for prompt in prompts)
    check_tree(cache)


def test_the_last_used_row_keeps_its_room() -> None:
    cache = cache_of()
    for i in range(4):
        talk(cache, i, room=1.2)
    first, *_, last = cache.records.rows.parked
    cache.set_room(cache.records.memory.nbytes - 1)
    assert first.slab is not None
    assert last.slab is not None
    assert first.slab.n_room == N_BLOCKS * BLOCK
    assert last.slab.n_room > N_BLOCKS * BLOCK


def test_a_full_memory_holds_what_it_may() -> None:
    cache = cache_of(20 * ROW_NBYTES)
    for i in range(60):
        talk(cache, i, room=1.2)
        cache.set_room(20 * ROW_NBYTES)
    assert cache.records.memory.nbytes <= 20 * ROW_NBYTES
    held = sum(r.nbytes for r in records_of(cache) if r.arrays is not None)
    assert held > 0.9 * 20 * ROW_NBYTES
    check_tree(cache)


def test_a_row_that_gives_everything_is_not_copied_on_the_way() -> None:
    cache = cache_of()
    for i in range(3):
        talk(cache, i)
    first, *others = cache.records.rows.parked
    assert first.slab is not None
    before = first.slab.layers[0][0]
    cache.set_room(2 * ROW_NBYTES)
    assert list(cache.records.rows.parked) == others
    assert first.slab is None
    assert before is not None
    assert all(p.slab is not None and p.slab.n_room == N_BLOCKS * BLOCK for p in others)


def test_what_rows_take_is_right_after_a_namespace_is_cleared() -> None:
    cache = cache_of()
    for i in range(3):
        talk(cache, i, room=1.2)
    assert cache.records.memory.nbytes > 3 * ROW_NBYTES
    cache.records.clear(EVERYONE)
    assert cache.records.memory.nbytes == 0
    talk(cache, 7)
    assert cache.records.memory.nbytes == ROW_NBYTES
