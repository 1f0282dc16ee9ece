"""Answers of /v1/cache/tree, which dashboards share until somebody changes the cache."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from firn.api.http.hosts import check_may_change_cache
from firn.api.services import Services
from firn.core.values import Namespace

MAX_CHARS = 160

FRESH_S = 1.0
"""Dashboards that show the same tree share an answer of up to this age."""
PATIENCE_S = 0.5
"""How long a dashboard that has an older answer waits for a new one: the engine reads the tree between
two steps, and a step may take many seconds."""
MAX_ANSWERS = 16
TreeQuery = tuple[Namespace | None, str | None, int]
"""What the caller sees, the node to begin at, and the most runs to return."""


def excerpt(services: Services, ids: Iterable[int]) -> str:
    """The beginning of these tokens' text, on one line. Ids that are not tokens of the model, such
    as the digest that stands for a picture, are left out."""
    known = [id for id in ids if 0 <= id < services.engine.model.n_ids]
    return " ".join(services.tokenizer.decode(known).split())[:MAX_CHARS]


@dataclass(frozen=True, slots=True)
class _TreeAnswer:
    at: float
    answer: dict[str, Any]


class TreeAnswers:
    """One per app, on the asyncio thread. All routes that change the cache do so in `changing`."""

    def __init__(self) -> None:
        self._one_at_a_time: defaultdict[Namespace | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._answers: dict[TreeQuery, _TreeAnswer] = {}

    async def get(
        self, query: TreeQuery, read: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """What `read` returns, or a recent answer; while reading takes long, an older one. One that was
        read for an earlier question says its age."""
        known = self._answers.get(query)
        reading = asyncio.ensure_future(self._read(query, read))
        if known is not None:
            reading.add_done_callback(_take_note)
            await asyncio.wait([reading], timeout=PATIENCE_S)
        answer = await reading if known is None or reading.done() else known
        if answer is not known:
            return answer.answer
        return {**answer.answer, "age_s": round(time.monotonic() - answer.at, 3)}

    async def _read(
        self, query: TreeQuery, read: Callable[[], Awaitable[dict[str, Any]]]
    ) -> _TreeAnswer:
        """A namespace's tree is read once at a time: no key waits for what others ask."""
        async with self._one_at_a_time[query[0]]:
            answers = self._answers  # replaced by a change: what was read before it is not kept
            cached = answers.get(query)
            if cached is None or time.monotonic() - cached.at > FRESH_S:
                try:
                    cached = _TreeAnswer(time.monotonic(), await read())
                finally:
                    answers.pop(query, None)
                answers[query] = cached
                while len(answers) > MAX_ANSWERS:
                    del answers[next(iter(answers))]
        return cached

    @contextmanager
    def changing(self, scope: Scope) -> Iterator[None]:
        """Around a change: checks that the caller may make it, and drops all answers at its end.

        Raises Forbidden.
        """
        check_may_change_cache(scope)
        try:
            yield
        finally:
            self._answers = {}


def _take_note(reading: asyncio.Future[_TreeAnswer]) -> None:
    """If it failed, nobody may be left who waits for it; the next one to ask is told."""
    if not reading.cancelled():
        reading.exception()
