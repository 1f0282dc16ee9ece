"""Models that rate how well documents answer a query."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from firn.api.services import Services
from firn.assembly.extras import Extra
from firn.assembly.model import ServerSpec
from firn.engine import Engine
from firn.models.load.recognise import scoring_settings
from firn.text.prompt.rerank import detect_reranker

log = logging.getLogger("firn")


class Reranking(Extra):
    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        if not engine.model.generates:
            return services
        name, settings = f"{spec.name} {spec.folder.name}", scoring_settings(spec.folder)
        reranker = detect_reranker(name, services.tokenizer, settings)
        if reranker is not None:
            log.info("%s reranks documents (/v1/rerank)", spec.name)
        return replace(services, reranker=reranker)


EXTRA = Reranking
