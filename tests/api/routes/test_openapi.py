"""Requests generated from /openapi.json: whatever fits it, or nearly does, is never a 5xx.

Slow: up to seven requests for each route, and seven more if it has a body.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.live import Live, serve
from tests.api.routes.test_tokens import FakeEmbedder


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve(embedder=FakeEmbedder()) as running:
        yield running


@pytest.fixture(scope="module")
def described(live: Live) -> Any:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


SEARCH = settings(
    max_examples=7,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_route_keeps_to_its_description(described: Any, mode: GenerationMode) -> None:
    """Bodies that fit the description, then bodies that break it in one place."""
    statuses: Counter[int] = Counter()
    for result in described.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @SEARCH
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            answer = case.call(timeout=60)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        check()
    assert statuses[400] > 20
    assert mode is GenerationMode.NEGATIVE or statuses[200] > 20


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
        ("/api/chat", {"model": "fake", "messages": CHAT}),
        ("/api/generate", {"model": "fake", "prompt": "hi"}),
    ],
)
def test_streams_keep_to_their_description(path: str, body: Any, described: Any) -> None:
    case = described[path]["POST"].Case(
        body={"model": "fake", **body, "stream": True}, media_type="application/json"
    )
    answer = case.call(timeout=60)
    assert answer.status_code == 200
    assert answer.headers["content-type"][0].startswith(("text/event", "application/x-ndjson"))
    case.validate_response(answer, checks=CHECKS)


NOT_DESCRIBED = {
    "/openapi.json": "the description itself",
    "/docs": "the description, for readers",
    "/page/{name}": "files of the dashboard",
    "/get_server_info": "an older name of /server_info",
    "/get_model_info": "an older name of /model_info",
    "/v1/activity": "an endless stream: tools that try every route would hang",
}


def test_all_that_is_served_is_described() -> None:
    # The cache's routes are never called.
    with serve(embedder=FakeEmbedder(), cache_admin=object()) as live:
        paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
        app: Any = live.server.config.app
        served = {(m.lower(), r.path_format) for r in app.routes for m in r.methods}
    described = {(method, path) for path, operations in paths.items() for method in operations}
    unsaid = {("head", path) for method, path in served if method == "get"}
    assert served - unsaid == described | {("get", path) for path in NOT_DESCRIBED}
    for method, path in described:
        operation = paths[path][method]
        assert operation["summary"], (method, path)
        names = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert names == set(re.findall(r"{(\w+)}", path)), (method, path)
