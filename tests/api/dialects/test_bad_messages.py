"""Bodies that the Anthropic and Responses dialects refuse with a 400 that names the parameter."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.api.dialects import discover
from tests.api.live import Live

NESTED: Any = []
for _ in range(150):
    NESTED = [NESTED]

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"model": ["fake"]}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e999}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"cache": "off"}, "cache"),
    ({"stream": "yes"}, "stream"),
    ({"tools": {}}, "tools"),
    ({"tools": ["a"]}, "tools[0]"),
    ({"tools": [{"type": 5}]}, "tools[0].type"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "never"}}, "tool_choice.type"),
]


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def source(**given: Any) -> dict[str, Any]:
    return content({"type": "image", "source": given})


RESULT = {"type": "tool_result", "tool_use_id": "a"}
AT = "messages[0].content[0]"
BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
    (content("hi"), AT),
    (content({}), f"{AT}.type"),
    (content({"type": 5}), f"{AT}.type"),
    (content({"type": "video"}), f"{AT}.type"),
    (content({"type": "text"}), f"{AT}.text"),
    (content({"type": "text", "text": 5}), f"{AT}.text"),
    (content({"type": "tool_use", "id": "a", "name": "b", "input": {}}), f"{AT}.type"),
    (content({"type": "text", "text": "a", "cache_control": 5}), f"{AT}.cache_control"),
    (content({"type": "text", "text": "a", "cache_control": {}}), f"{AT}.cache_control.type"),
    (
        content({"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "9y"}}),
        f"{AT}.cache_control.ttl",
    ),
    (content({"type": "image"}), f"{AT}.source"),
    (source(), f"{AT}.source.type"),
    (source(type="file", file_id="f"), f"{AT}.source.type"),
    (source(type="base64", data="AAAA"), f"{AT}.source.media_type"),
    (source(type="base64", media_type="image/png"), f"{AT}.source.data"),
    (source(type="base64", media_type="image/png", data=""), f"{AT}.source.data"),
    (source(type="url", url=5), f"{AT}.source.url"),
    (source(type="base64", media_type="image/png", data="AAAA"), f"{AT}.source"),
    (content({"type": "document", "source": {"type": "base64"}}), f"{AT}.source.media_type"),
    (content({"type": "document", "source": {"type": "file", "file_id": "f"}}), f"{AT}.source.type"),
    (content({"type": "audio"}), f"{AT}.type"),
    (content({"type": "tool_result"}), f"{AT}.tool_use_id"),
    (content(RESULT | {"content": 5}), f"{AT}.content"),
    (content(RESULT | {"content": [5]}), f"{AT}.content[0]"),
    (content(RESULT | {"is_error": "yes"}), f"{AT}.is_error"),
    (content({"type": "thinking"}, role="assistant"), f"{AT}.thinking"),
    (content({"type": "thinking", "thinking": 5}, role="assistant"), f"{AT}.thinking"),
    (content({"type": "tool_use", "id": "a"}, role="assistant"), f"{AT}.name"),
    (content({"type": "tool_use", "name": "a"}, role="assistant"), f"{AT}.id"),
    (content({"type": "tool_use", "id": "a", "name": "b", "input": "x"}, role="assistant"),
     f"{AT}.input"),
    ({"messages": [{"role": "user", "content": "refuse this"}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [5]}, "system[0]"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"tools": [{}]}, "tools[0].name"),
    ({"tools": [{"name": ""}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": "on"}, "thinking"),
    ({"thinking": {}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
]  # fmt: skip


def item(**given: Any) -> dict[str, Any]:
    return {"input": [given]}


BAD_RESPONSES: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": {}}, "input"),
    ({"input": []}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [{}]}, "input[0].role"),
    (item(role="king", content="a"), "input[0].role"),
    (item(role="tool", content="a"), "input[0].role"),
    (item(role="user", content=5), "input[0].content"),
    (item(role="user", content=[5]), "input[0].content[0]"),
    (item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text"),
    (item(role="user", content=[{"type": "input_file"}]), "input[0].content[0]"),
    (item(role="user", content=[{"type": "input_audio"}]), "input[0].content[0].type"),
    (item(role="user", content=[{"type": "input_image"}]), "input[0].content[0].image_url"),
    (
        item(role="user", content=[{"type": "input_image", "image_url": "data:image/png,A"}]),
        "input[0].content[0]",
    ),
    (item(type=5), "input[0].type"),
    (item(type="dream"), "input[0].type"),
    (item(type="function_call", name="a", arguments="{}"), "input[0].call_id"),
    (item(type="function_call", call_id="a", arguments="{}"), "input[0].name"),
    (item(type="function_call", call_id="a", name="b", arguments=5), "input[0].arguments"),
    (item(type="function_call_output", call_id="a"), "input[0].output"),
    (item(type="function_call_output", output="a"), "input[0].call_id"),
    (item(type="function_call_output", call_id="a", output=5), "input[0].output"),
    (item(type="custom_tool_call", call_id="a", name="b"), "input[0].input"),
    (item(type="reasoning", summary="a"), "input[0].summary"),
    (item(type="reasoning", summary=[{}]), "input[0].summary[0].type"),
    (item(type="reasoning", content=[{"type": "reasoning_text"}]), "input[0].content[0].text"),
    (item(type="reasoning", encrypted_content=5), "input[0].encrypted_content"),
    (item(type="item_reference"), "input[0].id"),
    (item(type="item_reference", id="msg_1"), "input[0].id"),
    (item(role="user", content="refuse this"), "input"),
    ({"instructions": 5}, "instructions"),
    ({"instructions": [5]}, "instructions[0]"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "custom", "name": "a", "format": 5}]}, "tools[0].format"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, "tools[0].tools[0]"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"text": "plain"}, "text"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"reasoning": "hard"}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "loud"}}, "reasoning.summary"),
    ({"include": "all"}, "include"),
    ({"include": [5]}, "include[0]"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": float("inf")}}, None),
    ({"store": "yes"}, "store"),
    ({"background": 1}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"user": 5}, "user"),
    ({"stop": 5}, "stop"),
    ({"stream_options": []}, "stream_options"),
]

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5, "messages": [HI]},
    "/v1/responses": {"input": "hi"},
}
TABLE = [
    *(("/v1/messages", body, param) for body, param in SHARED + BAD_MESSAGES),
    *(("/v1/responses", body, param) for body, param in SHARED + BAD_RESPONSES),
]


@pytest.fixture(scope="module")
def http(shared_live: Live) -> Any:
    with httpx.Client(base_url=shared_live.url, timeout=60) as client:
        yield client


def send(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    raw = json.dumps({"model": "fake", **ROUTES[path], **body})
    return http.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), TABLE, ids=lambda v: json.dumps(v)[:60])
def test_a_bad_body_is_a_400_that_names_the_parameter(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    answer = send(http, path, {"stream": stream, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    if path == "/v1/responses":
        assert error["param"] == param
    else:
        assert answer.json()["type"] == "error"
        assert param in error["message"] or param in ("messages", "logit_bias", f"{AT}.source")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "input": "\\ud800"}',
        json.dumps({"input": NESTED, "messages": NESTED}).encode(),
        json.dumps({"input": "a", "messages": [HI], "tools": [{"input_schema": NESTED}]}).encode(),
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_a_body_that_is_not_a_json_object_is_a_400(
    http: httpx.Client, path: str, raw: bytes
) -> None:
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


WORDS = ["text", "image", "tool_use", "tool_result", "thinking", "message", "function_call", "user"]
KEYS = ["type", "role", "content", "text", "source", "input", "name", "id", "call_id", "output"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = {d.path: sorted(d.schema()["properties"]) for d in discover() if d.path in ROUTES}


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_junk_is_refused_or_answered(http: httpx.Client, path: str, data: st.DataObject) -> None:
    names = st.sampled_from(FIELDS[path])
    body = data.draw(st.dictionaries(names, JUNK, max_size=3))
    answer = send(http, path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


OTHERS: list[tuple[str, Any]] = [
    ("/v1/messages/count_tokens", {}),
    ("/v1/messages/count_tokens", {"messages": [5]}),
    ("/v1/messages/count_tokens", {"messages": [HI], "model": 5}),
    ("/v1/responses/input_tokens", {}),
    ("/v1/responses/input_tokens", {"input": [5]}),
    ("/v1/tokenize", {}),
    ("/v1/tokenize", {"text": 5}),
    ("/v1/tokenize", {"text": "\ud800"}),
    ("/v1/tokenize", {"messages": []}),
    ("/v1/tokenize", {"messages": [{"role": "user", "content": "refuse this"}]}),
    ("/v1/tokenize", {"text": "a", "add_special_tokens": "no"}),
    ("/v1/detokenize", {}),
    ("/v1/detokenize", {"ids": 5}),
    ("/v1/detokenize", {"ids": [-1]}),
    ("/v1/detokenize", {"ids": [10**9]}),
    ("/v1/detokenize", {"ids": ["a"]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", []),
]


@pytest.mark.parametrize(("path", "body"), OTHERS, ids=lambda v: str(v)[:60])
def test_bad_bodies_of_other_routes_are_400(http: httpx.Client, path: str, body: Any) -> None:
    answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert http.post(path, content=b"{}").status_code == 400, "it says no type"
    assert http.get(path).status_code in (404, 405)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "order=up"])
def test_a_bad_page_of_input_items_is_a_400(http: httpx.Client, query: str) -> None:
    made = http.post("/v1/responses", json={"input": "hi"}).json()
    answer = http.get(f"/v1/responses/{made['id']}/input_items?{query}")
    assert answer.status_code == 400
