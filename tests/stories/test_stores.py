"""Real servers on a real redis-server and a real S3 server: two on one store, and stores that fail.

The built-in model reads facts out of a document, so every answer is right or wrong.

Slow: servers do not use a store for a second or two after it failed, which the tests wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from firn.cache.prefix import PrefixCache
from firn.cache.storage.store_address import parse_address
from firn.cache.tiers import discover
from firn.cache.tiers._store import StoreTier
from firn.cache.tiers.s3 import S3Client
from firn.config import CacheConfig, Config, ModelConfig
from firn.core.errors import SetupError
from firn.demo.facts import FactSession
from firn.engine import EngineParts
from tests import stores
from tests.api.real import Real, serving
from tests.cache.lab import nodes_of
from tests.harness import Eager
from tests.soak.house import Answer, ask, sessions
from tests.waiting import wait_until

WAIT_S = 60.0
QUICK = "deadline_s=0.6"
needs_redis = pytest.mark.skipif(bool(stores.why_no_redis()), reason=stores.why_no_redis() or "-")
needs_s3 = pytest.mark.skipif(bool(stores.why_no_s3()), reason=stores.why_no_s3() or "-")
KINDS = [pytest.param("redis", marks=needs_redis), pytest.param("s3", marks=needs_s3)]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model computes faster than a store answers; here it waits for the answer."""
    monkeypatch.setattr("firn.cache.loading.UNKNOWN_PATIENCE_S", WAIT_S)
    monkeypatch.setattr("firn.cache.loading.ASK_PATIENCE_S", WAIT_S)
    monkeypatch.setattr("firn.cache.storage.desk.TierDesk.deadline_s", WAIT_S)
    monkeypatch.setattr("firn.cache.storage.desk.RESCAN_S", 0.1)
    for name, value in stores.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def place() -> Iterator[Callable[[str], str]]:
    """Returns the address of a store of a kind, with a new prefix. Servers start on demand."""
    ports: dict[str, int] = {}
    with ExitStack() as stack:

        def address(kind: str) -> str:
            if kind not in ports:
                server = stores.redis_server() if kind == "redis" else stores.s3_server()
                server.start()
                stack.callback(server.kill)
                if kind == "s3":
                    stores.make_bucket(server.port)
                ports[kind] = server.port
            return address_of(kind, ports[kind])

        yield address


def address_of(kind: str, port: int, *more: str) -> str:
    words = "&".join(more)
    if kind == "redis":
        return f"redis://127.0.0.1:{port}/0?prefix={uuid4().hex}&{words}".rstrip("&")
    endpoint = f"endpoint=http://127.0.0.1:{port}"
    return f"s3://{stores.BUCKET}/{uuid4().hex}?{endpoint}&{words}".rstrip("&")


@dataclass(frozen=True)
class Machine:
    real: Real

    def ask(self, session: FactSession, n: int) -> Answer:
        return ask(self.real.url, session, n)

    def store(self) -> dict[str, Any]:
        stats = httpx.get(f"{self.real.url}/v1/cache/stats", timeout=WAIT_S).json()
        (name,) = set(stats["tiers"]) & {"s3", "redis"}
        found: dict[str, Any] = stats[name] | {"hits": stats["tokens"]["by_tier"].get(name, 0)}
        return found

    def until(self, what: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        until = time.monotonic() + WAIT_S
        while not what(found := self.store()):
            assert time.monotonic() < until, found
            time.sleep(0.05)
        return found

    def settle(self) -> None:
        """Waits until nothing is on its way to the store."""

        def is_busy(parts: EngineParts) -> bool:
            cache = parts.cache
            assert isinstance(cache, PrefixCache)
            below = cache.records.tiers[-1]
            nodes = nodes_of(cache.records.tree)
            writing = any(r.writing for n in nodes for r in n.records.values())
            return bool(below._to_spill or writing or below._worker.n_results)

        wait_until(lambda: not self.real.server.engine.call(is_busy).result(WAIT_S))


@contextmanager
def machine(
    folder: Path | None, *addresses: str, model: str = "firn-demo", **more: Any
) -> Iterator[Machine]:
    """folder: that of its SSD tier; None: it has none."""
    cache = CacheConfig(
        no_ssd_cache=folder is None,
        ssd_cache_dir=folder,
        cache_block_tokens=16,
        cache_memory_mb=64,
        tiers=addresses,
        **more,
    )
    config = Config(model=ModelConfig(path=model), cache=cache)
    with serving(Path(), config=config) as real:

        def eager(parts: EngineParts) -> None:
            assert isinstance(parts.cache, PrefixCache)
            parts.cache.records.estimates = Eager()

        real.server.engine.call(eager).result(WAIT_S)
        yield Machine(real)


# --- two servers, one store ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param("redis", "firn-demo-hybrid", marks=needs_redis),
        pytest.param("s3", "firn-demo", marks=needs_s3),
    ],
)
def test_what_one_computed_the_other_resumes(
    kind: str, model: str, place: Callable[[str], str], tmp_path: Path
) -> None:
    """Two folders, one store. A prompt asked once stays local; the second turn proves its worth."""
    address = place(kind)
    (talk,) = sessions(1)
    with machine(tmp_path / "a", address, model=model) as first:
        assert first.ask(talk, 0).right
        first.settle()
        assert first.store()["folder"]["counts"].get("writes", 0) == 0
        assert first.ask(talk, 1).right
        first.settle()
        assert first.store()["folder"]["counts"]["writes"] > 3
    with machine(tmp_path / "b", address, model=model) as second:
        answer = second.ask(talk, 2)
        assert answer.right
        assert answer.n_cached > answer.n_prompt // 2
        assert second.store()["hits"] >= answer.n_cached - 16
        again = second.ask(talk, 3)
        assert again.right
        assert again.n_cached > answer.n_cached


