"""For routers: /v1/loads, /server_info and /model_info, as SGLang's servers answer them.

If callers have keys, only the operator may ask how busy the server is: a key must not learn about
others. Only the operator sees the path of the model's folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from firn import __version__
from firn.api.http.exchange import exchange_of
from firn.api.observe.metrics import Metrics
from firn.api.routes.discovery import RouteParts
from firn.api.routes.openapi import error_responses
from firn.api.services import Services
from firn.core.errors import Forbidden

MIN_SPAN_S = 0.5
"""The shortest time over which tokens per second are measured."""


class LoadRoutes:
    """One per app, on the asyncio thread."""

    def __init__(self, services: Services, metrics: Metrics, *, max_rows: int) -> None:
        self._services = services
        self._metrics = metrics
        self._max_rows = max_rows
        self._rate = TokenRate()

    def add_to(self, app: FastAPI) -> None:
        add = partial(app.add_api_route, methods=["GET"], responses=error_responses())
        add("/v1/loads", self.loads, summary="How busy the server is, for routers")
        for prefix, shown in (("/", True), ("/get_", False)):  # the second is for older routers
            add(f"{prefix}server_info", self.server_info, include_in_schema=shown, summary="Server")
            add(f"{prefix}model_info", self.model_info, include_in_schema=shown, summary="Model")

    async def loads(self, request: Request) -> dict[str, Any]:
        services = self._services
        if services.access.keys.required and not exchange_of(request.scope).caller.operator:
            raise Forbidden("Only an admin key may read the load of the server.")
        engine = services.engine.health()
        stats: dict[str, Any] = {}
        if services.cache_admin is not None:
            stats = await asyncio.wrap_future(services.cache_admin.stats(None))
        running = engine.n_prefilling + engine.n_decoding
        used, capacity = _memory_tokens(stats)
        usage = round(used / capacity, 4) if capacity else 0.0
        load = {
            "dp_rank": 0,
            "timestamp": time.time(),
            "num_running_reqs": running,
            "num_waiting_reqs": engine.n_waiting,
            "num_total_reqs": running + engine.n_waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": usage,
            "gen_throughput": round(self._rate.update(self._metrics.n_generated), 2),
            "cache_hit_rate": _hit_rate(stats),
            "utilization": round(min(running / max(self._max_rows, 1), 1.0), 4),
            "max_running_requests": self._max_rows,
        }
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": {
                "total_running_reqs": running,
                "total_waiting_reqs": engine.n_waiting,
                "total_reqs": running + engine.n_waiting,
                "avg_token_usage": usage,
                "avg_throughput": load["gen_throughput"],
                "avg_utilization": load["utilization"],
            },
        }

    async def server_info(self, request: Request) -> dict[str, Any]:
        model = self._services.engine.model
        return {
            "model_path": self._path(request),
            "served_model_name": model.name,
            "version": __version__,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "context_length": model.context_length,
            "max_running_requests": self._max_rows,
            "is_embedding": not model.generates,
            "weight_version": model.fingerprint.hex()[:16],
            "disaggregation_mode": "null",
        }

    async def model_info(self, request: Request) -> dict[str, Any]:
        model = self._services.engine.model
        path = self._path(request)
        return {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": model.generates,
            "model_type": model.architecture,
            "has_image_understanding": model.vision,
            "has_audio_understanding": False,
            "weight_version": model.fingerprint.hex()[:16],
        }

    def _path(self, request: Request) -> str:
        model = self._services.engine.model
        return model.path if exchange_of(request.scope).caller.operator else model.name


def add_load(parts: RouteParts) -> None:
    services = parts.services
    LoadRoutes(services, parts.metrics, max_rows=services.limits.max_rows).add_to(parts.app)


ROUTES = add_load


class TokenRate:
    """Tokens per second between two readings of a counter. Owner: the routes."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._n = 0
        self._rate = 0.0

    def update(self, n: int) -> float:
        now = time.monotonic()
        if now - self._at >= MIN_SPAN_S:
            self._rate = (n - self._n) / (now - self._at)
            self._at, self._n = now, n
        return self._rate


def _memory_tokens(stats: Mapping[str, Any]) -> tuple[int, int]:
    """The device memory that requests use, and the most they could use, in tokens."""
    admission = stats.get("admission", {})
    per_token = admission.get("bytes_per_token", 0)
    if not per_token:
        return 0, 0
    used, capacity = admission.get("held_bytes", 0), admission.get("capacity_bytes", 0)
    # Routers read these as 32-bit integers; a tiny model on a large machine has room for more.
    limit = 2**31 - 1
    return min(int(used // per_token), limit), min(int(capacity // per_token), limit)


def _hit_rate(stats: Mapping[str, Any]) -> float:
    tokens = stats.get("tokens", {})
    prompt = tokens.get("prompt", 0)
    return round(tokens.get("cached", 0) / prompt, 4) if prompt else 0.0
