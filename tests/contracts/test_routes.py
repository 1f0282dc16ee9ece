"""The contract of routes that are found by being in api/routes."""

from __future__ import annotations

from typing import cast

import pytest
from fastapi import FastAPI

from firn.api.dialects import discover as discover_dialects
from firn.api.http.body_reader import BodyReader
from firn.api.observe.metrics import Metrics
from firn.api.routes.discovery import AddRoutes, RouteParts, discover
from tests.contracts.test_extras import services


@pytest.fixture(params=discover(), ids=lambda add: add.__name__)
def add_routes(request: pytest.FixtureRequest) -> AddRoutes:
    return request.param  # type: ignore[no-any-return]


def parts_of(app: FastAPI) -> RouteParts:
    own = services()
    metrics = Metrics(own.engine, own.event_router, n_calls=own.access.quotas.n_calls, extra=())
    return RouteParts(
        app,
        own,
        discover_dialects(),
        metrics,
        BodyReader(limit_nbytes=1 << 20, total_nbytes=1 << 20),
    )


def test_it_adds_routes_that_the_app_describes(add_routes: AddRoutes) -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_routes(parts_of(app))
    assert app.routes
    paths = app.openapi()["paths"]
    assert paths
    for methods in paths.values():
        for described in methods.values():
            assert described["summary"]
            body = described.get("requestBody")
            if body is not None:
                assert "example" in body["content"]["application/json"]["schema"]


def test_no_two_files_answer_the_same() -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for add in discover():
        add(parts_of(app))
    answers = [(route.path, *route.methods) for route in cast("list", app.routes)]
    assert len(answers) == len(set(answers))