@pytest.mark.parametrize("kind", KINDS)
def test_instead_of_the_ssd_and_encrypted(
    kind: str, place: Callable[[str], str], tmp_path: Path
) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("11" * 32)
    other.write_text("22" * 32)
    address = f"{place(kind)}&spill=all"
    (talk,) = sessions(1, first=7)
    with machine(None, address, ssd_cache_key_file=key) as first:
        assert first.ask(talk, 0).right
        first.settle()
    with machine(None, address, ssd_cache_key_file=key) as second:
        answer = second.ask(talk, 0)
        assert (answer.right, answer.n_cached > answer.n_prompt // 2) == (True, True)
    if kind == "redis":
        with machine(None, address, ssd_cache_key_file=other) as third:
            answer = third.ask(talk, 0)
            assert (answer.right, answer.n_cached) == (True, 0)


# --- stores that fail ----------------------------------------------------------------------


@needs_redis
def test_redis_dies_hangs_and_comes_back(tmp_path: Path) -> None:
    server = stores.redis_server()
    server.start()
    address = address_of("redis", server.port, "spill=all", QUICK)
    talks = sessions(6, first=20)
    try:
        with machine(None, address) as one:
            assert one.ask(talks[0], 0).right
            one.settle()
            server.kill()
            assert one.ask(talks[1], 0).right
            one.until(lambda s: s["folder"]["state"] == "paused")
            assert one.ask(talks[2], 0).right
            server.start()
            one.until(lambda s: s["folder"]["state"] == "ok")
            one.settle()
            with server.paused():
                assert one.ask(talks[3], 0).right
                one.until(lambda s: s["folder"]["state"] == "paused")
                assert one.ask(talks[4], 0).right
            one.until(lambda s: s["folder"]["state"] == "ok")
            assert one.ask(talks[3], 1).right
    finally:
        server.kill()


@needs_redis
def test_a_redis_that_is_full_refuses() -> None:
    full = stores.redis_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with full, machine(None, address_of("redis", full.port, "spill=all")) as one:
        for talk in sessions(3, first=30):
            assert one.ask(talk, 0).right
        one.settle()
        found = one.store()["folder"]
        assert found["drops"].get("full", 0) > 0
        assert found["state"] == "ok", "it reads as well as ever"


@needs_redis
def test_what_a_redis_evicts_is_a_miss() -> None:
    import redis

    tight = stores.redis_server("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru")
    talks = sessions(12, first=30)
    with tight:
        address = address_of("redis", tight.port, "spill=all")
        with machine(None, address) as one:
            for talk in talks:
                assert one.ask(talk, 0).right
            one.settle()
            assert one.store()["folder"]["drops"].get("full", 0) == 0
        assert redis.Redis(port=tight.port).info()["evicted_keys"] > 0
        with machine(None, address) as one:
            answers = [one.ask(talk, 1) for talk in talks]
            found = one.store()["folder"]
        assert all(answer.right for answer in answers)
        assert any(answer.n_cached < answer.n_prompt // 2 for answer in answers)
        assert found["counts"]["names_found"] > 0, "what is left"
        assert (found["state"], found["counts"].get("damaged", 0)) == ("ok", 0)


@needs_redis
def test_a_wrong_password_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = stores.redis_server("--requirepass", "secret-word")
    server.start()
    (talk,) = sessions(1, first=40)
    address = f"redis://:wrong-word@127.0.0.1:{server.port}/0?spill=all"
    try:
        with machine(None, address) as one:
            assert one.ask(talk, 0).right
            found = one.until(lambda s: s["folder"]["state"] == "paused")
            assert found["folder"]["reason"].startswith("no permission")
        warnings = [r for r in caplog.records if "store is paused" in r.getMessage()]
        assert len(warnings) == 1
        assert "wrong-word" not in caplog.text
    finally:
        server.kill()


@needs_redis
def test_keys_live_as_long_as_they_are_told_and_a_use_renews_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import redis

    monkeypatch.setattr("firn.cache.records.TOUCH_EVERY_S", 0.0)
    server = stores.redis_server()
    server.start()
    address = f"redis://127.0.0.1:{server.port}/0?ttl_s=1000&spill=all"
    (talk,) = sessions(1, first=50)
    try:
        with machine(None, address) as one:
            assert one.ask(talk, 0).right
            one.settle()
        client = redis.Redis(port=server.port)
        keys = client.keys("firn:*")
        assert len(keys) > 3
        assert all(500 < client.ttl(key) <= 1000 for key in keys)
        for key in keys:
            client.expire(key, 500)
        with machine(None, address) as another:
            answer = another.ask(talk, 1)
            assert (answer.right, answer.n_cached > answer.n_prompt // 2) == (True, True)
            n_used = answer.n_cached // 16
            wait_until(lambda: sum(client.ttl(key) > 500 for key in keys) >= n_used)
    finally:
        server.kill()


@needs_s3
def test_a_bad_s3_server_costs_hits_and_nothing_else(tmp_path: Path) -> None:
    """It ignores conditions and ranges, as some do, then gets worse, and then recovers."""
    *talks, spare, another = sessions(10, first=60)
    with stores.BadS3() as bad:
        address = address_of("s3", bad.port, "spill=all", QUICK)
        with machine(None, address) as first:
            for talk in (*talks[:3], spare, another):
                assert first.ask(talk, 0).right
            first.settle()
        with machine(None, address) as second:
            answer = second.ask(talks[0], 1)
            assert (answer.right, answer.n_cached > answer.n_prompt // 2) == (True, True)
            # On a busy machine, one of them may be computed before the store has answered.
            for mood, talk in (
                ("lies", talks[1]),
                ("short", talks[2]),
                ("lies", spare),
                ("short", another),
            ):
                bad.mood = mood
                answer = second.ask(talk, 1)
                assert (answer.right, answer.n_cached < answer.n_prompt // 2) == (True, True), mood
            assert second.store()["folder"]["counts"]["damaged"] > 0
            for i, mood in enumerate(("full", "forbids", "stalls")):
                bad.released.clear()
                bad.mood = mood
                assert second.ask(talks[3 + i], 0).right
                second.until(lambda s: s["folder"]["state"] == "paused")
                assert second.ask(talks[3 + i], 1).right
                bad.mood = ""
                bad.released.set()
                second.until(lambda s: s["folder"]["state"] == "ok")
            second.settle()
        with machine(None, address) as third:
            answer = third.ask(talks[1], 2)
            assert answer.right
            assert answer.n_cached > answer.n_prompt // 2, "what was damaged was written anew"


@needs_s3
def test_s3_is_killed_and_comes_back(tmp_path: Path) -> None:
    server = stores.s3_server()
    server.start()
    stores.make_bucket(server.port)
    talks = sessions(2, first=70)
    try:
        with machine(None, address_of("s3", server.port, "spill=all", QUICK)) as one:
            assert one.ask(talks[0], 0).right
            server.kill()
            assert one.ask(talks[1], 0).right
            one.until(lambda s: s["folder"]["state"] == "paused")
            server.start()  # empty, and without the bucket
            assert one.ask(talks[0], 1).right
            stores.make_bucket(server.port)
            one.until(lambda s: s["folder"]["state"] == "ok")
            assert one.ask(talks[1], 1).right
    finally:
        server.kill()


# --- rclone's server, which ignores conditions and ranges -----------------------------------


@pytest.fixture(scope="module")
def rclone() -> None:
    if why := stores.why_no_rclone():
        pytest.skip(why)


@pytest.mark.usefixtures("rclone")
def test_rclone_is_as_bad_as_it_is_taken_for(tmp_path: Path) -> None:
    """Otherwise the tests below prove less than they claim. The tier copes with it nevertheless."""
    import obstore

    with stores.rclone_server(tmp_path / "s3") as server:
        address = parse_address(address_of("s3", server.port))
        tier = discover()["s3"](address.options)
        assert isinstance(tier, StoreTier)
        assert isinstance(tier._client, S3Client)
        for data in (b"first", b"second"):
            obstore.put(tier._client._store, "taken", data, mode="create", use_multipart=False)
        assert bytes(obstore.get(tier._client._store, "taken").bytes()) == b"second"
        with pytest.raises(obstore.exceptions.GenericError, match="non-partial"):
            obstore.get_range(tier._client._store, "taken", start=1, end=3)
        name = f"{7:064x}.pages"
        tier.write(name, [b"abc", b"def"], used_at=time.time())
        assert bytes(tier.read(name, 4)) == b"abcd"
        assert [f.nbytes for f in tier.find([name, f"{8:064x}.pages"])] == [6]
        tier.delete(name)
        assert tier.find([name]) == []


@pytest.mark.usefixtures("rclone")
def test_rclone_two_servers_a_kill_and_a_torn_object(tmp_path: Path) -> None:
    talks = sessions(3, first=80)
    with stores.rclone_server(tmp_path / "s3") as server:
        address = address_of("s3", server.port, "spill=all", QUICK)
        with machine(None, address) as first, machine(None, address) as second:
            assert first.ask(talks[0], 0).right
            first.settle()
            answer = second.ask(talks[0], 1)
            assert (answer.right, answer.n_cached > answer.n_prompt // 2) == (True, True)
            # Both write the same records, and each overwrites the other's.
            assert first.ask(talks[1], 0).right
            assert second.ask(talks[1], 0).right
            first.settle()
            second.settle()
            with server.paused():  # a put is in flight when the server dies
                assert first.ask(talks[2], 0).right
                first.until(lambda s: s["folder"]["state"] == "paused")
                server.kill()
            assert second.ask(talks[2], 0).right
            server.start()
            first.until(lambda s: s["folder"]["state"] == "ok")
            first.settle()
        whole = {path: path.read_bytes() for path in (tmp_path / "s3").rglob("*.safetensors")}
        torn = sorted(whole)[::3]
        for path in torn:
            path.write_bytes(whole[path][:-9])
        with machine(None, address) as third:
            for talk in talks:
                assert third.ask(talk, 2).right
            third.settle()
            assert third.store()["folder"]["counts"]["damaged"] > 0
        mended = [
            path for path in torn if path.exists() and len(path.read_bytes()) == len(whole[path])
        ]
        assert mended, "what was damaged is computed and written again"
        with machine(None, address) as fourth:
            answers = [fourth.ask(talk, 2) for talk in talks]
        assert all(answer.right for answer in answers)
        # On a busy machine, computing may be faster for some of them.
        assert any(answer.n_cached > answer.n_prompt // 2 for answer in answers)


@pytest.mark.usefixtures("rclone")
def test_rclone_refuses_a_wrong_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """moto accepts any signature; rclone does not."""
    (talk,) = sessions(1, first=90)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with stores.rclone_server(tmp_path / "s3") as server:
        address = address_of("s3", server.port, "spill=all", QUICK)
        with machine(None, address) as one:
            assert one.ask(talk, 0).right
            status = one.until(lambda s: s["folder"]["state"] == "paused")
            assert status["folder"]["reason"].startswith("no permission")
    warnings = [r for r in caplog.records if "store is paused" in r.getMessage()]
    assert len(warnings) == 1
    assert "not-the-secret" not in caplog.text


# --- addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://host/x", "must begin with one of"),
        ("s3:///prefix", "must be followed by a host or bucket name"),
        ("s3://bucket?spill=most", "spill=most must be proved or all"),
        pytest.param("s3://bucket?colour=red", "unknown setting colour", marks=needs_s3),
        pytest.param("redis://host/0?ttl_s=soon", "is not a number", marks=needs_redis),
        pytest.param("redis://host/0?deadline_s=0", "must be at least 0.1", marks=needs_redis),
        ("redis://host/0?nonsense", "not a valid address"),
    ],
)
def test_a_bad_address_is_one_line(address: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=why), machine(None, address):
        pass
