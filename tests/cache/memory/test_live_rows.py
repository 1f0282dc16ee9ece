"""A conversation's pages are held once, in its row: as it runs, once it ends, and as it goes on."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from firn.cache.memory import parking
from firn.cache.memory.rows import LEAST_BLOCKS, RowPages, Slab
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.cache.tree import InRow
from firn.core.errors import TokensNotHeld
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.lab import (
    IN_ROWS,
    LabEngine,
    LabLayer,
    LabRow,
    prompt_of,
    records_of,
    tree,
)
from tests.cache.tiny import Build, Reference, cold_and_warm, tiny, tokens
from tests.harness import Harness, Result, running
from tests.hash_runner import Faults
from tests.hash_runner import prompt_of as words

BLOCK = 32


def past(n_layers: int, dim: int) -> Build:
    """A model whose memory is mostly keys and values."""
    return tiny(
        "llama",
        num_hidden_layers=n_layers,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=dim,
    )


DEEP, WIDE = past(8, 128), past(4, 256)
"""Both have the same bytes per token. Where peak memory is measured, a layer that grows must be a
small part of the whole, so DEEP is used; elsewhere WIDE, with half the layers, is half the work."""
TOKEN_NBYTES = 8 * 128 * 2 * 4


def parked(harness: Harness) -> list[RowPages]:
    return harness.between_steps(lambda: list(harness.cache.records.rows.parked))


def addresses(pages: RowPages) -> list[int]:
    """The addresses of the buffers."""
    assert pages.slab is not None
    arrays = [a for layer in pages.slab.layers for a in layer if a is not None]
    return [np.array(a, copy=False).ctypes.data for a in arrays]


def said(result: Result) -> list[int]:
    assert result.error is None
    return result.reply


# --- memory --------------------------------------------------------------------------------


def test_six_turns_take_their_memory_once() -> None:
    with running(DEEP, chunk=BLOCK, block=BLOCK) as harness:
        harness.ask(tokens(9, 40), 4)
        before = harness.between_steps(mx.get_active_memory)
        ids: list[int] = []
        for turn in range(6):
            ids += tokens(turn, 320)
            mx.reset_peak_memory()
            result = harness.ask(ids, 20)
            assert result.n_cached == max(len(ids) - 320, 0)
            ids += result.reply
        kv = len(ids) * TOKEN_NBYTES
        assert mx.get_peak_memory() - before < 1.5 * kv
        held = harness.between_steps(mx.get_active_memory) - before
        assert held < 1.3 * kv
        assert harness.cache.records.memory.nbytes < 1.3 * kv + (1 << 20)
        assert not harness.cache.stats.faults


def test_the_next_turn_goes_on_in_the_same_buffers() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        ids = tokens(1, 400)
        ids += harness.ask(ids, 20).reply
        (before,) = parked(harness)
        prompt = Prompt(np.array([*ids, *tokens(2, 10)], dtype=np.int64))

        def take_over() -> list[list[int]]:
            cache, runner = harness.cache, harness.runner
            where = addresses(before)
            cursor = cache.open(prompt, Namespace(""), CacheControl())
            restored = cursor.restore()
            assert restored is not None
            assert (restored.n_tokens, restored.nbytes) == (len(ids), 0)
            mx.reset_peak_memory()
            n_before = mx.get_active_memory()
            row = runner.start(restored)
            taken = [
                np.array(a, copy=False).ctypes.data
                for layer in row.layers
                for a in (layer.keys, layer.values)
            ]
            cursor.filled(row)
            assert mx.get_peak_memory() <= n_before, "nothing was allocated"
            cursor.close(row)
            runner.leave([row])
            return [where, taken, addresses(before)]

        first, second, third = harness.between_steps(take_over)
        assert first == second == third
        assert harness.ask(prompt, 4).n_cached == len(ids)
        assert not harness.cache.stats.faults


def test_a_row_of_a_group_is_copied_out_of_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has room for the next turn, which goes on in it. Where blocks are much smaller, so is
    what may stay unused, and the room is trimmed."""
    real, n_copied = parking.concat_tokens, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_copied
        n_copied += 1
        return real(*args, **options)

    monkeypatch.setattr(parking, "concat_tokens", counted)
    with cold_and_warm(WIDE, chunk=128, block=128) as (cold, warm):
        want, gate = Reference(cold), threading.Event()
        prompts = [tokens(i, 600 + 30 * i) for i in range(3)]
        warm.engine.call(lambda _: gate.wait(60))
        asked = [warm.submit(ids, 12 + 8 * i) for i, ids in enumerate(prompts)]
        gate.set()
        replies = [said(a.wait()) for a in asked]
        *copies, last = parked(warm)
        where = warm.between_steps(lambda: [addresses(pages) for pages in copies])
        assert len(where) == 2, "the last row was alone again when it ended"
        for i, (ids, reply) in enumerate(zip(prompts, replies, strict=True)):
            assert reply == said(want(ids, 12 + 8 * i))
            again = [*ids, *reply, *tokens(50 + i, 9)]
            result = warm.ask(again, 6)
            assert result.n_cached >= len(again) - 10, "the last token may not have been consumed"
            assert said(result) == said(want(again, 6))
        assert parked(warm) == [*copies, last]
        assert warm.between_steps(lambda: [addresses(pages) for pages in copies]) == where
        assert n_copied == 2 * 4, "of each row, its four layers"


