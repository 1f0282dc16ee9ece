"""/v1/cache/tree: the stored prefixes, who sees them, and which pages may change them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from firn.api.routes import tree_answers
from firn.config import CacheConfig, Config, ModelConfig, PageConfig, ServerConfig
from firn.core.ports import SlicedQuery
from tests.api.observe.test_activity import Events
from tests.api.real import Real, serving
from tests.waiting import wait_until

LONG = "The quick brown fox jumps over the lazy dog. " * 20


def serve_demo(**server: Any) -> Any:
    return serving(
        Path(),
        config=Config(
            server=ServerConfig(**server),
            model=ModelConfig(path="firn-demo"),
            cache=CacheConfig(no_ssd_cache=True, cache_memory_mb=64, cache_block_tokens=16),
            page=PageConfig(show_text=True),
        ),
    )


@pytest.fixture(scope="module")
def opened() -> Iterator[Real]:
    with serve_demo() as real:
        yield real


@pytest.fixture(scope="module")
def keyed() -> Iterator[Real]:
    with serve_demo(api_keys=("alice", "bob"), admin_keys=("root",)) as real:
        yield real


def ask(real: Real, method: str, path: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, real.url + path, headers=named, timeout=60)


def say(real: Real, text: str, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body, headers=named, timeout=60)
    assert answer.status_code == 200, answer.text


def runs(real: Real, query: str = "", **headers: str) -> list[dict[str, Any]]:
    answer = ask(real, "GET", f"/v1/cache/tree{query}", **headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["runs"])


def test_a_prefix_is_seen_pinned_and_forgotten(opened: Real) -> None:
    say(opened, LONG + "one")
    trunk = runs(opened)[1]
    assert trunk["text"].startswith("<|im_start|>user The quick brown fox")
    path = f"/v1/cache/tree/{trunk['node']}"
    assert ask(opened, "GET", path).json()["tokens"] == trunk["end"]
    assert ask(opened, "POST", f"{path}/pin").json()["pinned"]
    assert runs(opened)[1]["pins"] == 1, "a change is seen at once"
    assert ask(opened, "POST", f"{path}/forget").json()["forgotten_blocks"] == 0
    assert ask(opened, "POST", f"{path}/unpin").json()["unpinned"] == 1
    assert ask(opened, "POST", f"{path}/forget").json()["freed_bytes"] > 0
    assert ask(opened, "GET", path).status_code == 404


@contextmanager
def a_long_step(real: Real) -> Iterator[None]:
    """The engine is busy with one thing, as it is with a large chunk of a prompt."""
    begun, end = Event(), Event()

    def step(_: Any) -> None:
        begun.set()
        end.wait(180)  # longer than any client here waits

    stepped = real.server.engine.call(step)
    try:
        assert begun.wait(60)
        yield
    finally:
        end.set()
        stepped.result(60)


def test_a_dashboard_that_is_opened_during_a_step_is_not_blank() -> None:
    with serve_demo() as real:
        say(real, LONG)
        with ExitStack() as stack:
            step = stack.enter_context(ExitStack())
            step.enter_context(a_long_step(real))
            watching = httpx.stream("GET", f"{real.url}/v1/activity", timeout=60)
            events = Events(stack.enter_context(watching))
            assert events.next("hello")["version"]
            assert events.next("calls")[0]["phase"] == "done"
            state = events.next("state")
            assert state["engine"]["alive"]
            assert state["weights_bytes"] > 0
            assert "cache" not in state
            step.close()
            while "cache" not in state:
                state = events.next("state")
            assert state["cache"]["tokens"]["prompt"] > 0
            step.enter_context(a_long_step(real))
            again = httpx.stream("GET", f"{real.url}/v1/activity", timeout=60)
            last = Events(stack.enter_context(again)).next("state")
            assert last["cache"]["tokens"] == state["cache"]["tokens"], "what it said last"


def test_a_tree_that_is_known_is_shown_during_a_step(
    opened: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_answers, "FRESH_S", -1.0)
    say(opened, LONG + "known")
    before = ask(opened, "GET", "/v1/cache/tree").json()
    assert "age_s" not in before
    with a_long_step(opened):
        during = ask(opened, "GET", "/v1/cache/tree").json()
        assert during.pop("age_s") >= 0, "a page asks again soon"
        assert during == before
    assert "age_s" not in ask(opened, "GET", "/v1/cache/tree").json()


class HeldQuery:
    """Has been read, and ends when the test says so."""

    def __init__(self, query: SlicedQuery) -> None:
        while not query.step().result(60):
            pass
        self.answer = query.answer
        self.end: Future[bool] = Future()

    def step(self) -> Future[bool]:
        return self.end


@pytest.mark.parametrize(("change", "pins"), [("pin", [1]), ("unpin", [0]), ("forget", [])])
def test_a_tree_that_was_read_before_a_change_is_not_shown_after_it(
    opened: Real, monkeypatch: pytest.MonkeyPatch, change: str, pins: list[int]
) -> None:
    say(opened, LONG + "held")
    node, admin = runs(opened)[1]["node"], opened.server.services.cache_admin
    assert admin is not None
    browse, held = admin.browse, []
    ask(opened, "POST", f"/v1/cache/tree/{node}/{'pin' if change == 'unpin' else 'unpin'}")
    monkeypatch.setattr(tree_answers, "FRESH_S", 60.0)

    def browse_and_wait(*args: Any, **options: Any) -> HeldQuery:
        held.append(HeldQuery(browse(*args, **options)))
        return held[0]

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(admin, "browse", browse_and_wait)
        before = pool.submit(runs, opened)
        wait_until(lambda: held)
        assert ask(opened, "POST", f"/v1/cache/tree/{node}/{change}").status_code == 200
        held[0].end.set_result(True)
        assert node in {run["node"] for run in before.result(60)}
    assert [run["pins"] for run in runs(opened) if run["node"] == node] == pins


@pytest.mark.parametrize("change", ["pin", "unpin", "clear"])
def test_a_change_that_names_no_node_is_seen_at_once(
    opened: Real, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    body = {"messages": [{"role": "user", "content": LONG + change}], "max_tokens": 1}

    def send(method: str, path: str) -> None:
        answer = httpx.request(method, opened.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text

    def pins() -> dict[str, int]:
        return {run["node"]: run["pins"] for run in runs(opened)}

    send("POST", "/v1/chat/completions")
    send("POST", f"/v1/cache/{'pin' if change == 'unpin' else 'unpin'}")
    monkeypatch.setattr(tree_answers, "FRESH_S", -1.0)
    before = pins()
    monkeypatch.setattr(tree_answers, "FRESH_S", 60.0)
    assert pins() == before
    if change == "clear":
        send("DELETE", "/v1/cache")
    else:
        send("POST", f"/v1/cache/{change}")
    shown = pins()
    assert shown != before
    monkeypatch.setattr(tree_answers, "FRESH_S", -1.0)
    assert shown == pins()


@pytest.mark.parametrize("query", ["?limit=0", "?limit=x", "?limit=5001", "?limit="])
def test_a_bad_limit_is_a_400(opened: Real, query: str) -> None:
    answer = ask(opened, "GET", f"/v1/cache/tree{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


@pytest.mark.parametrize("node", ["00" * 32, "zz", "%C3%A9"])
def test_an_unknown_node_is_a_404(opened: Real, node: str) -> None:
    for method, path in (("GET", ""), ("POST", "/pin"), ("POST", "/unpin"), ("POST", "/forget")):
        answer = ask(opened, method, f"/v1/cache/tree/{node}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "node"
    assert ask(opened, "GET", f"/v1/cache/tree?node={node}").status_code == 404


def test_only_this_servers_page_may_change_the_tree(opened: Real) -> None:
    say(opened, LONG + "two")
    path = f"/v1/cache/tree/{runs(opened)[1]['node']}/pin"
    for page in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": f"http://localhost:{opened.port}"},
        {"origin": opened.url, "sec_fetch_site": "cross-site"},
        {"origin": opened.url, "sec_fetch_site": "same-site"},
        {"sec_fetch_site": "same-site"},
    ):
        for change in ("pin", "unpin", "forget"):
            answer = ask(opened, "POST", f"{path.removesuffix('pin')}{change}", **page)
            assert answer.status_code == 403, (change, page)
        assert ask(opened, "DELETE", "/v1/cache", **page).status_code == 403, page
    own = {"origin": opened.url, "sec_fetch_site": "same-origin"}
    assert ask(opened, "POST", path, **own).status_code == 200
    assert ask(opened, "POST", path, origin=opened.url).status_code == 200, "older browsers"
    name = f"localhost:{opened.port}"
    assert ask(opened, "POST", path, host=name, origin=f"http://{name}").status_code == 200


def test_a_page_under_a_foreign_name_may_not_change_the_tree() -> None:
    with serve_demo(allowed_hosts=("*",)) as real:
        for host, status in (("evil.example", 403), ("localhost", 200)):
            page = {"host": f"{host}:{real.port}", "origin": f"http://{host}:{real.port}"}
            assert ask(real, "DELETE", "/v1/cache", **page).status_code == status


def test_a_key_sees_its_own_tree_and_the_operator_all(keyed: Real) -> None:
    say(keyed, LONG + "alice", x_api_key="alice")
    say(keyed, LONG + "bob", x_api_key="bob")
    assert ask(keyed, "GET", "/v1/cache/tree").status_code == 401
    mine, all_of_them = runs(keyed, x_api_key="alice"), runs(keyed, x_api_key="root")
    assert sum("namespace" in run for run in mine) == 1
    assert sum("namespace" in run for run in all_of_them) == 2
    theirs = {run["node"] for run in all_of_them} - {run["node"] for run in mine}
    for node in theirs:
        path = f"/v1/cache/tree/{node}"
        assert ask(keyed, "GET", path, x_api_key="alice").status_code == 404
        assert ask(keyed, "POST", f"{path}/forget", x_api_key="alice").status_code == 404
    page = {"origin": keyed.url, "sec_fetch_site": "same-origin", "x_api_key": "alice"}
    assert ask(keyed, "POST", f"/v1/cache/tree/{mine[1]['node']}/pin", **page).status_code == 200


def test_the_text_after_a_difference_is_shown_with_show_text(opened: Real) -> None:
    say(opened, LONG + "three")
    say(opened, LONG + "zebra")
    with httpx.stream("GET", f"{opened.url}/v1/activity", timeout=30) as response:
        events = Events(response)
        assert events.next("hello")["version"]
        call = events.next("calls")[-1]
    assert call["reason"].startswith("diverged")
    assert "bra" in call["differs"]
    assert call["lookup_s"] <= call["looked_up_s"] <= call["row_s"] <= call["admitted_s"]
    assert "lazy" not in json.dumps(call["differs"])
