"""What routers ask a server of several models: how busy all of them are, and what one of them is.

No model is loaded for it.
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
from firn.fleet.tree import MODEL, ask_one, chosen

SUMS = ("total_running_reqs", "total_waiting_reqs", "total_reqs")
MEANS = ("avg_token_usage", "avg_throughput", "avg_utilization")


def add_router(app: FastAPI, fleet: Fleet, relay: Relay) -> None:
    async def loads(request: Request) -> Response:
        answers = await merging.ask_loaded(fleet, request.scope, b"/v1/loads")
        refused = next((a for a in answers if a.status != 200), None)
        if refused is not None:
            return Response(refused.body, refused.status, media_type="application/json")
        return Response(json.dumps(merged(answers)), media_type="application/json")

    async def one(request: Request) -> Response:
        model = chosen(fleet, relay, request.query_params.get("model"))
        return await ask_one(fleet, model, request.scope, "it is described while it is loaded")

    add = partial(app.add_api_route, methods=["GET"], responses=error_responses())
    add("/v1/loads", loads, summary="How busy the models are, for routers")
    described = partial(add, openapi_extra={"parameters": [MODEL]})
    for prefix, shown in (("/", True), ("/get_", False)):
        described(f"{prefix}server_info", one, include_in_schema=shown, summary="Server")
        described(f"{prefix}model_info", one, include_in_schema=shown, summary="Model")


def merged(answers: Sequence[merging.ModelAnswer]) -> dict[str, Any]:
    """Each loaded model counts as a rank, with its name; means are over loaded models."""
    told = [(answer.model, answer.json()) for answer in answers]
    each = [each["aggregate"] for _, each in told]
    ranks = [
        load | {"dp_rank": i, "model": name}
        for i, (name, load) in enumerate((n, load) for n, each in told for load in each["loads"])
    ]
    sums = {key: sum(a[key] for a in each) for key in SUMS}
    means = {key: round(fmean(a[key] for a in each), 4) if each else 0.0 for key in MEANS}
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(ranks),
        "loads": ranks,
        "aggregate": sums | means,
    }
