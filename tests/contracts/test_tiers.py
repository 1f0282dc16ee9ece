"""What every storage tier owes the cache. A new file in cache/tiers/ is tested by being there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from firn.cache.faults import Damaged, Missing, Refused, TierFull
from firn.cache.parts import Part
from firn.cache.tiers import Entry, Name, Tier, discover
from firn.core.keys import Key
from tests.cache.tiers.records import Record, assert_same, beside, chain, holds, of_size, record

MIB = 1 << 20
OpenTier = Callable[[int], Tier]

every_tier = pytest.mark.parametrize("kind", sorted(discover()))


@pytest.fixture
def opened(kind: str, tmp_path: Path) -> OpenTier:
    return lambda limit_nbytes: discover()[kind](tmp_path / "tier", limit_nbytes)


def write_all(tier: Tier, records: list[Record]) -> None:
    for one in records:
        tier.write(one.header, one.buffers)


def test_all_are_found() -> None:
    assert {"memory", "ssd"} <= set(discover())


@every_tier
def test_what_is_written_is_read(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    one = record()
    stored = tier.write(one.header, one.buffers)
    assert stored.new
    assert stored.nbytes > 0
    assert stored.evicted == ()
    loaded = tier.read(one.name, one.header.tokens)
    assert_same(loaded.header, one.header)
    assert [bytes(b) for b in loaded.buffers] == one.buffers
    assert tier.read(one.name).header == one.header


@every_tier
def test_parts_of_a_block_are_records_of_their_own(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    pages = record()
    state = beside(pages, Part.STATE)
    write_all(tier, [pages, state])
    tier.delete(pages.name)
    assert not holds(tier, pages)
    assert holds(tier, state)


@every_tier
def test_writing_it_again_changes_nothing(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    one = record()
    tier.write(one.header, one.buffers)
    before = tier.usage()
    again = tier.write(one.header, one.buffers)
    assert not again.new
    after = tier.usage()
    assert after.nbytes == before.nbytes
    assert after.counts["writes"] == before.counts["writes"] == 1
    assert holds(tier, one)


@every_tier
def test_what_is_not_there_is_missing(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    with pytest.raises(Missing):
        tier.read(Name(Key(b"\1" * 32), Part.PAGES))
    tier.delete(Name(Key(b"\1" * 32), Part.PAGES))
    tier.touch([Name(Key(b"\1" * 32), Part.PAGES)])
    assert list(tier.scan()) == []


@every_tier
def test_other_tokens_under_the_same_name_are_not_served(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    one = record()
    tier.write(one.header, one.buffers)
    with pytest.raises(Damaged):
        tier.read(one.name, np.arange(99, dtype=np.uint64))
    assert not holds(tier, one)


@every_tier
def test_a_scan_tells_everything_once(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    records = chain(5)
    write_all(tier, records)
    found = [e for e in tier.scan() if isinstance(e, Entry)]
    # A tier that lives in this process need not tell what its caller wrote.
    assert {e.name for e in found} <= {r.name for r in records}
    for entry in found:
        one = next(r for r in records if r.name == entry.name)
        assert np.array_equal(entry.label.tokens, one.header.tokens)
        assert entry.label.parent == one.header.parent
        assert entry.nbytes > 0
    assert list(tier.scan()) == []


@every_tier
def test_no_record_without_its_parent(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    first, second, third = chain(3)
    with pytest.raises(Refused) as caught:
        tier.write(second.header, second.buffers)
    assert caught.value.reason == "no parent"
    assert tier.usage().drops == {"no parent": 1}
    write_all(tier, [first, second, third])
    assert tier.usage().n_orphans == 0


@every_tier
def test_the_limit_holds_and_the_least_recently_used_goes(opened: OpenTier) -> None:
    limit = 4 * MIB
    tier = opened(limit)
    gone: set[Name] = set()
    records = [of_size(300_000, i) for i in range(40)]
    for one in records:
        stored = tier.write(one.header, one.buffers)
        gone |= set(stored.evicted)
        assert tier.usage().nbytes <= limit
    kept = [r for r in records if r.name not in gone]
    assert kept == records[-len(kept) :]
    assert 8 <= len(kept) <= 14
    assert all(holds(tier, r) for r in kept)
    assert not any(holds(tier, r) for r in records if r.name in gone)
    assert tier.usage().counts["evictions"] == len(gone)


@every_tier
def test_what_was_used_stays(opened: OpenTier) -> None:
    tier = opened(4 * MIB)
    used, *others = [of_size(300_000, i) for i in range(40)]
    tier.write(used.header, used.buffers)
    for one in others:
        tier.touch([used.name])
        tier.write(one.header, one.buffers)
    assert holds(tier, used)


@every_tier
def test_a_chain_goes_from_its_end(opened: OpenTier) -> None:
    tier = opened(4 * MIB)
    old = chain(6, nbytes=300_000)
    write_all(tier, old)
    for i in range(30):
        one = of_size(300_000, 100 + i)
        tier.write(one.header, one.buffers)
        there = [holds(tier, r) for r in old]
        assert there == sorted(there, reverse=True), "a parent went before its child"
        assert tier.usage().n_orphans == 0
    assert not any(there)


@every_tier
def test_a_long_chain_does_not_eat_its_own_head(opened: OpenTier) -> None:
    tier = opened(4 * MIB)
    records = chain(30, nbytes=300_000)
    n_written = 0
    with contextlib.suppress(TierFull):
        for one in records:
            tier.write(one.header, one.buffers)
            n_written += 1
    assert 8 < n_written < 30
    assert all(holds(tier, r) for r in records[:n_written])
    with pytest.raises(Refused):
        tier.write(records[n_written + 1].header, records[n_written + 1].buffers)


@every_tier
def test_too_large_a_record_is_refused_and_costs_nothing(opened: OpenTier) -> None:
    tier = opened(2 * MIB)
    small = of_size(100_000)
    tier.write(small.header, small.buffers)
    huge = of_size(3 * MIB, 1)
    with pytest.raises(TierFull):
        tier.write(huge.header, huge.buffers)
    assert holds(tier, small)
    assert tier.usage().drops == {"full": 1}


@every_tier
def test_counts_add_up(opened: OpenTier) -> None:
    tier = opened(64 * MIB)
    records = chain(4)
    write_all(tier, records)
    state = beside(records[3], Part.STATE)
    tier.write(state.header, state.buffers)
    assert holds(tier, records[0])
    tier.delete(records[3].name)
    assert not holds(tier, records[3])
    usage = tier.usage()
    assert usage.n_files == {Part.PAGES: 3, Part.WINDOW: 0, Part.STATE: 1}
    assert usage.part_nbytes[Part.PAGES] > 0
    assert usage.status.state == "ok"
    assert usage.counts["writes"] == 5
    assert usage.counts["reads"] == 1
    assert usage.counts["missing"] == 1
    assert usage.counts["deletes"] == 1
    assert usage.counts["bytes_read"] == sum(len(b) for b in records[0].buffers)
    assert usage.read_nbytes_per_s > 0


@every_tier
def test_many_threads_at_once(opened: OpenTier) -> None:
    limit = 6 * MIB
    tier = opened(limit)
    families = [chain(6, first=1000 * i, nbytes=100_000) for i in range(8)]
    over = threading.Event()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            records = families[int(rng.integers(len(families)))]
            for one in records:
                try:
                    tier.write(one.header, one.buffers)
                except Refused:
                    break
                if tier.usage().nbytes > limit:
                    over.set()
            for one in records:
                holds(tier, one)
            tier.touch(r.name for r in records)
            if rng.integers(3) == 0:
                tier.delete(records[-1].name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not over.is_set()
    assert tier.usage().counts.get("damaged", 0) == 0
    assert tier.usage().n_orphans == 0
