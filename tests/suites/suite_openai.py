"""OpenAI's SDK: every kind of reply against the SDK's own types, which it does not check itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter
from target import CHAT_TOOL, HI, MODEL, URL, WEATHER

NAMED_SCHEMA = {"name": "w", "schema": WEATHER}
NAMED_TOOL = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "name": "w", "schema": WEATHER}
RESPONSE_TOOL = {"type": "function", **CHAT_TOOL["function"]}
CUSTOM = {"type": "custom", "custom": {"name": "note", "description": "Takes a note."}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3, "temperature": 0.7, "seed": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "schema": {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}},
    "json": {"response_format": {"type": "json_object"}},
    "required tool": {"tools": [CHAT_TOOL], "tool_choice": "required"},
    "named tool": {"tools": [CHAT_TOOL], "tool_choice": NAMED_TOOL},
    "custom tool": {"tools": [CUSTOM], "tool_choice": "required"},
    "functions": {"functions": [CHAT_TOOL["function"]], "function_call": {"name": "weather"}},
    "strict tool": {"tools": [{**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "strict": True}}]},
    "cut off": {"max_completion_tokens": 2},
    "stop": {"stop": ["e"]},
    "reasoning": {"reasoning_effort": "low"},
}  # fmt: skip
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructions": {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]},
    "tool": {"tools": [RESPONSE_TOOL], "tool_choice": "required"},
    "custom tool": {"tools": [{"type": "custom", "name": "note"}], "tool_choice": "required"},
    "schema": {"text": {"format": SCHEMA}},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "cut off": {"max_output_tokens": 2},
    "reasoning": {"reasoning": {"effort": "low", "summary": "auto"}},
    "not stored": {"store": False, "include": ["reasoning.encrypted_content"]},
}


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{URL}/v1{path}", json={"model": MODEL, **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def check(kind: Any, raw: str) -> Any:
    """The JSON as the SDK's type, without any conversion. Unions take the member that fits."""
    return TypeAdapter(kind).validate_json(raw, strict=True)


def events(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")


@pytest.mark.parametrize("name", CHATS)
def test_chat(name: str) -> None:
    body = {"messages": HI, "max_completion_tokens": 80, **CHATS[name]}
    whole = check(ChatCompletion, post("/chat/completions", body).text)
    assert whole.choices[0].finish_reason
    streamed = post(
        "/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    if name == "custom tool":
        return  # the SDK's chunks only know functions
    chunks = [check(ChatCompletionChunk, raw) for raw in events(streamed.text)]
    assert chunks[-1].usage
    if whole.choices[0].message.tool_calls:
        assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"echo": True}, {"n": 2}, {"stop": "."}])
def test_completions(options: dict[str, Any]) -> None:
    body = {"prompt": "Hello", "max_tokens": 10, **options}
    check(Completion, post("/completions", body).text)
    for raw in events(post("/completions", {**body, "stream": True}).text):
        # The SDK has one type for both, in which a choice has always ended.
        check(Completion, raw.replace('"finish_reason":null', '"finish_reason":"stop"'))


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name: str) -> None:
    body = {"input": "Hello!", "max_output_tokens": 80, **RESPONSES[name]}
    whole = check(Response, post("/responses", body).text)
    assert whole.output
    for raw in events(post("/responses", {**body, "stream": True}).text):
        check(ResponseStreamEvent, raw)


def test_stored_responses() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=9)
    again = client.responses.with_raw_response.retrieve(first.id)
    check(Response, again.text)
    second = client.responses.create(
        model=MODEL, input="Again?", previous_response_id=first.id, max_output_tokens=9
    )
    assert second.previous_response_id == first.id
    assert client.responses.input_items.list(second.id).data
    client.responses.delete(first.id)


def test_compaction() -> None:
    raw = post(
        "/responses/compact", {"input": [{"role": "assistant", "content": "It is four."}]}
    ).text
    assert check(CompactedResponse, raw).output[-1].type == "compaction"


def test_models() -> None:
    listed = httpx.get(f"{URL}/v1/models").json()
    for model in listed["data"]:
        check(Model, json.dumps(model))


def test_embeddings() -> None:
    answer = httpx.post(f"{URL}/v1/embeddings", json={"model": MODEL, "input": "a"})
    if answer.status_code == 400:
        pytest.skip("the model computes no embeddings")
    check(CreateEmbeddingResponse, answer.text)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, openai.BadRequestError),
    ],
)
def test_errors(body: dict[str, Any], error: type[openai.APIStatusError]) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HI, **body})
    assert caught.value.body["message"]