def test_a_prompt_given_up_early_leaves_no_room_for_the_rest() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        harness.ask(tokens(9, 40), 4)
        before = harness.between_steps(mx.get_active_memory)
        result = harness.submit(tokens(1, 6000), 4)
        while harness.cache.records.rows.live == {}:
            time.sleep(0.001)
        (request,) = [i for i, r in harness.results.items() if r is result]
        harness.engine.cancel(request)
        held = harness.between_steps(mx.get_active_memory) - before
        n_kept = sum(p.end for p in parked(harness))
        assert held < (n_kept + 12 * BLOCK) * TOKEN_NBYTES


# --- who else ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_5", "deepseek_v32"])
def test_a_second_user_of_a_prefix_that_is_being_decoded(name: str) -> None:
    shared = tokens(1, 200)
    with cold_and_warm(tiny(name), chunk=BLOCK, block=BLOCK) as (cold, warm):
        want = Reference(cold)
        first = warm.submit([*shared, 5], 60, boundaries=[200])
        while not first.tokens:
            time.sleep(0.001)
        others = [warm.submit([*shared, 6 + i], 8, boundaries=[200]) for i in range(3)]
        for i, other in enumerate(others):
            assert said(other.wait()) == said(want([*shared, 6 + i], 8))
            assert other.n_cached >= 190
        assert said(first.wait()) == said(want([*shared, 5], 60))
        assert not warm.cache.stats.faults


def test_a_row_that_is_taken_over_leaves_what_it_said_before() -> None:
    """The next turn differs in the reply, as when a template drops the thinking."""
    with cold_and_warm(WIDE, chunk=BLOCK, block=BLOCK) as (cold, warm):
        want = Reference(cold)
        ids = tokens(1, 300)
        reply = said(warm.ask(ids, 60))
        short = [*ids, *reply[:10], *tokens(2, 15)]
        result = warm.ask(short, 6)
        assert result.n_cached == 310
        assert said(result) == said(want(short, 6))
        whole = [*ids, *reply, *tokens(3, 15)]
        result = warm.ask(whole, 6)
        assert result.n_cached == 360, "it was cut out before it was overwritten"
        assert said(result) == said(want(whole, 6))


def test_a_short_common_prefix_is_copied_and_the_long_row_stays() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        system, story = tokens(1, 160), tokens(2, 600)
        ids = [*system, *story]
        ids += harness.ask(ids, 10).reply
        (row,) = parked(harness)
        where = harness.between_steps(lambda: addresses(row))
        assert harness.ask([*system, *tokens(3, 40)], 5).n_cached == 160
        assert row in parked(harness)
        assert harness.between_steps(lambda: addresses(row)) == where
        assert harness.ask([*ids, 7, 8], 5).n_cached == len(ids)


def test_who_may_not_write_gives_back_what_it_took_over() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        ids = tokens(1, 300)
        ids += harness.ask(ids, 20).reply
        reader = CacheControl(write=False)
        assert harness.ask([*ids, *tokens(2, 9)], 6, control=reader).n_cached == len(ids)
        assert harness.ask([*ids, *tokens(3, 9)], 6).n_cached == len(ids)


