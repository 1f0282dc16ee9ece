"""What every storage tier owes the cache. A new file in cache/tiers/ is tested automatically."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from firn.cache import tiers
from firn.cache.parts import Part
from firn.cache.storage.container import Name
from firn.cache.storage.faults import Damaged, Missing, Refused, TierFull
from firn.cache.tiers import (
    PEEK_NBYTES,
    Gone,
    ScannedRecord,
    Store,
    TierOptions,
    discover,
    schemes,
)
from firn.core.keys import Key
from tests import dict_tier, stores
from tests.cache.tiers.records import Direct, Record, assert_same, beside, chain, of_size, record

MIB = 1 << 20
NOBODY = f"{'01' * 32}.pages"
Opened = Callable[[int], Direct]

KINDS = {**discover(), "dict": dict_tier.open_tier}
STORES = {"redis", "s3"}
"""They evict by rules of their own, and have no limit here."""
every_tier = pytest.mark.parametrize("kind", sorted(KINDS))
every_store = pytest.mark.parametrize("kind", sorted(STORES))
bounded_tier = pytest.mark.parametrize("kind", sorted(set(KINDS) - STORES))


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    if why := stores.why_no_redis():
        pytest.skip(why)
    server = stores.redis_server()
    server.start()
    yield server.port
    server.kill()


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    if why := stores.why_no_s3():
        pytest.skip(why)
    server = stores.s3_server()
    server.start()
    stores.make_bucket(server.port)
    yield server.port
    server.kill()


@pytest.fixture
def where(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> TierOptions:
    """A location of the test's own."""
    if kind == "redis":
        port = request.getfixturevalue("redis_port")
        extra = {"prefix": uuid.uuid4().hex, "piece_kb": "64", "write_mb_per_s": "0"}
        return TierOptions(f"redis://127.0.0.1:{port}/0", extra=extra)
    if kind == "s3":
        for name, value in stores.CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        endpoint = f"http://127.0.0.1:{request.getfixturevalue('s3_port')}"
        extra = {"endpoint": endpoint, "write_mb_per_s": "0"}
        return TierOptions(f"s3://{stores.BUCKET}/{uuid.uuid4().hex}", extra=extra)
    return TierOptions(str(tmp_path / "tier"))


@pytest.fixture
def opened(kind: str, where: TierOptions) -> Opened:
    """Opens tiers with an advancing clock: each use is a little later than the one before."""
    now = [time.time()]

    def wall() -> float:
        now[0] += 0.01
        return now[0]

    def open_tier(limit_nbytes: int) -> Direct:
        return Direct(KINDS[kind](replace(where, limit_nbytes=limit_nbytes)), wall=wall)

    return open_tier


def write_all(tier: Direct, records: list[Record]) -> None:
    for one in records:
        tier.write(one)


def test_all_are_found() -> None:
    files = Path(tiers.__file__).parent.glob("[!_]*.py")
    assert set(discover()) == {file.stem for file in files} >= {"ssd"}
    assert set(schemes().values()) == STORES, "a new store needs a location in `where`"


# --- names and bytes -----------------------------------------------------------------------


@every_tier
def test_bytes_come_back_whole_or_as_far_as_wanted(opened: Opened) -> None:
    tier, name = opened(64 * MIB).tier, f"{'ab' * 32}.pages"
    tier.write(name, [b"one", b"", memoryview(b"two")], used_at=time.time())
    assert bytes(tier.read(name)) == b"onetwo"
    assert bytes(tier.read(name, 4)) == b"onet"
    assert bytes(tier.read(name, 0)) == b""
    assert bytes(tier.read(name, 99)) == b"onetwo"


@every_tier
def test_what_is_not_there(opened: Opened) -> None:
    tier = opened(64 * MIB).tier
    with pytest.raises(Missing):
        tier.read(NOBODY)
    with pytest.raises(Missing):
        tier.read(NOBODY, 10)
    tier.delete(NOBODY)
    tier.delete(NOBODY, keep=True)
    tier.touch({NOBODY: 1.0})
    assert list(tier.scan()) == []
    assert tier.usage().n_files == {}


