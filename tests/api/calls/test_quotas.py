"""The limits of one key do not affect others."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import openai
import pytest

from firn.api.calls.quotas import KeyLimits, Quotas
from firn.api.http.auth import Keys
from firn.core.errors import InvalidValue, KeyLimit
from firn.core.values import Namespace
from tests.api.live import Live, serve

ALICE, BOB = Namespace("alice"), Namespace("bob")


@dataclass
class Call:
    n_waiting: int = 0
    n_computed: int = 0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(quotas: Quotas, own: Namespace = ALICE, *, n_requests: int = 1) -> KeyLimit | None:
    try:
        with quotas.call(own, Call(), n_requests=n_requests):
            return None
    except KeyLimit as error:
        return error


def test_no_limits_unless_they_are_set() -> None:
    quotas = Quotas()
    with ExitStack() as held:
        for _ in range(1000):
            held.enter_context(quotas.call(ALICE, Call(n_waiting=99, n_computed=10**9)))
        assert refusal(quotas) is None
        assert quotas.n_calls(ALICE) == 1000
    assert (quotas.n_calls(ALICE), quotas.n_calls(BOB)) == (0, 0)


def test_a_key_has_a_limit_of_calls_at_a_time() -> None:
    quotas = Quotas(KeyLimits(concurrency=2))
    with quotas.call(ALICE, Call()):
        with quotas.call(ALICE, Call()):
            error = refusal(quotas)
            assert error is not None
            assert (error.status, error.retry_after_s) == (429, 1)
            assert refusal(quotas, BOB) is None
        assert refusal(quotas) is None


def test_a_failed_call_no_longer_counts() -> None:
    quotas = Quotas(KeyLimits(concurrency=1))
    with pytest.raises(ZeroDivisionError), quotas.call(ALICE, Call()):
        raise ZeroDivisionError
    assert refusal(quotas) is None


def test_a_key_has_a_share_of_the_queue() -> None:
    quotas = Quotas(KeyLimits(queue_share=0.25), max_queue=16)
    waiting = Call(n_waiting=3)
    with quotas.call(ALICE, waiting):
        assert refusal(quotas, n_requests=2) is not None
        assert refusal(quotas) is None
        assert refusal(quotas, BOB, n_requests=4) is None
        waiting.n_waiting = 0  # they have their rows now
        assert refusal(quotas, n_requests=4) is None
    with pytest.raises(InvalidValue, match="5 prompts in one request exceed this key's limit of 4"):
        refusal(quotas, BOB, n_requests=5)
    assert refusal(Quotas(KeyLimits(queue_share=0.001), max_queue=0)) is None, "one may always wait"


def test_a_key_has_a_limit_of_tokens_per_minute() -> None:
    clock = Clock()
    quotas = Quotas(KeyLimits(tokens_per_minute=600), clock=clock)
    with quotas.call(ALICE, call := Call()):
        call.n_computed = 599
        assert refusal(quotas) is None
        call.n_computed = 600
        assert refusal(quotas) is not None, "a call that runs counts"
        assert refusal(quotas, BOB) is None
    error = refusal(quotas)
    assert error is not None
    assert error.retry_after_s == 1
    clock.now += 1
    assert refusal(quotas) is None


def test_overdrawn_tokens_must_be_refilled_first() -> None:
    clock = Clock()
    quotas = Quotas(KeyLimits(tokens_per_minute=600), clock=clock)
    with quotas.call(ALICE, Call(n_computed=1800)):
        pass
    error = refusal(quotas)
    assert error is not None
    assert error.retry_after_s == 121
    clock.now += 120
    assert refusal(quotas) is not None
    clock.now += error.retry_after_s - 120
    assert refusal(quotas) is None


def test_the_bucket_refills_during_a_long_call() -> None:
    """A minute's worth immediately, and then that much per minute."""
    clock = Clock()
    quotas = Quotas(KeyLimits(tokens_per_minute=600), clock=clock)
    with quotas.call(ALICE, call := Call()):
        for _ in range(10):
            clock.now += 60
            call.n_computed += 600
            assert refusal(quotas) is None
    clock.now += 3600
    with quotas.call(ALICE, Call(n_computed=601)):
        pass
    assert refusal(quotas) is not None, "a pause fills no more than a minute's worth"


# --- over the wire -------------------------------------------------------------------------


def test_one_key_at_its_limit_does_not_affect_another() -> None:
    limits = Quotas(KeyLimits(concurrency=1))
    with serve(keys=Keys(["alice", "bob"]), quotas=limits) as live:
        live.engine.hold("decode", after=1)
        first = live.openai(api_key="alice").completions.create(model="", prompt="a", stream=True)
        live.engine.wait_for(lambda engine: engine.n_in("decode"))
        with pytest.raises(openai.RateLimitError) as caught:
            live.openai(api_key="alice").completions.create(model="", prompt="b")
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "rate_limit_exceeded"
        body, headers = {"text": "a"}, {"x-api-key": "alice"}
        counted = httpx.post(f"{live.url}/v1/tokenize", json=body, headers=headers)
        assert counted.status_code == 429
        assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == 200
        live.engine.release("decode")
        assert ask(live, "bob").status_code == 200
        assert list(first)
        assert ask(live, "alice").status_code == 200


def ask(live: Live, key: str, prompt: str = "hello") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4}
    return httpx.post(f"{live.url}/v1/completions", json=body, headers={"x-api-key": key})


def test_only_computed_tokens_count() -> None:
    with serve(
        keys=Keys(["alice", "bob"]),
        quotas=Quotas(KeyLimits(tokens_per_minute=9), clock=lambda: 0.0),
    ) as live:
        live.engine.n_cached = 4  # of five prompt tokens
        assert [ask(live, "alice").status_code for _ in range(3)] == [200, 200, 429]
        assert ask(live, "bob").status_code == 200


def test_background_calls_count_until_they_end() -> None:
    with serve(quotas=Quotas(KeyLimits(concurrency=1))) as live:
        live.engine.hold("decode")
        made = httpx.post(f"{live.url}/v1/responses", json={"input": "a", "background": True})
        assert made.status_code == 200
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}).status_code == 429
        live.engine.release("decode")
        live.log.wait_for("in the background")
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}).status_code == 200
