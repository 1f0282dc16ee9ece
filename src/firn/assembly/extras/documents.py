"""PDF and text files in messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from firn.api.services import Services
from firn.assembly.extras import Extra
from firn.assembly.model import ServerSpec
from firn.engine import Engine
from firn.media.documents import Documents


class DocumentReading(Extra):
    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        return replace(services, gathers=(*services.gathers, Documents().gather))


EXTRA = DocumentReading
