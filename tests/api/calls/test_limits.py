"""Limits of one client: requests per minute, length of a reply, time of a request."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.api.http.auth import Keys
from firn.api.http.layers import MAX_CLIENTS, RequestRate
from firn.api.services import ApiLimits
from tests.api.live import GREETING, serve

HI: Any = [{"role": "user", "content": "hi"}]

# --- requests per minute -------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_client_has_a_limit_of_requests_per_minute() -> None:
    clock = Clock()
    rate = RequestRate(3, clock)
    assert [rate.take("a") for _ in range(3)] == [0, 0, 0]
    clock.now += 20
    assert rate.take("a") == 40
    assert rate.take("b") == 0
    clock.now += 40
    assert rate.take("a") == 0


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_no_window_of_a_minute_holds_more(gaps: list[int], per_minute: int) -> None:
    clock = Clock()
    rate, let_in = RequestRate(per_minute, clock), []
    for gap in gaps:
        clock.now += gap
        wait_s = rate.take("a")
        assert 0 <= wait_s <= 60
        if not wait_s:
            let_in.append(clock.now)
    for i, start in enumerate(let_in):
        assert sum(start <= t < start + 60 for t in let_in[i:]) <= per_minute


def test_the_number_of_remembered_clients_is_bounded() -> None:
    rate = RequestRate(1, Clock())
    for i in range(MAX_CLIENTS + 50):
        rate.take(f"client {i}")
    assert len(rate._times) == MAX_CLIENTS


def test_requests_over_the_limit_get_retry_after() -> None:
    with serve(limits=ApiLimits(requests_per_minute=2)) as live:
        client = live.openai()
        for _ in range(2):
            client.completions.create(model="fake", prompt="a")
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="fake", prompt="a")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        with pytest.raises(anthropic.RateLimitError, match="More than 2 requests in a minute"):
            live.anthropic().messages.create(model="fake", max_tokens=4, messages=HI)
        assert "error=rate_limit_exceeded" in live.log.wait_for(" 429 ")
        # Only POSTs count, and refused ones do not.
        assert client.models.list().data
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert len(live.engine.jobs) == 2


def test_each_key_has_its_own_minute() -> None:
    with serve(limits=ApiLimits(requests_per_minute=1), keys=Keys(["a", "b"])) as live:
        for key in ("a", "b"):
            live.openai(api_key=key).completions.create(model="fake", prompt="a")
            with pytest.raises(openai.RateLimitError):
                live.openai(api_key=key).completions.create(model="fake", prompt="a")
        for _ in range(3):  # callers without a valid key are not counted
            with pytest.raises(openai.AuthenticationError):
                live.openai(api_key="c").completions.create(model="fake", prompt="a")


@pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.2 is no address of a Mac")
def test_without_keys_each_address_has_its_own_minute() -> None:
    with serve(limits=ApiLimits(requests_per_minute=1)) as live:
        for address in ("127.0.0.1", "127.0.0.2"):
            transport = httpx.HTTPTransport(local_address=address)
            with httpx.Client(base_url=live.url, transport=transport) as client:
                answers = [client.post("/v1/completions", json={"prompt": "a"}) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 429]


# --- tokens of a reply ---------------------------------------------------------------------


def test_max_tokens_over_the_servers_limit_is_refused() -> None:
    with serve(limits=ApiLimits(max_request_tokens=8)) as live:
        client = live.openai()
        with pytest.raises(openai.BadRequestError, match="at most 8 on this server"):
            client.chat.completions.create(model="fake", messages=HI, max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="at most 8"):
            client.responses.create(model="fake", input="hi", max_output_tokens=9)
        with pytest.raises(anthropic.BadRequestError, match="at most 8"):
            live.anthropic().messages.create(model="fake", max_tokens=9, messages=HI)
        reply = client.chat.completions.create(model="fake", messages=HI, max_tokens=8)
        assert reply.choices[0].message.content == GREETING[:8]
        client.chat.completions.create(model="fake", messages=HI)
        assert live.engine.jobs[-1].max_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_more_replies_than_can_ever_run_are_refused_with_a_status(stream: bool) -> None:
    with serve(limits=ApiLimits(max_rows=4)) as live:
        create = live.openai().chat.completions.create
        with pytest.raises(openai.BadRequestError, match="5 replies exceed the limit of 4"):
            create(model="fake", messages=HI, n=5, stream=stream)
        with pytest.raises(openai.BadRequestError, match="5 replies exceed the limit of 4"):
            live.openai().completions.create(model="fake", prompt="a", n=5, stream=stream)
        assert len(create(model="fake", messages=HI, n=4).choices) == 4


def test_more_prompts_than_can_ever_wait_are_refused_for_good() -> None:
    with serve(limits=ApiLimits(max_requests=3)) as live:
        create = live.openai().completions.create
        with pytest.raises(
            openai.BadRequestError, match="4 prompts in one request exceed the limit of 3"
        ):
            create(model="fake", prompt=["a"] * 4)
        assert len(create(model="fake", prompt=["a"] * 3).choices) == 3


# --- time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_a_request_over_its_time_is_a_504(stage: Any) -> None:
    with serve(limits=ApiLimits(timeout_s=0.05)) as live:
        live.engine.hold(stage)
        with pytest.raises(openai.InternalServerError) as caught:
            live.openai().chat.completions.create(model="fake", messages=HI)
        assert caught.value.status_code == 504
        assert "longer than 0.05 s" in caught.value.message
        live.engine.wait_for(lambda engine: len(engine.cancelled) == 1)
        assert "error=timeout" in live.log.wait_for(" 504 ")
        with pytest.raises(anthropic.InternalServerError) as other:
            live.anthropic().messages.create(model="fake", max_tokens=4, messages=HI)
        assert other.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    with serve(limits=ApiLimits(timeout_s=0.2)) as live:
        live.engine.hold("decode", after=3)
        stream = live.openai().chat.completions.create(model="fake", messages=HI, stream=True)
        said: list[str] = []
        with pytest.raises(openai.APIError, match="longer than"):
            said.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        assert "".join(said) == GREETING[:3]
        live.engine.wait_for(lambda engine: len(engine.cancelled) == 1)
        assert live.n_calls() == 0


def test_a_request_within_its_time_is_answered() -> None:
    with serve(limits=ApiLimits(timeout_s=60)) as live:
        assert live.openai().completions.create(model="fake", prompt="a").choices[0].text
        assert live.n_calls() == 0
