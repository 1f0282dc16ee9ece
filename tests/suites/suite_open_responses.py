"""The Open Responses specification's own acceptance cases, by the schema it requires of a response."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from target import MODEL, URL, WEATHER

REQUIRED = {
    "id": str, "object": str, "created_at": int, "completed_at": (int, type(None)), "status": str,
    "incomplete_details": (dict, type(None)), "model": str, "previous_response_id": (str, type(None)),
    "instructions": (str, list, type(None)), "output": list, "error": (dict, type(None)), "tools": list,
    "tool_choice": (str, dict), "truncation": str, "parallel_tool_calls": bool, "text": dict,
    "top_p": (int, float), "presence_penalty": (int, float), "frequency_penalty": (int, float),
    "top_logprobs": int, "temperature": (int, float), "reasoning": (dict, type(None)),
    "user": (str, type(None)), "usage": (dict, type(None)), "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)), "store": bool, "background": bool, "service_tier": str,
    "metadata": dict, "safety_identifier": (str, type(None)), "prompt_cache_key": (str, type(None)),
}  # fmt: skip
TOOL = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": WEATHER}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def user(text: str) -> dict[str, Any]:
    return message("user", text)


CASES: dict[str, dict[str, Any]] = {
    "text": {"input": [user("Say hello in exactly 3 words.")]},
    "system prompt": {"input": [message("system", "You are a pirate."), user("Say hello.")]},
    "tool": {"input": [user("What is the weather?")], "tools": [TOOL]},
    "turns": {"input": [user("I am Alice."), message("assistant", "Hello!"), user("Who am I?")]},
}


def ask(body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{URL}/v1/responses", json={"model": MODEL, **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def check(response: dict[str, Any]) -> None:
    for name, kind in REQUIRED.items():
        assert name in response, name
        assert isinstance(response[name], kind), name
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= set(tool)
    assert response["text"]["format"]["type"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_case(name: str, stream: bool) -> None:
    forced = (
        {"tool_choice": "required"} if name == "tool" else {}
    )  # a tiny model calls nothing itself
    answer = ask({**CASES[name], **forced, "max_output_tokens": 200, "stream": stream})
    if not stream:
        check(answer.json())
        last = answer.json()
    else:
        data = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        assert [event["sequence_number"] for event in data] == list(range(len(data)))
        states = [event["response"] for event in data if "response" in event]
        for state in states:
            check(state)
        kinds = {event["type"] for event in data}
        if name == "tool":
            assert {
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
            } <= kinds
        last = states[-1]
    assert last["status"] == "completed"
    assert last["completed_at"] >= last["created_at"]
    assert last["output"]
    if name == "tool":
        assert "function_call" in {item["type"] for item in last["output"]}
