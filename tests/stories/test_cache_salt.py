"""cache_salt: users of one key who do not share what is cached, on a whole server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.real import Real, demo_config, serving

PROMPT = "The lighthouse keeper wrote down every ship that passed. " * 40


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving(Path(), config=demo_config()) as running:
        yield running


def ask(real: Real, path: str, **options: Any) -> tuple[str, int]:
    """The reply, and how many tokens of the prompt were cached."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
    answer = httpx.post(f"{real.url}{path}", json=body, timeout=60).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def test_prefixes_are_shared_within_a_salt_alone(real: Real) -> None:
    text, n_cached = ask(real, "/v1/completions")
    assert n_cached == 0
    for salt in ("ann", "bob"):
        assert ask(real, "/v1/completions", cache_salt=salt) == (text, 0)
        again, n_again = ask(real, "/v1/completions", cache_salt=salt)
        assert again == text
        assert n_again > 300
    assert ask(real, "/v1/completions", cache_salt="ann", extra_key="x")[1] == 0
    assert ask(real, "/v1/completions")[1] > 300


def test_a_probe_looks_where_its_salt_says(real: Real) -> None:
    prompt = {"prompt": f"Again: {PROMPT}", "max_tokens": 4}
    salted = {**prompt, "cache_salt": "cleo"}
    httpx.post(f"{real.url}/v1/completions", json=salted, timeout=60).raise_for_status()

    def shared(body: dict[str, Any]) -> int:
        answer = httpx.post(f"{real.url}/v1/cache/probe", json=body, timeout=60)
        return int(answer.raise_for_status().json()["shared_tokens"])

    assert shared(salted) > 300
    assert shared(prompt) < 50


def test_what_is_ignored_is_named_in_a_header(real: Real) -> None:
    odd = "naïve\x01\r\nx-evil: 1"
    body = {"prompt": "hi", "max_tokens": 2, "priority": 3, odd: 1}
    for stream in (False, True):
        answer = httpx.post(f"{real.url}/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 200
        named = answer.headers["x-firn-ignored"]
        assert named.startswith("priority, na")
        assert named.isascii()
        assert "x-evil" not in answer.headers
    plain = httpx.post(f"{real.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert "x-firn-ignored" not in plain.headers


def test_a_stop_token_ends_a_reply_and_is_not_shown(real: Real) -> None:
    def tokens(**options: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **options}
        answer = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60).raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    free = tokens()
    assert free["finish_reason"] == "length"
    ids = httpx.post(
        f"{real.url}/v1/tokenize", json={"prompt": free["text"], "add_special_tokens": False}
    ).json()["ids"]
    last = next(i for i in range(len(ids)) if ids[i] not in ids[:i] and i > 2)
    cut = tokens(stop_token_ids=[ids[last]])
    assert cut["finish_reason"] == "stop"
    assert free["text"].startswith(cut["text"])
    assert len(cut["text"]) < len(free["text"])
    too_high = httpx.post(
        f"{real.url}/v1/completions", json={"prompt": "hi", "stop_token_ids": [10**6]}
    )
    assert too_high.json()["error"]["param"] == "stop_token_ids"
