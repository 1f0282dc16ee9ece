"""What requests may have done with their prompts before the model reads them, as the API sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from firn.api.errors import Headers
from firn.core.events import Admitted
from firn.core.values import GenerateRequest


class Preparations(Protocol):
    """Any thread."""

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidValue if the request asks for what is not possible here."""
        ...

    def of(self, request: GenerateRequest) -> Any:
        """The job's `preparation`; None: its prompt is read as it is."""
        ...

    def headers(self, admitted: Sequence[Admitted]) -> Headers:
        """What a client should know of these prompts before it reads the reply."""
        ...


class AsSent:
    """Every prompt is read as it was sent."""

    def check(self, request: GenerateRequest) -> None:
        pass

    def of(self, request: GenerateRequest) -> Any:
        return None

    def headers(self, admitted: Sequence[Admitted]) -> Headers:
        return ()
