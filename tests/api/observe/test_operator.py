"""Who sees which numbers and caches: a key its own, the operator all, a web page none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firn.api.http.auth import ANYONE, Keys, namespace_of
from firn.core.errors import Unauthorized
from tests.api.http.test_auth import bearer
from tests.api.live import serve
from tests.api.real import ELSEWHERE, Real, demo_config, serving

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}


# --- who is the operator -------------------------------------------------------------------


def test_without_keys_a_local_caller_is_the_operator() -> None:
    assert Keys().admit([], local=True).operator
    assert Keys().admit([]) == ANYONE


def test_with_keys_the_admin_key_is_the_operator() -> None:
    keys = Keys(["alice"], admin=["root"])
    assert not keys.admit(bearer("alice"), local=True).operator
    root = keys.admit(bearer("root"))
    assert root.operator
    assert root.namespace == namespace_of("root")
    with pytest.raises(Unauthorized):
        keys.admit([], local=True)
    assert not Keys(["alice"]).admit(bearer("alice"), local=True).operator


def test_an_admin_key_alone_leaves_the_server_open() -> None:
    keys = Keys(admin=["root"])
    assert not keys.required
    assert keys.admit([], local=True) == ANYONE, "who sets a key means it"
    assert keys.admit(bearer("wrong")) == ANYONE
    root = keys.admit(bearer("root"))
    assert (root.operator, root.namespace) == (True, ANYONE.namespace)
    assert keys.namespaces == (ANYONE.namespace,)


# --- without keys --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_server() -> Iterator[Real]:
    with serving(Path(), config=demo_config()) as running:
        yield running


def ask(real: Real, method: str, path: str, *, body: Any = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{real.port}{path}"
    return httpx.request(method, url, json=body, headers=named, timeout=60)


def metrics(real: Real, **headers: str) -> dict[str, float]:
    text = ask(real, "GET", "/metrics", **headers).text
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


CHANGES = [("DELETE", "/v1/cache", None), ("POST", "/v1/cache/pin", HELLO),
           ("POST", "/v1/cache/unpin", HELLO)]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_the_cache_is_changed_from_this_machine_only(
    open_server: Real, method: str, path: str, body: Any
) -> None:
    assert ask(open_server, method, path, body=body).status_code == 200
    answer = ask(open_server, method, path, body=body, **ELSEWHERE)
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize(
    "page", [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec_fetch_site": "same-site"}]
)
def test_web_pages_cannot_change_the_cache(
    open_server: Real, method: str, path: str, body: Any, page: dict[str, str]
) -> None:
    assert ask(open_server, method, path, body=body, **page).status_code == 403


def test_remote_callers_do_not_see_the_operators_numbers(open_server: Real) -> None:
    assert ask(open_server, "POST", "/v1/chat/completions", body=HELLO).status_code == 200
    mine = ask(open_server, "GET", "/v1/cache/stats").json()
    theirs = ask(open_server, "GET", "/v1/cache/stats", **ELSEWHERE).json()
    assert mine["memory"]["limit_bytes"] > 0
    assert mine["admission"]["capacity_bytes"] > 0
    assert "estimates" in mine
    assert not {"limit_bytes", "room_bytes"} & set(theirs["memory"])
    assert set(theirs["admission"]) == {"bytes_per_token", "bytes_per_row", "calls"}
    assert "estimates" not in theirs
    assert "firn_engine_alive" in metrics(open_server)
    assert "firn_engine_alive" not in metrics(open_server, **ELSEWHERE)


# --- with keys -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Real]:
    config = demo_config(api_keys=("alice", "bob"), admin_keys=("root",))
    with serving(Path(), config=config) as running:
        yield running


def test_a_key_sees_its_own_numbers(keyed: Real) -> None:
    used = {}
    for key, n in (("alice", 1), ("bob", 3)):
        for i in range(n):
            body = {**HELLO, "messages": [{"role": "user", "content": f"{key} {i}"}]}
            answer = ask(keyed, "POST", "/v1/chat/completions", body=body, x_api_key=key).json()
            used[key] = used.get(key, 0) + answer["usage"]["prompt_tokens"]
    route = "firn_requests_total//v1/chat/completions/200"
    seen = {key: metrics(keyed, x_api_key=key) for key in ("alice", "bob", "root")}
    assert seen["alice"][route] == 1
    assert seen["bob"][route] == 3
    assert seen["root"][route] >= 4
    for key, n_prompt in used.items():
        assert seen[key]["firn_tokens_total/prompt"] == n_prompt
        assert seen[key]["firn_cache_tokens_total/computed"] <= n_prompt
        assert seen[key]["firn_calls"] == 0
    for name in ("firn_engine_alive", "firn_jobs/waiting", "firn_engine_last_step_age_seconds"):
        assert name in seen["root"]
        assert name not in seen["alice"]


def test_a_key_sees_its_own_stats_and_admission(keyed: Real) -> None:
    stats = {
        key: ask(keyed, "GET", "/v1/cache/stats", x_api_key=key).json()
        for key in ("alice", "bob", "root")
    }
    assert "estimates" in stats["root"]
    for key in ("alice", "bob"):
        assert "estimates" not in stats[key]
        assert set(stats[key]["admission"]) == {"bytes_per_token", "bytes_per_row", "calls"}
        assert stats[key]["memory"]["records"] < stats["root"]["memory"]["records"]


def test_only_the_operator_sees_how_busy_the_server_is(keyed: Real, open_server: Real) -> None:
    anyone = ask(keyed, "GET", "/health").json()
    assert anyone["status"] == "ok"
    assert "calls" not in anyone
    assert set(anyone["engine"]) == {"alive"}
    assert "speculation" not in anyone, "what others generate"
    assert "reason" not in str(anyone["cache"]), "names a folder, a bucket, a host"
    assert "calls" not in ask(keyed, "GET", "/health", x_api_key="alice").json()
    assert "speculation" not in ask(keyed, "GET", "/health", x_api_key="alice").json()
    assert "speculation" in ask(keyed, "GET", "/health", x_api_key="root").json()
    assert ask(keyed, "GET", "/health", x_api_key="root").json()["engine"]["waiting"] == 0
    assert ask(open_server, "GET", "/health").json()["calls"] == 0


def n_records(real: Real, key: str) -> int:
    return int(ask(real, "GET", "/v1/cache/stats", x_api_key=key).json()["memory"]["records"])


def test_a_key_clears_its_own_records_and_the_operator_all(keyed: Real) -> None:
    for key in ("alice", "bob"):
        ask(keyed, "POST", "/v1/chat/completions", body=HELLO, x_api_key=key)
    # A page that has a key may: somebody gave it the key on purpose.
    gone = ask(keyed, "DELETE", "/v1/cache", x_api_key="alice", origin="https://app.example")
    assert gone.json()["freed_bytes"] > 0
    assert (n_records(keyed, "alice"), n_records(keyed, "bob") > 0) == (0, True)
    assert ask(keyed, "DELETE", "/v1/cache", x_api_key="root", **ELSEWHERE).status_code == 200
    assert n_records(keyed, "root") == 0


def test_an_operator_who_names_its_own_namespace_leaves_the_others(keyed: Real) -> None:
    for key in ("alice", "root"):
        ask(keyed, "POST", "/v1/chat/completions", body=HELLO, x_api_key=key)
    n_before = n_records(keyed, "alice")
    assert n_before > 0
    own = f"/v1/cache?namespace={namespace_of('root')}"
    assert ask(keyed, "DELETE", own, x_api_key="root").json()["freed_bytes"] > 0
    assert n_records(keyed, "alice") == n_before


def test_a_full_queue_does_not_say_how_many_wait() -> None:
    from firn.core.errors import QueueFull

    with serve() as live:
        live.engine.refusal = QueueFull()
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 429
        assert not any(c.isdigit() for c in answer.json()["error"]["message"])


# --- stored responses ----------------------------------------------------------------------


@pytest.mark.parametrize("origins", [(), ("https://app.example",)])
def test_web_pages_cannot_delete_a_response(origins: tuple[str, ...]) -> None:
    """Browsers send a POST without a body immediately: no preflight protects it."""
    with serve(allow_origins=origins) as live:
        made = httpx.post(f"{live.url}/v1/responses", json={"input": "a"}).json()["id"]
        url = f"{live.url}/v1/responses/{made}"
        for page in ("http://evil.example", "null"):
            assert httpx.post(f"{url}/cancel", headers={"origin": page}).status_code == 403
            assert httpx.delete(url, headers={"origin": page}).status_code == 403
        allowed = httpx.delete(url, headers={"origin": "https://app.example"})
        assert allowed.status_code == (200 if origins else 403)
        assert httpx.delete(url).status_code == (404 if origins else 200)
