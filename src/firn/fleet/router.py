"""What only loaded models can answer: how busy they are, what each one is, and its tree of prefixes.

These requests load no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import fmean
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Scope

from firn import __version__
from firn.api.routes.openapi import error_responses
from firn.api.routes.tree import PARAMETERS, PATH
from firn.fleet import merging
from firn.fleet.fleet import Fleet
from firn.fleet.model import Model
from firn.fleet.relay import Relay

ONLY_LOADED = "its cache can be read only while it is loaded"
MODEL = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}


SUMS = ("total_running_reqs", "total_waiting_reqs", "total_reqs")
MEANS = ("avg_token_usage", "avg_throughput", "avg_utilization")


def add_tree(app: FastAPI, fleet: Fleet, relay: Relay) -> None:
    async def tree(request: Request) -> Response:
        model = choose_model(fleet, relay, request.query_params.get("model"))
        if fleet.peek(model) is None:
            why = f"{model.spec.name} is not loaded"
            return _json({"enabled": False, "why": why, "model": model.spec.name})
        return await ask_model(fleet, model, request.scope, ONLY_LOADED)

    async def one_node(request: Request, node: str) -> Response:
        model = choose_model(fleet, relay, request.query_params.get("model"))
        return await ask_model(fleet, model, request.scope, ONLY_LOADED)

    add = partial(
        app.add_api_route,
        responses=error_responses(),
        openapi_extra={"parameters": [MODEL]},
    )
    add(
        PATH,
        tree,
        methods=["GET"],
        summary="The stored prefixes of a loaded model as a tree",
        openapi_extra={"parameters": [*PARAMETERS, MODEL]},
    )
    add(f"{PATH}/{{node}}", one_node, methods=["GET"], summary="Size and savings of one prefix")
    for action, text in (
        ("pin", "Pin a stored prefix"),
        ("unpin", "Unpin a stored prefix"),
        ("forget", "Forget a prefix and all that continues it"),
    ):
        add(f"{PATH}/{{node}}/{action}", one_node, methods=["POST"], summary=text)


def choose_model(fleet: Fleet, relay: Relay, name: str | None) -> Model:
    """The named model; without a name, the default or, if it is not loaded, the first that is."""
    if name:
        return relay.find(name)
    default = relay.find("")
    loaded = (m for m in fleet.models.values() if fleet.peek(m) is not None)
    return default if fleet.peek(default) is not None else next(loaded, default)


async def ask_model(fleet: Fleet, model: Model, scope: Scope, why: str) -> Response:
    """The model's own answer to the same request. why: the error's text if it is not loaded."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    answers = await merging.ask_loaded(fleet, scope, target, [model])
    if not answers:
        raise fleet.not_ready(model, why)
    return Response(answers[0].body, answers[0].status, media_type="application/json")


def _json(body: dict[str, Any]) -> Response:
    return Response(json.dumps(body), media_type="application/json")


def add_router(app: FastAPI, fleet: Fleet, relay: Relay) -> None:
    async def loads(request: Request) -> Response:
        answers = await merging.ask_loaded(fleet, request.scope, b"/v1/loads")
        refused = next((a for a in answers if a.status != 200), None)
        if refused is not None:
            return Response(refused.body, refused.status, media_type="application/json")
        return Response(json.dumps(merged(answers)), media_type="application/json")

    async def describe(request: Request) -> Response:
        model = choose_model(fleet, relay, request.query_params.get("model"))
        return await ask_model(
            fleet, model, request.scope, "it is described only while it is loaded"
        )

    add = partial(app.add_api_route, methods=["GET"], responses=error_responses())
    add("/v1/loads", loads, summary="How busy the models are, for routers")
    add_described = partial(add, openapi_extra={"parameters": [MODEL]})
    for prefix, shown in (("/", True), ("/get_", False)):
        add_described(f"{prefix}server_info", describe, include_in_schema=shown, summary="Server")
        add_described(f"{prefix}model_info", describe, include_in_schema=shown, summary="Model")


def merged(answers: Sequence[merging.ModelAnswer]) -> dict[str, Any]:
    """Each loaded model counts as a rank and is named; means are over loaded models."""
    reports = [(answer.model, answer.json()) for answer in answers]
    totals = [report["aggregate"] for _, report in reports]
    loads = [load | {"model": name} for name, report in reports for load in report["loads"]]
    ranks = [load | {"dp_rank": i} for i, load in enumerate(loads)]
    sums = {key: sum(total[key] for total in totals) for key in SUMS}
    means = {
        key: round(fmean(total[key] for total in totals), 4) if totals else 0.0 for key in MEANS
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(ranks),
        "loads": ranks,
        "aggregate": sums | means,
    }
