"""Streams that wait, fail or are stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest

from firn.api.services import ApiLimits
from firn.core.errors import ShuttingDown, StepFailed
from tests.api.live import GREETING, Live, serve

PATHS = ["/v1/chat/completions", "/v1/completions"]
BODY = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": True}


@contextmanager
def streaming(live: Live, path: str) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    with httpx.stream("POST", f"{live.url}{path}", json=BODY, timeout=60) as answer:
        yield answer, answer.iter_lines()


def read_until(lines: Iterator[str], text: str) -> list[str]:
    seen: list[str] = []
    while not seen or text not in seen[-1]:
        seen.append(next(lines))
    return seen


@pytest.mark.parametrize("path", PATHS)
def test_the_headers_keep_proxies_from_buffering(shared_live: Live, path: str) -> None:
    with streaming(shared_live, path) as (answer, lines):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "no-cache" in answer.headers["cache-control"]
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-request-id"].startswith("req_")
        assert read_until(lines, "[DONE]")


@pytest.mark.parametrize("path", PATHS)
def test_a_queued_stream_is_kept_alive(path: str) -> None:
    with serve(limits=ApiLimits(keep_alive_s=0.01)) as live:
        live.engine.hold("queue")
        with streaming(live, path) as (answer, lines):
            assert answer.status_code == 200
            for _ in range(3):
                read_until(lines, ": keep-alive")
            live.engine.release("queue")
            assert read_until(lines, "[DONE]")


def test_prefill_shows_its_progress(live: Live) -> None:
    live.engine.chunk = 8
    with streaming(live, "/v1/chat/completions") as (_, lines):
        seen = [line for line in read_until(lines, "[DONE]") if line.startswith(":")]
    n_prompt = len(live.engine.jobs[0].prompt)
    assert seen == [f": prefill {n}/{n_prompt}" for n in range(8, n_prompt, 8)]


def test_the_openai_client_ignores_comments() -> None:
    with serve(limits=ApiLimits(keep_alive_s=0.01)) as live:
        live.engine.chunk = 4
        live.engine.hold("decode", after=3)
        stream = live.openai().completions.create(model="fake", prompt="hi there", stream=True)
        text = next(stream).choices[0].text
        live.engine.release("decode")
        assert text + "".join(chunk.choices[0].text for chunk in stream) == GREETING


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_in_a_stream_is_its_last_event(live: Live, path: str) -> None:
    live.engine.hold("decode", after=3)
    with streaming(live, path) as (answer, lines):
        assert answer.status_code == 200
        read_until(lines, "data:")
        live.engine.wait_for(lambda e: e.n_sent() == 3)
        live.engine.fail(StepFailed("the model broke"))
        rest = [line for line in lines if line]
    assert '"error"' in rest[-1]
    assert "the model broke" in rest[-1]
    assert "[DONE]" not in "".join(rest)
    assert "finish=generation_failed" in live.log.wait_for(path)


def test_the_openai_client_sees_the_failure(live: Live) -> None:
    live.engine.hold("decode", after=3)
    stream = live.openai().completions.create(model="fake", prompt="a", stream=True)
    next(stream)
    live.engine.fail(StepFailed("the model broke"))
    with pytest.raises(openai.APIError, match="the model broke"):
        list(stream)


def test_every_stream_gets_an_error_when_the_engine_dies(live: Live) -> None:
    live.engine.hold("decode", after=3)
    stream = live.openai().completions.create(model="fake", prompt="a", stream=True)
    next(stream)
    answers: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        )
    )
    ask.start()
    live.engine.wait_for(lambda e: len(e.jobs) == 2)
    assert httpx.get(f"{live.url}/ready").status_code == 200
    live.engine.die()
    with pytest.raises(openai.APIError):
        list(stream)
    ask.join()
    assert answers[0].status_code == 503
    assert httpx.get(f"{live.url}/ready").status_code == 503
    assert httpx.get(f"{live.url}/health").json()["engine"]["alive"] is False
    after = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
    assert after.status_code == 503
    assert after.json()["error"]["code"] == "engine_dead"


def test_an_unexpected_exception_in_a_stream_is_its_last_event(live: Live) -> None:
    """A token that no tokenizer knows breaks the reader, on the asyncio thread."""
    live.engine.reply = lambda *_: [72, 10**9, 72]
    with streaming(live, "/v1/completions") as (answer, lines):
        assert answer.status_code == 200
        rest = [line for line in lines if line]
        assert answer.headers["x-request-id"] in rest[-1]
    assert '"internal_error"' in rest[-1]
    (job,) = live.engine.jobs
    live.engine.wait_for(lambda e: e.cancelled == [job.id])
    live.log.wait_for("failed while its reply was streamed")
    assert "finish=internal_error" in live.log.wait_for(" reply=")
    assert live.openai().models.list().data  # the server keeps running


# --- stopping ------------------------------------------------------------------------------


def test_draining_finishes_running_calls_and_refuses_new_ones(live: Live) -> None:
    live.engine.hold("decode", after=3)
    stream = live.openai().completions.create(model="fake", prompt="a", stream=True)
    text = next(stream).choices[0].text
    live.on_loop(live.event_router.drain)
    assert live.n_calls() == 1
    refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert httpx.get(f"{live.url}/ready").status_code == 503
    assert httpx.get(f"{live.url}/health").status_code == 200
    live.engine.release("decode")
    assert text + "".join(chunk.choices[0].text for chunk in stream) == GREETING


def test_running_calls_can_be_ended_with_an_error(live: Live) -> None:
    live.engine.hold("decode", after=3)
    stream = live.openai().completions.create(model="fake", prompt="a", stream=True)
    next(stream)
    answers: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{live.url}/v1/completions", json={"prompt": ["a", "b"]}, timeout=60)
        )
    )
    ask.start()
    live.engine.wait_for(lambda e: len(e.jobs) == 3 and e.n_sent() == 9)
    live.on_loop(live.event_router.drain)
    live.on_loop(live.event_router.fail_all, ShuttingDown())
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    ask.join()
    assert answers[0].status_code == 503
    live.engine.wait_for(lambda e: len(e.cancelled) == 3)
    assert live.n_calls() == 0