def test_exact_mode_cuts_records_at_once() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK, exact=True) as harness:
        harness.ask(tokens(1, 300), 6)
        held = harness.between_steps(lambda: records_of(harness.cache))
        assert held
        assert not any(isinstance(r.arrays, InRow) for r in held)


# --- pressure ------------------------------------------------------------------------------


def test_parked_rows_give_way_like_everything_else() -> None:
    limit = 1000 * TOKEN_NBYTES
    with cold_and_warm(WIDE, chunk=BLOCK, block=BLOCK, cache_nbytes=limit) as (cold, warm):
        want = Reference(cold)
        chats = [tokens(i, 260) for i in range(6)]
        for _ in range(2):
            for ids in chats:
                result = warm.ask(ids, 8)
                assert said(result) == said(want(ids, 8))
                ids += [*result.reply, *tokens(sum(ids), 12)]
                held = warm.between_steps(lambda: warm.cache.records.memory.nbytes)
                assert held <= limit
        assert sum(warm.cache.stats.evictions.values())
        assert not warm.cache.stats.faults
        newest = chats[-1]
        assert warm.ask(newest, 4).n_cached >= len(newest) - 12, "the last that were used stayed"


def test_what_parked_rows_hold_twice_goes_first() -> None:
    """A long system prompt and a little of each conversation: all fit, but not as whole rows."""
    system = tokens(1, 10 * BLOCK)
    limit = (len(system) + 9 * BLOCK + 4 * 6 * BLOCK) * TOKEN_NBYTES
    with cold_and_warm(WIDE, chunk=BLOCK, block=BLOCK, cache_nbytes=limit) as (cold, warm):
        chats = [[*system, *tokens(10 + i, 3 * BLOCK)] for i in range(4)]
        for ids in chats:
            ids += warm.ask(ids, 8).reply
        cut_off = 0
        for ids in chats * 2:
            result = warm.ask([*ids, 9], 4)
            assert result.n_cached == len(ids)
            assert said(result) == said(cold.ask([*ids, 9], 4)), "what is left is not taken for all"
            cut_off += sum(p.slab is not None and p.slab.first > 0 for p in parked(warm))
        assert cut_off
        assert not warm.cache.stats.evictions[Part.PAGES.value]
        assert not warm.cache.stats.faults


def test_all_is_there_after_a_restart(tmp_path: Path) -> None:
    def folder() -> SsdTier:
        return SsdTier(TierOptions(str(tmp_path), 1 << 30))

    options: dict[str, Any] = {"chunk": BLOCK, "block": BLOCK}
    chats = [tokens(i, 250 + 40 * i) for i in range(3)]
    with running(WIDE, tier=folder(), **options) as harness:
        for ids in chats:
            ids += harness.ask(ids, 20).reply
        chats[0] += tokens(7, 20)
        chats[0] += harness.ask(chats[0], 20).reply
    with running(WIDE, **options) as plain, running(WIDE, tier=folder(), **options) as harness:
        for ids in chats:
            result = harness.ask([*ids, 4, 5, 6], 6)
            assert result.tiers == {"ssd": len(ids)}
            assert said(result) == said(plain.ask([*ids, 4, 5, 6], 6))
        held = harness.between_steps(lambda: records_of(harness.cache))
        alone = [r for r in held if r.part is Part.PAGES and r.arrays is not None]
        assert all(isinstance(r.arrays, RowPages) for r in alone), "and lies in the rows alone"


# --- faults --------------------------------------------------------------------------------


def test_what_lay_in_a_row_that_failed_is_not_resumed() -> None:
    faults = Faults()
    with LabEngine(IN_ROWS, faults, cache=tree(IN_ROWS), chunk=16) as lab:
        ids = words(1, 120)

        def fail(rows: Any) -> None:
            faults.launch = lambda rows: None
            raise ValueError("a kernel that does not compile")

        faults.launch = fail
        lab.submit(ids, 8).wait().check()
        assert lab.tree.stats.dropped["in doubt"]
        lab.submit([*ids, 3], 8).wait().check()
        lab.check()


