"""Deadlines, retries, the circuit breaker and the bandwidth of stores, on a clock set by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from firn.cache.storage.faults import Missing, PermanentFault, Refused, TierFault
from firn.cache.tiers import FoundRecord, TierOptions
from firn.cache.tiers._backoff import MAX_S, N_FAILURES, CircuitBreaker
from firn.cache.tiers._bandwidth import BURST_S, Bandwidth
from firn.cache.tiers._calls import N_TRIES, RetriedCalls
from firn.cache.tiers._store import StoreSettings, StoreTier
from firn.cache.tiers.redis import RedisClient
from firn.cache.tiers.s3 import S3Client
from firn.core.clock import Clock
from firn.core.errors import SetupError


class Middle(Random):
    """Not at all at random."""

    def random(self) -> float:
        return 0.5


@dataclass
class SleptClock(Clock):
    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def elapsed(self) -> float:
        return self.now

    wall = elapsed

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Store:
    """A store whose first `fails` calls fail; each call takes `takes_s`."""

    clock: SleptClock
    fails: int = 0
    takes_s: float = 0.0
    error: Callable[[], Exception] = lambda: TierFault("unreachable")
    n_calls: int = 0

    def __call__(self) -> str:
        self.n_calls += 1
        self.clock.now += self.takes_s
        if self.fails:
            self.fails -= 1
            raise self.error()
        return "well"


def made(clock: SleptClock, *, deadline_s: float = 4.0) -> tuple[RetriedCalls, CircuitBreaker]:
    breaker = CircuitBreaker("s3", clock=clock, random=Middle())
    calls = RetriedCalls(breaker, deadline_s=deadline_s, clock=clock, random=Middle())
    return calls, breaker


def test_a_fault_is_tried_again_and_forgotten() -> None:
    clock = SleptClock()
    calls, breaker = made(clock)
    store = Store(clock, fails=N_TRIES - 1)
    assert calls.run(store) == "well"
    assert store.n_calls == N_TRIES
    assert clock.slept == sorted(clock.slept), "each pause is longer than the one before"
    assert breaker.status.state == "ok"


def test_the_deadline_holds_however_slow_each_attempt_is() -> None:
    clock = SleptClock()
    calls, _ = made(clock, deadline_s=4.0)
    store = Store(clock, fails=99, takes_s=calls.attempt_s)
    began = clock.now
    with pytest.raises(TierFault):
        calls.run(store)
    assert clock.now - began <= 4.0


def test_what_is_not_there_is_an_answer() -> None:
    clock = SleptClock()
    calls, breaker = made(clock)
    for _ in range(2 * N_FAILURES):
        store = Store(clock, fails=1, error=Missing)
        with pytest.raises(Missing):
            calls.run(store)
        assert store.n_calls == 1
    assert breaker.status.state == "ok"


def test_the_circuit_opens_probes_with_one_call_and_closes() -> None:
    clock = SleptClock()
    calls, breaker = made(clock)
    store = Store(clock, fails=10**6)
    for _ in range(N_FAILURES):
        with pytest.raises(TierFault, match="unreachable"):
            calls.run(store)
    assert breaker.status.state == "paused"
    before = store.n_calls
    with pytest.raises(TierFault, match="circuit open"):
        calls.run(store)
    assert store.n_calls == before, "it is left alone"
    pauses = []
    for _ in range(10):
        opened = clock.now
        while True:
            try:
                breaker.check()
                break
            except TierFault:
                clock.now += 0.25
        with pytest.raises(TierFault, match="circuit open"):
            breaker.check()  # one call probes, the others wait for its result
        pauses.append(clock.now - opened)
        breaker.failed(TierFault("unreachable"))
    assert pauses == sorted(pauses)
    assert pauses[-1] <= MAX_S + 0.25
    clock.now += 2 * MAX_S
    store.fails = 0
    assert calls.run(store) == "well"
    assert breaker.status.state == "ok"
    assert calls.run(store) == "well"


def test_wrong_credentials_are_tried_once() -> None:
    clock = SleptClock()
    calls, breaker = made(clock)
    store = Store(clock, fails=9, error=lambda: PermanentFault("no permission"))
    with pytest.raises(PermanentFault):
        calls.run(store)
    assert store.n_calls == 1
    assert breaker.status.state == "paused"


def test_a_call_that_breaks_lets_the_next_probe_through() -> None:
    clock = SleptClock()
    calls, breaker = made(clock)
    breaker.failed(PermanentFault("no permission"), for_good=True)
    clock.now += 2 * MAX_S
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    assert calls.run(Store(clock)) == "well"


def test_bytes_flow_at_the_rate_that_was_set() -> None:
    clock = SleptClock()
    bandwidth = Bandwidth(1000.0, clock=clock)
    began = clock.now
    for _ in range(50):
        bandwidth.take(200)
    assert clock.now - began == pytest.approx(50 * 200 / 1000 - BURST_S, abs=0.3)
    unbounded = Bandwidth(0, clock=clock)
    before = clock.now
    unbounded.take(10**12)
    assert clock.now == before


# --- settings ------------------------------------------------------------------------------


def test_settings_are_numbers_within_reason() -> None:
    def of(**extra: str) -> StoreSettings:
        return StoreSettings.of(TierOptions("s3://x", extra=extra), ("region",))

    assert of(deadline_s="2", region="eu").deadline_s == 2.0
    assert of(write_mb_per_s="0").write_mb_per_s == 0.0
    for bad in ({"deadline_s": "nan"}, {"deadline_s": "0"}, {"colour": "red"}, {"deadline_s": ""}):
        with pytest.raises(SetupError):
            of(**bad)


# --- what one store does -------------------------------------------------------------------


class Stubborn:
    """Implements _store.ObjectClient: it keeps what it is told to delete."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def get(self, name: str, n: int | None) -> memoryview:
        return memoryview(self.held[name])[:n]

    def find(self, names: Sequence[str]) -> list[FoundRecord]:
        return [FoundRecord(name, len(self.held[name]), 1.0) for name in names if name in self.held]

    def put(self, name: str, pieces: Sequence[Any], *, replace: bool) -> bool:
        if name in self.held and not replace:
            return False
        self.held[name] = b"".join(map(bytes, pieces))
        return True

    def touch(self, names: Sequence[str]) -> None: ...

    def delete(self, name: str) -> bool:
        raise Refused("read-only for a while")


