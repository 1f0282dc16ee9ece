"""Anthropic's SDK: every kind of reply against the SDK's own types, which it does not check itself."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter
from target import HI, MODEL, URL, WEATHER

TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER}
MARK = {"type": "ephemeral"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": [{"type": "text", "text": "Be brief.", "cache_control": MARK}]},
    "tool": {"tools": [TOOL], "tool_choice": {"type": "any"}},
    "named tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    "cut off": {"max_tokens": 2},
    "stop": {"stop_sequences": ["e"]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
    "prefill": {"messages": [*HI, {"role": "assistant", "content": "It is"}]},
    "tool result": {
        "tools": [TOOL],
        "messages": [
            *HI,
            {"role": "assistant", "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "cache_control": MARK},
            ]},
        ],
    },
}  # fmt: skip


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    given = {"model": MODEL, "max_tokens": 80, "messages": HI, **body}
    answer = httpx.post(f"{URL}/v1/messages{path}", json=given, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def check(kind: Any, raw: str) -> Any:
    return TypeAdapter(kind).validate_json(raw, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    whole = check(Message, post("", CASES[name]).text)
    assert whole.stop_reason
    kinds = []
    for line in post("", {**CASES[name], "stream": True}).text.splitlines():
        if line.startswith("data: ") and '"type":"ping"' not in line:
            kinds.append(check(RawMessageStreamEvent, line.removeprefix("data: ")).type)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_tokens() -> None:
    raw = httpx.post(f"{URL}/v1/messages/count_tokens", json={"model": MODEL, "messages": HI}).text
    assert check(MessageTokensCount, raw).input_tokens > 0


def test_models() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for model in httpx.get(f"{URL}/v1/models", headers=headers).json()["data"]:
        assert ModelInfo.model_validate(model).capabilities


def test_errors() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "word " * 100_000}]
        )
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=9, messages=HI)
