"""The dashboard in front of several models: its requests are relayed, with the caller's identity."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.fronts import Running, config, fronting

LONG = "The quick brown fox jumps over the lazy dog. " * 10


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = config(
        "firn-demo",
        "firn-demo-hybrid",
        tmp=tmp_path_factory.mktemp("front"),
        **{"page.show_text": True},
    )
    with fronting(made) as running:
        yield running


def ask(front: Running, method: str, path: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return front.plain.request(method, path, headers=named)


def test_the_dashboard_loads_no_model(front: Running) -> None:
    page = ask(front, "GET", "/", accept="text/html")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert ask(front, "GET", "/page/app.js").status_code == 200
    assert ask(front, "GET", "/").json()["name"] == "firn"
    tree = ask(front, "GET", "/v1/cache/tree?model=firn-demo").json()
    assert tree["enabled"] is False
    assert "not loaded" in tree["why"]
    node = "/v1/cache/tree/" + "00" * 32
    assert ask(front, "GET", node).status_code == 503
    assert ask(front, "GET", f"{node}?model=nobody").status_code == 404
    assert set(front.states().values()) == {"unloaded"}


def test_routers_see_loaded_models_and_load_none(front: Running) -> None:
    """Only loaded models are shown, and asking loads none."""
    unloaded = "/model_info?model=firn-demo-hybrid"
    assert ask(front, "GET", unloaded).status_code == 503
    front.client.chat.completions.create(
        model="firn-demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    loads = ask(front, "GET", "/v1/loads").json()
    assert [load["model"] for load in loads["loads"]] == ["firn-demo"]
    assert loads["dp_rank_count"] == 1
    assert loads["aggregate"]["total_reqs"] == 0
    assert ask(front, "GET", "/server_info").json()["served_model_name"] == "firn-demo"
    assert ask(front, "GET", "/model_info").json()["is_generation"] is True
    assert front.states()["firn-demo-hybrid"] == "unloaded"


def test_the_tree_of_a_loaded_model_is_shown_and_changed_through_the_front(front: Running) -> None:
    front.client.chat.completions.create(
        model="firn-demo", messages=[{"role": "user", "content": LONG}], max_tokens=1
    )
    root, *runs = ask(front, "GET", "/v1/cache/tree").json()["runs"]
    assert root["namespace"] == "shared"
    (run,) = (run for run in runs if "quick brown fox" in run["text"])
    path = f"/v1/cache/tree/{run['node']}"
    assert ask(front, "GET", f"{path}?model=firn-demo").json()["tokens"] == run["end"]
    own = {"origin": front.url, "sec_fetch_site": "same-origin"}
    for page in (
        {"origin": "http://evil.example"},
        {"origin": "http://localhost"},  # as the front calls its children
        {"origin": front.url, "sec_fetch_site": "cross-site"},
        {"origin": "http://evil.example", "x_firn_page": "1"},
    ):
        assert ask(front, "POST", f"{path}/pin", **page).status_code == 403, page
        assert ask(front, "POST", "/v1/models/firn-demo/unload", **page).status_code == 403, page
    assert ask(front, "POST", f"{path}/pin", **own).json()["pinned"]
    assert ask(front, "POST", f"{path}/unpin", **own).json()["unpinned"] == 1
    assert ask(front, "POST", f"{path}/forget?model=firn-demo", **own).json()["freed_bytes"] > 0
    assert ask(front, "GET", path).status_code == 404
    assert ask(front, "POST", "/v1/models/firn-demo/unload", **own).status_code == 200
