"""Bad input: a status and an error object, never a 5xx, never an empty 200."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.api.calls.event_router import EventRouter
from firn.api.dialects import discover
from firn.api.services import ApiLimits
from firn.core.errors import QueueFull, StepFailed
from firn.core.values import Job
from tests import families
from tests.api.live import GREETING, Live, serve

NESTED: Any = "x"
for _ in range(150):
    NESTED = [NESTED]

BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": float("nan")}, "top_p"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias.1"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"top_p": {}}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": "lucky"}, "seed"),
    ({"seed": 2**80}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": "a"}, "frequency_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
    ({"logit_bias": {"1": None}}, "logit_bias.1"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"cache": "off"}, "cache"),
    ({"cache": {"read": 0}}, "cache.read"),
    ({"cache": {"ttl": -1}}, "cache.ttl"),
    ({"cache": {"ttl": "1h"}}, "cache.ttl"),
    ({"model": 5}, "model"),
    ({"model": ["fake"]}, "model"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"text": "hi"}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio", "text": "a"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": "a"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "refuse this"}]}, "messages"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": ["a"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
     "tools[0].function.parameters"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
    ({"functions": [{"description": "a"}]}, "functions[0].name"),
    ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
    ({"functions": [{"name": "a"}], "tools": []}, "functions"),
    ({"function_call": "required"}, "function_call"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"chat_template_kwargs": "a"}, "chat_template_kwargs"),
    ({"parallel_tool_calls": "a"}, "parallel_tool_calls"),
]  # fmt: skip
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": "a" * 5000}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": 5}, "suffix"),
    ({"best_of": 0}, "best_of"),
]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
TABLE = [
    (path, body, param)
    for path, rows in (
        ("/v1/chat/completions", BAD_PARAMETERS + BAD_CHATS),
        ("/v1/completions", BAD_PARAMETERS + BAD_COMPLETIONS),
    )
    for body, param in rows
]
EVERY_FIELD = {name for dialect in discover() for name in dialect.schema()["properties"]}


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.fixture(scope="module")
def http(shared_live: Live) -> Any:
    with httpx.Client(base_url=shared_live.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), TABLE, ids=lambda v: json.dumps(v)[:50])
def test_a_bad_body_is_a_400_that_names_the_parameter(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    whole = {"model": "fake", **ROUTES[path], "stream": stream, **body}
    answer = http.post(
        path, content=json.dumps(whole), headers={"content-type": "application/json"}
    )
    error = check_error(answer, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"hi"',
        b"\xff\xfe",
        b'{"model": "fake", "prompt": "\xff", "messages": []}',
        b'{"temperature": 1e999, "prompt": "a", "messages": [{"role": "user"}]}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        json.dumps({"prompt": NESTED, "messages": NESTED}).encode(),
        json.dumps({"prompt": "a", "chat_template_kwargs": {"a": NESTED}}).encode(),
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_a_body_that_is_not_a_json_object_is_a_400(
    http: httpx.Client, path: str, raw: bytes
) -> None:
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    check_error(answer, 400)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "content", "5"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(st.sampled_from(sorted(EVERY_FIELD)), JUNK, max_size=4))
def test_junk_is_refused_or_answered(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    raw = json.dumps({**ROUTES[path], "max_tokens": 3, **body})
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        check_error(answer, 400 if answer.status_code != 404 else 404)
    elif "event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("given_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_of_web_pages_are_refused(
    http: httpx.Client, path: str, given_type: str | None
) -> None:
    headers = {"origin": "http://evil.example"}
    headers |= {"content-type": given_type} if given_type else {}
    error = check_error(http.post(path, content=b"{}", headers=headers), 400)
    assert "content-type" in error["message"]


def test_an_unpaired_surrogate_in_tool_arguments_is_a_broken_character() -> None:
    """Some model wrote it, and the history has it from now on: a 400 would end the conversation."""
    function = {"name": "a", "arguments": '{"b": "x\\ud800y"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    with serve(tokenizer=families.tokenizer("qwen3")) as live:
        answer = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200
        assert '"arguments": {"b": "x\ufffdy"}' in live.prompt


def test_unknown_fields_and_nulls_are_fine(shared_live: Live) -> None:
    reply = shared_live.openai().chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": None}],  # type: ignore[list-item, misc]
        temperature=None,
        extra_body={"surely_unknown": {"a": [1]}},
    )
    assert reply.choices[0].message.content == GREETING
    line = shared_live.log.wait_for("surely_unknown")
    assert line.startswith("req_")


def test_unknown_models_are_404(shared_live: Live) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        shared_live.openai().chat.completions.create(
            model="other-9", messages=[{"role": "user", "content": "hi"}]
        )
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_prompt_that_is_too_long_names_both_numbers(shared_live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        shared_live.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x" * 5000}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message
    assert "50" in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "//v1/responses", "/v1/responses"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/v1/api/chat", "/api/chat"),
    ],
)
def test_a_base_url_that_is_a_little_off(
    http: httpx.Client, method: str, path: str, meant: str
) -> None:
    url = f"{str(http.base_url).rstrip('/')}{path}"
    message = check_error(http.request(method, url), 404)["message"]
    assert message.startswith(f"There is no {method} {path} here; {meant} is: check the base URL")


def test_unknown_routes_are_404_and_methods_405(http: httpx.Client) -> None:
    assert check_error(http.get("/nowhere"), 404)["code"] == "not_found"
    assert check_error(http.post("/v1/chat/completions/"), 404)
    assert check_error(http.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert http.get("/v1/completions").headers["allow"] == "POST"
    assert "use POST." in http.get("/v1/completions").json()["error"]["message"]
    check_error(http.delete("/v1/models"), 405)
    check_error(http.get("/v1/models/other"), 404)
    check_error(http.get("/a%0Ab%00c"), 404)


# --- too much ------------------------------------------------------------------------------


def test_bodies_over_the_limit_are_413() -> None:
    with serve(limits=ApiLimits(body_nbytes=1000)) as live, httpx.Client(base_url=live.url) as http:
        for path in ROUTES:
            headers = {"content-type": "application/json"}
            check_error(http.post(path, content=b"x" * 1001, headers=headers), 413)

            def pieces() -> Any:  # no content-length: chunked
                for _ in range(300):
                    yield b"x" * 1000

            check_error(http.post(path, content=pieces(), headers=headers), 413)
            assert http.post(path, json=ROUTES[path]).status_code == 200


def test_a_full_queue_is_a_429_with_retry_after(live: Live) -> None:
    live.engine.refusal = QueueFull(retry_after_s=3)
    for stream in (False, True):
        for path, body in ROUTES.items():
            answer = httpx.post(f"{live.url}{path}", json={**body, "stream": stream})
            error = check_error(answer, 429)
            assert error["type"] == "rate_limit_error"
            assert answer.headers["retry-after"] == "3"
    with pytest.raises(openai.RateLimitError):
        live.openai().completions.create(model="fake", prompt="a")


def test_a_queue_that_fills_between_two_prompts_cancels_the_first(live: Live) -> None:
    """The part of the call that was queued is cancelled."""
    live.engine.hold("queue")

    def once(job: Job, choice: int) -> list[int]:
        live.engine.refusal = QueueFull()
        return []

    live.engine.reply = once
    check_error(httpx.post(f"{live.url}/v1/completions", json={"prompt": ["a", "b"]}), 429)
    (job,) = live.engine.jobs
    assert live.engine.cancelled == [job.id]


def test_calls_at_once_are_bounded() -> None:
    with serve(event_router=EventRouter(max_calls=0)) as live:
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        check_error(answer, 429)
        assert answer.headers["retry-after"]


# --- our own faults ------------------------------------------------------------------------


def test_a_failure_before_the_first_byte_is_a_status(live: Live) -> None:
    live.engine.hold("decode", after=3)
    with httpx.Client(base_url=live.url, timeout=60) as http:
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json={"prompt": "a"}))
        )
        ask.start()
        live.engine.wait_for(lambda e: e.n_sent() == 3)
        live.engine.fail(StepFailed("the model broke"))
        ask.join()
    error = check_error(answers[0], 500)
    assert error["code"] == "generation_failed"
    assert error["message"] == "the model broke"


class BrokenPrompts:
    def __init__(self, prompts: Any) -> None:
        self._prompts = prompts

    def make(self, source: Any, *, reasoning: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    def tail(self, prompt: Any) -> str:
        return ""

    def ends(self, source: Any) -> frozenset[int]:
        return frozenset()


def test_an_unexpected_exception_is_logged_once_and_not_shown() -> None:
    with serve(wrap_prompts=BrokenPrompts) as live:
        for stream in (False, True):
            answer = httpx.post(
                f"{live.url}/v1/completions", json={"prompt": "a", "stream": stream}
            )
            error = check_error(answer, 500)
            assert "secret" not in answer.text
            assert answer.headers["x-request-id"] in error["message"]
            live.log.wait_for(f"{answer.headers['x-request-id']} POST /v1/completions 500")
            mine = [r for r in live.log.records if answer.headers["x-request-id"] in r.getMessage()]
            assert [r.levelno for r in mine] == [logging.ERROR, logging.INFO]
            assert mine[0].exc_info is not None
        assert live.n_calls() == 0
