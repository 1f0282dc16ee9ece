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
ENDS = ('"', '",', '"}', '"]', "}", "]")
LIKELIER = (5, 30)
"""How much likelier tokens that end a JSON value are made: with the second, a string ends at once."""


def chats(bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to these chats, several of which are asked at a time.

    A tiny model would write endless strings, so their ends are made likelier, and once more in what was
    cut off all the same.
    """

    def ask(body: dict[str, Any]) -> httpx.Response:
        for bias in biases:
            given = {"model": MODEL, "logit_bias": bias, **body}
            answer = httpx.post(f"{URL}/v1/chat/completions", json=given, timeout=300)
            if answer.status_code != 200 or not _is_cut(answer):
                break
        return answer

    ids = [found[0] for found in map(_ids, ENDS) if len(found) == 1]
    blank = {str(found[0]): -100 for found in [_ids("\n")] if len(found) == 1}
    biases = [{**dict.fromkeys(map(str, ids), more), **blank} for more in LIKELIER]
    with ThreadPoolExecutor(N_TOGETHER) as pool:
        return list(pool.map(ask, bodies))


def _is_cut(answer: httpx.Response) -> bool:
    return any(choice["finish_reason"] == "length" for choice in answer.json()["choices"])


def _ids(text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{URL}/v1/tokenize", json=body).json()["ids"]
    return ids