def test_a_neighbours_row_takes_over_what_a_failed_one_shared() -> None:
    """The second has copied the first's prefix, so the chain of its own blocks stays whole."""
    faults = Faults()
    with LabEngine(IN_ROWS, faults, cache=tree(IN_ROWS), chunk=16, group_rows=1) as lab:
        shared = words(1, 80)
        first = lab.submit([*shared, 1], 400)
        while len(first.tokens()) < 4:
            lab.between_steps()
        second = lab.submit([*shared, 2, *words(2, 40)], 400)
        while len(second.tokens()) < 20:
            lab.between_steps()

        def fail(rows: Any) -> None:
            if rows[0].job.id == first.job.id:
                faults.launch = lambda rows: None
                raise ValueError("a kernel that does not compile")

        faults.launch = fail
        for outcome in (first, second):
            outcome.wait().check()
        third = lab.submit([*shared, 3], 4).wait()
        third.check()
        assert third.n_cached == 80
        lab.check()


def test_a_row_that_fails_while_it_is_trimmed_is_forgotten() -> None:
    """By then some of its layers are trimmed, and others are not."""
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        ids = tokens(1, 300)
        harness.ask(ids, 10)
        (row,) = parked(harness)

        def fail() -> None:
            assert row.slab is not None
            row.slab.layers[2] = (mx.zeros((1,)), mx.zeros((1,)))
            harness.cache.set_room(harness.cache.records.memory.nbytes // 2)
            harness.cache.set_room(1 << 30)

        harness.between_steps(fail)
        assert harness.cache.stats.faults["room"] == 1
        result = harness.ask(ids, 10)
        assert result.n_cached == 0
        assert parked(harness) != [row]


def opened_row(cache: PrefixCache, ids: list[int]) -> tuple[Any, LabRow]:
    """A request's cursor, and its row, filled with what the cache had."""
    cursor = cache.open(prompt_of(ids), Namespace(""), CacheControl())
    restored = cursor.restore()
    row = LabRow(LabLayer([[]], IN_ROWS))
    if restored is not None:
        restored.fill([row.layer])
        row.n_tokens = restored.n_tokens
        cursor.filled(row)
    return cursor, row


def test_a_row_that_was_written_to_before_a_fault_is_not_trusted_with_what_was_confirmed() -> None:
    """The second turn went on in the buffers of the first: the fault may have spoilt all of them."""
    cache, ids = tree(IN_ROWS, block=8), words(1, 90)
    cache.confirm()
    cursor, row = opened_row(cache, ids[:60])
    row.consume(ids[:59])
    cursor.commit(row)
    cursor.close(row)
    cache.confirm()
    cursor, row = opened_row(cache, ids)
    assert row.n_tokens == 59
    row.consume(ids[row.n_tokens : 89])
    cursor.commit(row)
    cursor.close(row)
    assert cache.records.rows.parked
    cache.discard_unconfirmed()
    assert not cache.records.rows.parked
    cursor, row = opened_row(cache, ids)
    assert row.n_tokens == 0
    cursor.close(None)


def test_what_a_live_row_holds_too_takes_no_memory() -> None:
    """Another conversation with the same beginning is under way: the parked one gives that up, and
    nothing else."""
    cache, system = tree(IN_ROWS, block=8), words(1, 80)
    one, other = [*system, *words(2, 80)], [*system, *words(3, 80)]
    cursor, row = opened_row(cache, one)
    row.consume(one)
    cursor.close(row)
    nbytes = cache.records.memory.nbytes
    cursor, row = opened_row(cache, other)
    assert row.n_tokens == 80
    (pages,) = cache.records.rows.parked
    cache.set_room(nbytes)
    assert pages.slab is not None
    assert pages.slab.first == 0, "there is room: it stays whole"
    cache.set_room(nbytes * 6 // 10)
    assert cache.records.memory.nbytes <= nbytes * 6 // 10
    assert not cache.stats.evictions
    row.consume(other[80:])
    cursor.close(row)
    assert len(cache.records.rows.parked) == 2
    for ids in (one, other):
        cursor, row = opened_row(cache, [*ids, 3])
        assert row.n_tokens == 160
        cursor.close(None)


def test_of_rows_that_hold_the_same_the_one_parked_last_keeps_it() -> None:
    """Records of its own before and after what another row holds would keep all between them."""
    cache, system = tree(IN_ROWS, block=8), words(1, 80)
    rows, chats = [], [[*system, *words(i, 80)] for i in (2, 3)]
    for ids in chats:
        rows.append(opened_row(cache, ids))
    for n in (40, 80):  # side by side, so that each has computed a part of the beginning
        for (cursor, row), ids in zip(rows, chats, strict=True):
            row.consume(ids[row.n_tokens : n])
            cursor.commit(row)
        rows.reverse()
        chats.reverse()
    for (cursor, row), ids in zip(rows, chats, strict=True):
        row.consume(ids[row.n_tokens :])
        cursor.close(row)
    first, last = cache.records.rows.parked
    assert first.records
    assert last.records
    cache.set_room(cache.records.memory.nbytes * 8 // 10)
    assert not cache.stats.evictions
    assert (first.first, last.first) == (80, 0)


def test_a_live_row_is_not_evicted() -> None:
    """Its memory belongs to the request: eviction would free nothing and cost the next turn."""
    cache, ids = tree(IN_ROWS, block=8), words(1, 90)
    cursor, row = opened_row(cache, ids)
    row.consume(ids[:89])
    cursor.commit(row)
    n_records = len(records_of(cache))
    assert n_records == 11
    cache.set_room(0)
    assert len(records_of(cache)) == n_records
    assert not cache.stats.evictions
    cache.set_room(1 << 30)
    cursor.close(row)
    cursor, row = opened_row(cache, ids)
    assert row.n_tokens == 89
    cursor.close(None)


def test_what_others_need_of_a_row_that_is_taken_over_stays() -> None:
    """Pinned blocks beyond the point where a shorter turn continues are cut out, room or not."""
    cache, ids = tree(IN_ROWS, block=8), words(1, 162)
    cursor, row = opened_row(cache, ids)
    row.consume(ids[:161])
    cursor.commit(row)
    cursor.close(row)
    (end,) = [r.node for r in records_of(cache) if r.node.end == 152]
    cache.records.pin(end)
    cache.set_room(0)
    assert cache.records.rows.parked
    cursor, row = opened_row(cache, [*ids[:130], *words(2, 20)])
    assert row.n_tokens == 130
    cursor.close(row)
    blocks = [n for n in end.path() if n.n_tokens == 8]
    assert len(blocks) == 19
    assert all(n.records[Part.PAGES].arrays is not None for n in blocks)


def test_nobody_holds_on_to_a_row_that_was_given_up_or_left_for_another() -> None:
    """A draft model's rows never leave a runner, so the cache must not keep them alive."""
    cache = tree(IN_ROWS, block=8)
    rows = cache.records.rows
    opened = partial(opened_row, cache)
    ids = words(1, 90)
    slow, slow_row = opened(ids)
    slow_row.consume(ids[:16])
    slow.commit(slow_row)
    fast, fast_row = opened(ids)
    fast_row.consume(ids[fast_row.n_tokens : 64])
    fast.commit(fast_row)
    ahead = slow.advance(slow_row.n_tokens)
    assert ahead is not None
    next_row = LabRow(LabLayer([[]], IN_ROWS))
    ahead.fill([next_row.layer])
    next_row.n_tokens = ahead.n_tokens
    slow.filled(next_row)
    assert set(rows.live) == {next_row, fast_row}
    fast.close(None)
    assert set(rows.live) == {next_row}
    slow.close(next_row)
    assert rows.live == {}
    assert rows.parked
    cursor, row = opened([*ids, 3])
    assert row.n_tokens == 64, "what the one that was given up had computed, the other had copied"
    cursor.close(row)


def test_a_parked_row_gives_only_what_it_holds() -> None:
    """A slice past its end would be shorter than asked for, without a word."""
    slab = Slab([(mx.zeros((1, 1, 32, 4)),)], 8, 24)
    assert slab.views(8, 24)[0][0].shape == (1, 1, 16, 4)
    for start, end in [(0, 16), (16, 32)]:
        with pytest.raises(TokensNotHeld):
            slab.views(start, end)


def test_only_long_rows_are_parked() -> None:
    with running(WIDE, chunk=BLOCK, block=BLOCK) as harness:
        ids = tokens(1, (LEAST_BLOCKS - 1) * BLOCK)
        ids += harness.ask(ids, 10).reply
        assert parked(harness) == []
        assert harness.ask([*ids, 3], 4).n_cached == len(ids)