def test_what_is_damaged_and_cannot_be_deleted_is_written_over() -> None:
    name, store = "a", Stubborn()
    tier = StoreTier(store, StoreSettings(), CircuitBreaker("test"))
    tier.write(name, [b"bad"], used_at=0.0)
    assert not tier.write(name, [b"other"], used_at=0.0).new, "what is there stays"
    with pytest.raises(Refused):
        tier.delete(name, keep=True)
    assert tier.find([name]) == []
    with pytest.raises(Missing):
        tier.read(name)
    assert tier.write(name, [b"good"], used_at=0.0).new
    assert bytes(tier.read(name)) == b"good"


def test_an_object_that_was_cut_short_on_its_way_is_a_fault_of_the_way() -> None:
    """It is requested again; one that is damaged would be deleted."""

    class Library:
        class exceptions:
            AlreadyExistsError = NotSupportedError = PermissionDeniedError = KeyError
            UnauthenticatedError = BaseError = KeyError

        @staticmethod
        def get(store: Any, path: str) -> Any:
            return SimpleNamespace(bytes=lambda: b"half", meta={"size": 8})

    with pytest.raises(TierFault, match="cut short"):
        S3Client(None, Library, attempt_s=1.0).get("ab", None)


class SlowRedis:
    """Takes a second for each value, less than the time limit of a call."""

    def __init__(self, clock: SleptClock) -> None:
        self._clock = clock
        self.held: dict[str, bytes] = {}
        self.n_calls = 0

    def exists(self, key: str) -> bool:
        return key in self.held

    def set(self, key: str, value: Any, *, px: int, nx: bool = False) -> bool:
        self.n_calls += 1
        self._clock.now += 1.0
        self.held[key] = bytes(value)
        return True

    def get(self, key: str) -> bytes | None:
        self.n_calls += 1
        self._clock.now += 1.0
        return self.held.get(key)

    def unlink(self, *keys: str) -> int:
        return sum(self.held.pop(key, None) is not None for key in keys)


def test_a_record_of_many_pieces_has_one_attempts_time() -> None:
    class Errors:
        RedisError = OutOfMemoryError = AuthenticationError = NoPermissionError = KeyError
        TimeoutError = ReadOnlyError = KeyError

    clock = SleptClock()
    redis = SlowRedis(clock)
    client = RedisClient(
        redis, Errors, prefix="firn", ttl_s=60, attempt_s=2.5, piece_nbytes=1024, clock=clock
    )
    with pytest.raises(TierFault, match="too slow: 3072 of 10240 bytes"):
        client.put("ab", [bytes(10 << 10)], replace=False)
    assert redis.n_calls == 3
    assert redis.held == {}, "no piece stays behind"
    assert client.put("cd", [bytes(3 << 10)], replace=False), "it was late for its head only"
    redis.n_calls = 0
    with pytest.raises(TierFault, match="too slow: 2048 of 3072 bytes"):
        client.get("cd", None)
    assert redis.n_calls == 3, "the head, and two pieces"
