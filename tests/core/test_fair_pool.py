"""Threads that keys share: a key's work waits behind its own, not behind that of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing

import pytest

from firn.core.fair_pool import FairPool, worker_key

WAIT_S = 30


@pytest.fixture
def pool() -> Iterator[FairPool]:
    with closing(FairPool(3, name="test")) as made:
        yield made


def test_another_keys_work_begins_while_one_key_fills_the_pool(pool: FairPool) -> None:
    release = threading.Event()
    held = [pool.submit("a", lambda: release.wait(WAIT_S)) for _ in range(20)]
    assert pool.submit("b", lambda: "done").result(WAIT_S) == "done"
    assert not any(future.done() for future in held)
    release.set()
    assert all(future.result(WAIT_S) for future in held)


def test_keys_take_turns() -> None:
    gate, order = threading.Event(), list[str]()
    with closing(FairPool(1, name="test")) as pool:
        pool.submit("x", lambda: gate.wait(WAIT_S))
        waiting = [pool.submit(key, lambda: order.append(worker_key())) for key in "aaaabc"]
        gate.set()
        for future in waiting:
            future.result(WAIT_S)
    assert order == list("abcaaa"), "nobody waits for all of a's work"


def test_results_faults_and_keys_reach_whoever_asked(pool: FairPool) -> None:
    assert pool.of("a").submit(lambda x, *, y: (x, y, worker_key()), 1, y=2).result(WAIT_S) == (
        1,
        2,
        "a",
    )
    with pytest.raises(ZeroDivisionError):
        pool.submit("a", lambda: 1 / 0).result(WAIT_S)
    assert pool.submit("a", lambda: "still here").result(WAIT_S) == "still here"
    assert worker_key() == ""


def test_cancelled_work_does_not_run(pool: FairPool) -> None:
    gate, ran = threading.Event(), list[str]()
    held = [pool.submit("a", lambda: gate.wait(WAIT_S)) for _ in range(2)]
    cancelled = pool.submit("a", lambda: ran.append("cancelled"))
    after = pool.submit("a", lambda: ran.append("after"))
    assert cancelled.cancel()
    gate.set()
    for future in (*held, after):
        future.result(WAIT_S)
    assert ran == ["after"]


def test_a_closed_pool_begins_nothing_more() -> None:
    pool, gate = FairPool(1, name="test"), threading.Event()
    running = pool.submit("a", lambda: gate.wait(WAIT_S))
    waiting = pool.submit("a", lambda: None)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    gate.set()
    assert running.result(WAIT_S)
