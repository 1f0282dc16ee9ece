"""Answers of /v1/cache/tree, which dashboards share until somebody changes the cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from firn.api.origins import check_may_change_cache
from firn.core.values import Namespace

FRESH_S = 1.0
"""Dashboards that show the same tree share an answer of up to this age."""
MAX_ANSWERS = 16

TreeQuery = tuple[Namespace | None, str | None, int]
"""What the caller sees, the node to begin at, and the most runs to return."""


@dataclass(frozen=True, slots=True)
class _TreeAnswer:
    at: float
    answer: dict[str, Any]


class TreeAnswers:
    """One per app, on the asyncio thread. All routes that change the cache do so in `changing`."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._answers: dict[TreeQuery, _TreeAnswer] = {}

    async def get(
        self, query: TreeQuery, read: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """A recent answer, or what `read` returns. The tree is read once at a time."""
        async with self._one_at_a_time:
            answers = self._answers  # replaced by a change: what was read before it is not kept
            cached = answers.get(query)
            if cached is None or time.monotonic() - cached.at > FRESH_S:
                cached = _TreeAnswer(time.monotonic(), await read())
                answers.pop(query, None)
                answers[query] = cached
                while len(answers) > MAX_ANSWERS:
                    del answers[next(iter(answers))]
        return cached.answer

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
