"""For routers in front of a server with several models: how busy they are, and what each one is.

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

from firn import __version__
from firn.api.openapi import error_responses
from firn.fleet import merging
from firn.fleet.fleet import Fleet
from firn.fleet.relay import Relay
from firn.fleet.tree import MODEL, ask_model, choose_model

SUMS = ("total_running_reqs", "total_waiting_reqs", "total_reqs")
MEANS = ("avg_token_usage", "avg_throughput", "avg_utilization")


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
