"""A large record's keys in a real Redis: they are renewed together, and deleted together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from firn.cache.tiers import TierOptions
from firn.cache.tiers._store import StoreTier
from firn.cache.tiers.redis import open_tier
from tests import stores

pytestmark = pytest.mark.skipif(bool(stores.why_no_redis()), reason=stores.why_no_redis() or "-")
NAME = f"{'ab' * 32}.pages"
TTL_S = 1000


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = stores.redis_server()
    server.start()
    yield server.port
    server.kill()


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    import redis

    with redis.Redis(port=port) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
def tier(port: int) -> StoreTier:
    extra = {"ttl_s": str(TTL_S), "piece_kb": "64", "write_mb_per_s": "0"}
    return open_tier(TierOptions(f"redis://127.0.0.1:{port}/0", extra=extra))


def test_a_use_renews_a_record_and_all_of_its_pieces(tier: StoreTier, client: Any) -> None:
    tier.write(NAME, [bytes(300_000)], used_at=time.time())
    keys = client.keys("*")
    assert len(keys) == 6, "a head, and pieces of 64 KiB"
    for key in keys:
        assert 0 < client.ttl(key) <= TTL_S
        client.expire(key, 5)
    tier.touch({NAME: time.time()})
    assert min(client.ttl(key) for key in keys) > TTL_S / 2


def test_no_piece_stays_behind(tier: StoreTier, client: Any) -> None:
    tier.write(NAME, [bytes(300_000)], used_at=time.time())
    tier.delete(NAME)
    assert client.keys("*") == []


def test_what_was_found_damaged_is_written_anew_and_its_old_pieces_are_not_read(
    tier: StoreTier, client: Any
) -> None:
    tier.write(NAME, [bytes(300_000)], used_at=time.time())
    assert not tier.write(NAME, [b"\1" * 300_000], used_at=time.time()).new
    tier.delete(NAME, keep=True)
    assert tier.write(NAME, [b"\1" * 300_000], used_at=time.time()).new
    assert bytes(tier.read(NAME)) == b"\1" * 300_000
