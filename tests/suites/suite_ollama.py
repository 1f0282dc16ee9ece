"""Ollama's client: every kind of reply against the client's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest
from ollama import ChatResponse, GenerateResponse, ListResponse, ProcessResponse, ShowResponse
from target import CHAT_TOOL, HI, MODEL, URL, WEATHER

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {
        "options": {"num_predict": 5, "top_k": 3, "seed": 1, "num_ctx": 2048, "stop": ["e"]}
    },
    "json": {"format": "json"},
    "schema": {"format": WEATHER},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "thinking": {"think": True},
    "stays": {"keep_alive": "5m"},
}


def lines(path: str, body: dict[str, Any]) -> list[str]:
    options = {"num_predict": 60, "temperature": 0, **body.get("options", {})}
    given = {"model": MODEL, **body, "options": options}
    answer = httpx.post(f"{URL}/api{path}", content=json.dumps(given), timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.text.strip().splitlines()


@pytest.mark.parametrize("name", [*CASES, "tools"])
def test_chat(name: str) -> None:
    body = {"messages": HI, **CASES.get(name, {"tools": [CHAT_TOOL]})}
    (whole,) = lines("/chat", {**body, "stream": False})
    assert ChatResponse.model_validate_json(whole).done
    pieces = [ChatResponse.model_validate_json(line) for line in lines("/chat", body)]
    assert pieces[-1].done
    assert pieces[-1].eval_count
    if name == "logprobs":
        assert pieces[0].logprobs


@pytest.mark.parametrize("name", CASES)
def test_generate(name: str) -> None:
    body = {"prompt": "Hello!", **CASES[name]}
    (whole,) = lines("/generate", {**body, "stream": False})
    assert GenerateResponse.model_validate_json(whole).done
    assert GenerateResponse.model_validate_json(lines("/generate", body)[-1]).done_reason


def test_models() -> None:
    client = ollama.Client(URL)
    assert isinstance(client.list(), ListResponse)
    assert isinstance(client.ps(), ProcessResponse)
    assert isinstance(client.show(MODEL), ShowResponse)
