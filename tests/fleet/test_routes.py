"""The front has every route that a server of one model has."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from starlette.routing import Route

from firn.fleet import server
from firn.fleet.catalogue import ModelCatalogue
from tests.api.live import serve
from tests.fleet.fronts import config

OWN = {
    "/api/pull",
    "/api/delete",
    "/api/copy",
    "/api/create",
    "/v1/models/{model_id:path}/load",
    "/v1/models/{model_id:path}/unload",
}


def routes_of(app: object) -> set[tuple[str, str]]:
    routes = set()
    for route in app.routes:  # type: ignore[attr-defined]
        if isinstance(route, Route):
            routes |= {(route.path, method) for method in route.methods or ()}
    return routes


async def front_routes(tmp_path: Path) -> set[tuple[str, str]]:
    made = config("firn-demo", "firn-demo-hybrid", tmp=tmp_path)
    parts = server.build(made, ModelCatalogue(made), tmp_path)
    parts.pool.close()
    return routes_of(parts.app)


def test_the_front_has_every_route_of_a_single_server(tmp_path: Path) -> None:
    with serve(cache_admin=object()) as live:  # adds its routes, which are never called
        app = live.server.config.app
        while not hasattr(app, "routes"):
            app = app.app  # type: ignore[union-attr]
        single = routes_of(app)
    fronted = asyncio.run(front_routes(tmp_path))
    assert single - fronted == set()
    assert {path for path, method in fronted - single if method != "HEAD"} == OWN
    assert ("/v1/responses/{response_id}", "HEAD") not in fronted  # the route is relayed


def test_the_front_does_not_import_mlx() -> None:
    script = (
        "import sys, firn.fleet.server\n"
        "print([n for n in ('mlx', 'mlx_lm', 'transformers') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
