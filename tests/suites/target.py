"""The server that the suites talk to. `tools/suites.py` starts it and names it here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

URL = os.environ["FIRN_SUITES_URL"]
MODEL = os.environ["FIRN_SUITES_MODEL"]
DATA = Path(os.environ["FIRN_SUITES_DATA"])
"""Archives of packages that are read, but not installed."""

HI: list[Any] = [{"role": "user", "content": "Hello!"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 20}},
    "required": ["place"],
    "additionalProperties": False,
}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER},
}
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


N_TOGETHER = 8
BIAS = {'"': 20, "}": 20, "]": 20, ",": 20, ":": 20, '",': 20, '"}': 20, '"]': 20, "\n": -100}


def chats(bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to these chats, several of which are asked at a time.

    Tokens that end a JSON value are made likely: a tiny model would write endless strings.
    """
    biased = ((_ids(text), bias) for text, bias in BIAS.items())
    bias = {str(ids[0]): bias for ids, bias in biased if len(ids) == 1}

    def ask(body: dict[str, Any]) -> httpx.Response:
        given = {"model": MODEL, "logit_bias": bias, **body}
        return httpx.post(f"{URL}/v1/chat/completions", json=given, timeout=300)

    with ThreadPoolExecutor(N_TOGETHER) as pool:
        return list(pool.map(ask, bodies))


def _ids(text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{URL}/v1/tokenize", json=body).json()["ids"]
    return ids
