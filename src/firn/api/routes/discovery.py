"""Routes that are found by being in this folder.

A module here that offers routes of its own names a function in `ROUTES`, which adds them to an app. What
shares its objects with others, as the tree does with the cache, is added by `api/server` by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI

from firn.api import routes
from firn.api.dialects import Dialect, JsonRoute
from firn.api.http.body_reader import BodyReader
from firn.api.observe.metrics import Metrics
from firn.api.routes.json_routes import add_json_route
from firn.api.services import Services


@dataclass(frozen=True, slots=True)
class RouteParts:
    """What routes may use, on the asyncio thread."""

    app: FastAPI
    services: Services
    dialects: Sequence[Dialect]
    metrics: Metrics
    bodies: BodyReader

    def add(self, *json_routes: JsonRoute) -> None:
        for route in json_routes:
            add_json_route(self.app, route, self.services, self.bodies)


AddRoutes = Callable[[RouteParts], None]


def discover() -> list[AddRoutes]:
    names = (module.name for module in pkgutil.iter_modules(routes.__path__))
    modules = (importlib.import_module(f"{routes.__name__}.{name}") for name in names)
    return [module.ROUTES for module in modules if hasattr(module, "ROUTES")]