@every_tier
def test_a_scan_tells_names_heads_lengths_and_stamps_once(opened: Opened) -> None:
    """Stores are too large to be scanned, and a DictTier has a dict of its own."""
    first, second = opened(64 * MIB), opened(64 * MIB)
    names = {f"{i:064x}.pages": 1.8e9 + 10 * i for i in range(20)}
    for name, stamp in names.items():
        first.tier.write(name, [name.encode() * 100], used_at=stamp)
    assert list(first.tier.scan()) == []
    found = list(second.tier.scan())
    for seen in found:
        assert isinstance(seen, ScannedRecord)
        assert bytes(seen.head) == (seen.name.encode() * 100)[:PEEK_NBYTES]
        assert seen.nbytes == 100 * len(seen.name)
        assert seen.used_at == pytest.approx(names[seen.name], abs=2)
    hidden = isinstance(second.tier, (Store, dict_tier.DictTier))
    assert [s.name for s in found] == ([] if hidden else list(reversed(names))), "last used first"
    assert list(second.tier.scan()) == []
    first.tier.delete(next(iter(names)))
    assert list(second.tier.scan()) == ([] if hidden else [Gone(next(iter(names)))])


@every_tier
def test_what_is_set_aside_is_never_seen_again(opened: Opened) -> None:
    tier = opened(64 * MIB)
    one = record()
    tier.write(one)
    tier.tier.delete(str(one.name), keep=True)
    assert not tier.holds(one)
    assert list(tier.tier.scan()) == list(opened(64 * MIB).tier.scan()) == []
    assert tier.write(one).new
    assert tier.holds(one)


# --- stores --------------------------------------------------------------------------------


@every_store
def test_a_store_says_which_names_it_has(opened: Opened) -> None:
    first, second = opened(0).tier, opened(0).tier
    assert isinstance(first, Store)
    assert isinstance(second, Store)
    names = [f"{i:064x}.pages" for i in range(40)]
    began = time.time()
    for name in names[::2]:
        first.write(name, [b"x" * int(name[:64], 16)], used_at=time.time())
    found = {one.name: one for one in second.find(names)}
    assert set(found) == set(names[::2])
    assert [found[n].nbytes for n in names[::2]] == list(range(0, 40, 2))
    assert all(abs(one.written_at - began) < 60 for one in found.values())
    assert list(second.find([])) == []
    first.delete(names[0])
    assert [one.name for one in second.find(names[:3])] == [names[2]]


@every_store
def test_a_large_record_comes_back_whole(opened: Opened) -> None:
    tier = opened(0)
    one = of_size(1_000_000)
    assert tier.write(one).new
    assert tier.holds(one)
    assert not opened(0).write(one).new
    (found,) = tier.tier.find([str(one.name)])  # type: ignore[attr-defined]
    assert found.nbytes == len(tier.tier.read(str(one.name)))
    tier.touch([one])
    tier.delete(one)
    assert not tier.holds(one)


# --- records -------------------------------------------------------------------------------


@every_tier
def test_what_is_written_is_read(opened: Opened) -> None:
    tier = opened(64 * MIB)
    one = record()
    stored = tier.write(one)
    assert stored.new
    assert stored.nbytes > 0
    assert stored.evicted == ()
    loaded = tier.read(one)
    assert_same(loaded.header, one.header)
    assert [bytes(b) for b in loaded.buffers] == one.buffers


@every_tier
def test_parts_of_a_block_are_records_of_their_own(opened: Opened) -> None:
    tier = opened(64 * MIB)
    pages = record()
    state = beside(pages, Part.STATE)
    write_all(tier, [pages, state])
    tier.delete(pages)
    assert not tier.holds(pages)
    assert tier.holds(state)
    assert tier.usage().counts["deletes"] == 1


@every_tier
def test_writing_it_again_changes_nothing(opened: Opened) -> None:
    tier = opened(64 * MIB)
    one = record()
    tier.write(one)
    before = tier.usage()
    again = tier.write(one)
    assert not again.new
    after = tier.usage()
    assert after.nbytes == before.nbytes
    assert after.counts["writes"] == before.counts["writes"] == 1
    assert tier.holds(one)


