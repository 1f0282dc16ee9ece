"""/v1/cache: statistics, probe, pin and clear; each key sees its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from firn.config import CacheConfig, Config, ModelConfig, ServerConfig
from tests.api.real import Real, serving

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    config = Config(
        server=ServerConfig(api_keys=("alice", "bob")),
        model=ModelConfig(path="firn-demo"),
        cache=CacheConfig(no_ssd_cache=True, cache_memory_mb=64),
    )
    with serving(Path(), config=config) as running:
        yield running


def ask(real: Real, method: str, path: str, body: Any = None, *, key: str = "alice") -> Any:
    return httpx.request(
        method,
        f"http://127.0.0.1:{real.port}{path}",
        json=body,
        headers={"x-api-key": key},
        timeout=60,
    )


def probe(real: Real, body: Any, *, key: str = "alice") -> Any:
    return ask(real, "POST", "/v1/cache/probe", body, key=key).json()


def test_a_prefix_is_probed_pinned_and_cleared(real: Real) -> None:
    assert probe(real, HI)["cached_tokens"] == 0
    n_prompt = probe(real, HI)["prompt_tokens"]
    pinned = ask(real, "POST", "/v1/cache/pin", HI).json()
    assert pinned["pinned_tokens"] == n_prompt - 1
    assert pinned["pinned_bytes"] > 0
    assert probe(real, HI)["tiers"] == {"memory": n_prompt - 1}
    assert probe(real, HI, key="bob")["cached_tokens"] == 0, "it is alice's"
    used = ask(real, "POST", "/v1/chat/completions", HI | {"max_tokens": 1}).json()["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    unpinned = {"unpinned_tokens": pinned["pinned_tokens"], "pinned_bytes": 0}
    assert ask(real, "POST", "/v1/cache/unpin", HI).json() == unpinned
    assert ask(real, "POST", "/v1/cache/unpin", HI).json()["unpinned_tokens"] == 0
    assert ask(real, "DELETE", "/v1/cache", key="bob").json()["freed_bytes"] == 0
    assert probe(real, HI)["cached_tokens"] == n_prompt - 1
    assert ask(real, "DELETE", "/v1/cache").json()["freed_bytes"] > 0
    assert probe(real, HI)["cached_tokens"] == 0


def test_a_raw_prompt_is_probed_too(real: Real) -> None:
    assert probe(real, {"prompt": "Hello!"})["prompt_tokens"] > 0


@pytest.mark.parametrize("route", ["probe", "pin", "unpin"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        (HI | {"model": "another"}, 404, "model"),
        (HI | {"tools": 5}, 400, "tools"),
    ],
)
def test_a_bad_body_names_the_parameter(
    real: Real, route: str, body: Any, status: int, param: str
) -> None:
    answer = ask(real, "POST", f"/v1/cache/{route}", body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("query", ["namespace=bobs", "model=another"])
def test_an_unknown_namespace_or_model_is_a_404(real: Real, query: str) -> None:
    assert ask(real, "DELETE", f"/v1/cache?{query}").status_code == 404
