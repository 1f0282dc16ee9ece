"""What routers query: loads and descriptions in SGLang's shapes, and a call's conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.real import ELSEWHERE, Real, demo_config, serving

CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
    "max_tokens": 2,
}
LOAD = {
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens",
    "max_total_num_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "utilization",
    "max_running_requests", "timestamp",
}  # fmt: skip


@pytest.fixture(scope="module")
def open_server() -> Iterator[Real]:
    with serving(Path(), config=demo_config()) as real:
        yield real


@pytest.fixture(scope="module")
def keyed() -> Iterator[Real]:
    with serving(Path(), config=demo_config(api_keys=("alice",), admin_keys=("root",))) as real:
        yield real


def get(real: Real, path: str, key: str = "", **headers: str) -> httpx.Response:
    if key:
        headers["authorization"] = f"Bearer {key}"
    return httpx.get(f"{real.url}{path}", headers=headers, timeout=60)


def chat(real: Real, body: dict[str, Any] = CHAT, **headers: str) -> httpx.Response:
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    return answer


def test_loads_have_sglangs_fields(open_server: Real) -> None:
    chat(open_server)
    chat(open_server)
    loads = get(open_server, "/v1/loads?include=core,queues,memory").json()
    assert loads["dp_rank_count"] == 1
    (load,) = loads["loads"]
    assert set(load) == LOAD
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0
    assert 0 < load["cache_hit_rate"] < 1
    assert 0 < load["max_total_num_tokens"] < 2**31
    assert load["max_running_requests"] == 32
    assert loads["aggregate"]["total_reqs"] == 0


def test_server_and_model_info_have_sglangs_fields(open_server: Real) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = get(open_server, path).json()
        assert info["served_model_name"] == "firn-demo"
        assert (info["tp_size"], info["dp_size"]) == (1, 1)
        assert info["context_length"] == 16384
        assert Path(info["model_path"]).is_dir()
    for path in ("/model_info", "/get_model_info"):
        info = get(open_server, path).json()
        assert (info["is_generation"], info["model_type"]) == (True, "qwen3")
    elsewhere = get(open_server, "/server_info", **ELSEWHERE).json()
    assert elsewhere["model_path"] == "firn-demo", "where folders lie is nobody else's affair"


def test_load_routes_need_a_key_and_loads_the_operators(keyed: Real) -> None:
    for path in ("/v1/loads", "/server_info", "/model_info"):
        assert get(keyed, path).status_code == 401
    assert get(keyed, "/v1/loads", "alice").status_code == 403
    assert get(keyed, "/v1/loads", "root").json()["loads"][0]["num_total_reqs"] == 0
    assert get(keyed, "/server_info", "alice").json()["model_path"] == "firn-demo"
    assert Path(get(keyed, "/server_info", "root").json()["model_path"]).is_dir()


def test_a_conversation_has_one_name_in_all_its_turns(open_server: Real) -> None:
    first = chat(open_server).headers["x-session"]
    more = [*CHAT["messages"], {"role": "assistant", "content": "Hi."}]
    next_turn = {**CHAT, "messages": [*more, {"role": "user", "content": "And?"}]}
    assert chat(open_server, next_turn).headers["x-session"] == first
    other = {**CHAT, "messages": [{"role": "user", "content": "Other."}]}
    assert chat(open_server, other).headers["x-session"] != first
    assert chat(open_server, {**CHAT, "stream": True}).headers["x-session"] == first


def test_a_client_may_name_its_conversation(open_server: Real) -> None:
    assert chat(open_server, **{"x-session": "agent-7"}).headers["x-session"] == "agent-7"
    for bad in ("", "two words", "x" * 200):
        assert chat(open_server, **{"x-session": bad}).headers["x-session"].startswith("s-")
