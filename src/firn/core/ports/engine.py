"""The engine as the API sees it, and what else the API gives work to. No method blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from firn.core.events import EngineEvent
from firn.core.values import Job, ModelInfo, RequestId, ServedRequest

Delivery = tuple[RequestId, EngineEvent]
Publish = Callable[[Sequence[Delivery]], None]
"""Called by the engine thread once a step, with everything that happened in the step, in order."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot for /ready, /health and /metrics; safe to read from any thread."""

    alive: bool
    last_step_age_s: float
    n_waiting: int
    n_prefilling: int
    n_decoding: int


class Engine(Protocol):
    """Runs jobs. Every method may be called from any thread."""

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, job: Job) -> None:
        """Queue a job; its events arrive through Publish. Raises QueueFull, NeverFits,
        ShuttingDown, EngineDead."""
        ...

    def cancel(self, request: RequestId) -> None:
        """Forget the job: no further events. Unknown ids are ignored."""
        ...

    def stop_choice(self, request: RequestId, choice: int) -> None:
        """Generate no more for this choice (a stop string matched); the others continue.

        No ChoiceDone follows for it; JobDone is sent when all choices are done or stopped.
        """
        ...

    def force(self, request: RequestId, choice: int, tokens: Sequence[int], *, at: int) -> None:
        """Continue the reply with these tokens from position `at` on, as if the model had picked them.

        Tokens that have already been picked stay: the forced ones then start at the next position.
        A later call replaces an earlier one that has not begun; an empty sequence withdraws it.
        """
        ...

    def health(self) -> EngineHealth: ...


class Recorder(Protocol):
    """Keeps a trace of the requests that were served."""

    def record(self, served: ServedRequest) -> None:
        """May be called from any thread."""
        ...


class Embedder(Protocol):
    """Turns texts into vectors, from any thread; they are computed between the engine's steps."""

    @property
    def n_dims(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """The longest text."""
        ...

    def embed(
        self, texts: Sequence[Sequence[int]], *, n_dims: int | None = None
    ) -> Future[list[list[float]]]:
        """One vector for each list of tokens. n_dims: the length to cut vectors to.

        texts: none of the lists is empty.
        """
        ...
