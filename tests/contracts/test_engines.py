"""What every engine owes the API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from firn.core import ports
from firn.core.events import Admitted, ChoiceDone, EngineEvent, JobDone, Token
from firn.core.ports import Delivery
from firn.core.values import RequestId
from tests.contracts.stands import assert_fits, job_of, prompt_of
from tests.fakes import FakeEngine
from tests.hash_engine import WAIT_S, HashEngine
from tests.waiting import wait_until


@contextmanager
def fake_engine(publish: Callable[[Sequence[Delivery]], None]) -> Iterator[Any]:
    engine = FakeEngine(publish, lambda job, choice: [5 + choice] * 50, vocab_size=256)
    engine.hold("decode", after=10)  # otherwise a job ends before a test can stop it
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def real_engine(publish: Callable[[Sequence[Delivery]], None]) -> Iterator[Any]:
    class Quiet(HashEngine):
        def _publish(self, batch: Sequence[Delivery]) -> None:
            publish(batch)

    with Quiet() as lab:
        yield lab.engine


ENGINES = {"real": real_engine, "fake": fake_engine}


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_have_the_ports_shape(kind: str) -> None:
    with ENGINES[kind](lambda batch: None) as engine:
        assert_fits(ports.Engine, engine)


every_engine = pytest.mark.parametrize("kind", ENGINES)


class Listener:
    """Collects what an engine publishes, so that tests can wait for it."""

    def __init__(self) -> None:
        self.events: dict[RequestId, list[EngineEvent]] = {}
        self._heard = threading.Condition()

    def __call__(self, batch: Sequence[Delivery]) -> None:
        with self._heard:
            for request, event in batch:
                self.events.setdefault(request, []).append(event)
            self._heard.notify_all()

    def wait(self, name: str, kind: type = JobDone) -> list[Any]:
        def has_come() -> bool:
            return any(isinstance(e, kind) for e in self.events.get(RequestId(name), []))

        with self._heard:
            assert self._heard.wait_for(has_come, WAIT_S), f"{name} was left waiting"
            return list(self.events[RequestId(name)])


@every_engine
def test_a_job_is_told_from_admission_to_end(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.submit(job_of(prompt_of(30), n=2, name="a"))
        events = heard.wait("a")
    assert isinstance(events[0], Admitted)
    assert events.count(JobDone()) == 1
    assert events[-1] == JobDone()
    for choice in range(2):
        own = [e for e in events if getattr(e, "choice", None) == choice]
        assert [type(e) for e in own] == [Token] * 8 + [ChoiceDone]
        assert own[-1].reason == "length"


@every_engine
def test_ids_nobody_knows_are_ignored(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.cancel(RequestId("nobody"))
        engine.stop_choice(RequestId("nobody"), 0)
        engine.submit(job_of(prompt_of(3), name="a"))
        heard.wait("a")
        engine.cancel(RequestId("a"))
        engine.submit(job_of(prompt_of(3), name="b"))
        heard.wait("b")
    assert set(heard.events) == {"a", "b"}


@every_engine
def test_a_stopped_choice_is_not_announced_as_done(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.submit(job_of(prompt_of(3), n=2, max_tokens=1 << 30, name="a"))
        heard.wait("a", Token)
        engine.stop_choice(RequestId("a"), 0)
        engine.stop_choice(RequestId("a"), 1)
        events = heard.wait("a")
    assert events[-1] == JobDone()
    assert [e for e in events if isinstance(e, ChoiceDone)] == []


@every_engine
def test_health_is_told_at_any_time(kind: str) -> None:
    """Without work, during a job, after it, and when the engine has stopped."""
    heard = Listener()

    def counts() -> tuple[int, int, int]:
        health = engine.health()
        assert health.alive
        assert health.last_step_age_s >= 0.0
        return health.n_waiting, health.n_prefilling, health.n_decoding

    with ENGINES[kind](heard) as engine:
        assert counts() == (0, 0, 0)
        engine.submit(job_of(prompt_of(3), max_tokens=1 << 30, name="a"))
        heard.wait("a", Token)
        wait_until(lambda: counts() == (0, 0, 1))
        engine.stop_choice(RequestId("a"), 0)
        wait_until(lambda: counts() == (0, 0, 0))
        assert engine.model.vocab_size > 0
    assert not engine.health().alive
