"""Sends the same request to every loaded model, and merges the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from firn.api.http.exchange import exchange_of
from firn.fleet import proxy
from firn.fleet.fleet import Fleet
from firn.fleet.model import Model
from firn.fleet.vouching import vouch

ANSWER_S = 10.0
"""How long a model's process may take to answer before it is left out."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    model: str
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask_loaded(
    fleet: Fleet, scope: Scope, target: bytes, models: Iterable[Model] | None = None
) -> list[ModelAnswer]:
    """Send the same request to each loaded model; those that do not answer are left out."""
    models = fleet.models.values() if models is None else models
    answers = await asyncio.gather(*(_ask(fleet, model, scope, target) for model in models))
    return [answer for answer in answers if answer is not None]


async def _ask(fleet: Fleet, model: Model, scope: Scope, target: bytes) -> ModelAnswer | None:
    child = fleet.peek(model)
    if child is None:
        return None
    exchange = exchange_of(scope)
    request = proxy.ForwardedRequest(scope["method"], target, scope["headers"])
    reply: proxy.ForwardedReply | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reply = await proxy.send(child.socket, request, vouch(exchange))
            await reply.head()
            return ModelAnswer(model.spec.name, reply.status, await reply.body())
    except (proxy.ProcessLost, TimeoutError):
        return None
    finally:
        if reply is not None:
            reply.close()


# --- Prometheus ----------------------------------------------------------------------------


@dataclass(slots=True)
class _MetricFamily:
    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merges texts in Prometheus's format, by model: each sample is labelled with its model."""
    families: dict[str, _MetricFamily] = {}
    for model, text in texts.items():
        label = f'model="{_escape(model)}"'
        family = _MetricFamily()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], _MetricFamily())
                if not family.head:
                    family.head.append(line)
            elif line.startswith("# TYPE "):
                if len(family.head) == 1:
                    family.head.append(line)
            elif line and not line.startswith("#"):
                family.samples.append(_label(line, label))
    return "".join(_lines([*family.head, *family.samples]) for family in families.values())


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _label(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, rest = sample.partition(" ")
    return f"{name}{{{label}}} {rest}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