@every_tier
def test_other_tokens_under_the_same_name_are_not_served(opened: Opened) -> None:
    tier = opened(64 * MIB)
    one = record()
    tier.write(one)
    other = Record(replace(one.header, tokens=np.arange(99, dtype=np.uint64)), one.buffers)
    with pytest.raises(Damaged):
        tier.read(other)
    assert not tier.holds(one)
    with pytest.raises(Missing):
        tier.read(Record(replace(one.header, key=Key(b"\1" * 32)), one.buffers))


# --- the limit -----------------------------------------------------------------------------


@bounded_tier
def test_the_limit_holds_and_the_least_recently_used_goes(opened: Opened) -> None:
    limit = 4 * MIB
    tier = opened(limit)
    gone: set[Name] = set()
    records = [of_size(300_000, i) for i in range(40)]
    for one in records:
        gone |= set(tier.write(one).evicted)
        assert tier.usage().nbytes <= limit
    kept = [r for r in records if r.name not in gone]
    assert kept == records[-len(kept) :]
    assert 8 <= len(kept) <= 14
    assert all(tier.holds(r) for r in kept)
    assert not any(tier.holds(r) for r in records if r.name in gone)
    assert tier.usage().counts["evictions"] == len(gone)
    assert tier.scan() == [], "the caller knows"


@bounded_tier
def test_what_was_used_stays_and_no_stamp_is_lowered(opened: Opened) -> None:
    tier = opened(4 * MIB)
    used, *others = [of_size(300_000, i) for i in range(40)]
    tier.write(used)
    for one in others:
        tier.touch([used])
        tier.touch([used], at=1.0)
        tier.write(one)
    assert tier.holds(used)


@bounded_tier
def test_a_chain_goes_from_its_end(opened: Opened) -> None:
    tier = opened(4 * MIB)
    old = chain(6, nbytes=300_000)
    write_all(tier, old)
    for i in range(30):
        tier.write(of_size(300_000, 100 + i))
        there = [tier.holds(r) for r in old]
        assert there == sorted(there, reverse=True), "a parent went before its child"
    assert not any(there)


@bounded_tier
def test_a_window_or_state_goes_before_the_pages_it_needs(opened: Opened) -> None:
    tier = opened(4 * MIB)
    pages = of_size(300_000)
    others = [beside(pages, Part.STATE), beside(pages, Part.WINDOW)]
    write_all(tier, [others[0], pages, others[1]])
    for i in range(30):
        tier.write(of_size(300_000, 100 + i))
        if not tier.holds(pages):
            break
    assert i < 20
    assert not any(tier.holds(r) for r in others)


@bounded_tier
def test_a_long_chain_does_not_eat_its_own_head(opened: Opened) -> None:
    """Nothing is evicted to make room for a record that was used less recently."""
    tier = opened(4 * MIB)
    records = chain(30, nbytes=300_000)
    refused = 0
    for one in records:
        try:
            tier.write(one)
        except TierFull:
            refused += 1
    n_written = len(records) - refused
    assert 8 < n_written < 30
    assert all(tier.holds(r) for r in records[:n_written])
    assert tier.usage().drops == {"full": refused}


@bounded_tier
def test_too_large_a_record_is_refused_and_costs_nothing(opened: Opened) -> None:
    tier = opened(2 * MIB)
    small = of_size(100_000)
    tier.write(small)
    with pytest.raises(TierFull):
        tier.write(of_size(3 * MIB, 1))
    assert tier.holds(small)
    assert tier.usage().drops == {"full": 1}


@bounded_tier
def test_files_are_counted_by_part(opened: Opened) -> None:
    tier = opened(64 * MIB)
    pages = record()
    write_all(tier, [pages, beside(pages, Part.STATE)])
    assert tier.usage().n_files == {"pages": 1, "state": 1}
    tier.delete(pages)
    assert tier.usage().n_files == {"state": 1}


@bounded_tier
def test_many_threads_at_once(opened: Opened) -> None:
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
                    tier.write(one)
                except Refused:
                    break
                if tier.usage().nbytes > limit:
                    over.set()
            for one in records:
                tier.holds(one)
            tier.touch(records)
            if rng.integers(3) == 0:
                tier.delete(records[-1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not over.is_set()
    assert tier.usage().counts.get("damaged", 0) == 0
