"""A reply's thinking budget: when it is used up, the engine forces the end of thinking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.api.calls.observer import Observer
from firn.api.calls.prepared import ThinkLimit
from firn.api.calls.running import RunningRequest
from firn.core.events import EngineEvent, Event, Token
from firn.core.ports import Engine
from firn.core.values import Job, RequestId
from firn.text.reply.reader import ReplyReader

LOOKAHEAD_TOKENS = 128
"""Tokens left in the budget when the engine is told to force the end. It runs ahead of what has
been read here, by several tokens per step, and two equal requests should stop thinking at the same
token."""


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """Arguments of `Engine.force`: tokens, and their position in the reply. No tokens: withdraw the
    previous ones."""

    at: int
    tokens: tuple[int, ...]


class ThinkBudget:
    """Owner: one choice of a request, on the asyncio thread."""

    def __init__(self, limit: ThinkLimit) -> None:
        self._limit = limit
        self._forced = False
        self._n_arrived = 0
        """How many of the forced closing tokens have arrived."""

    def observe(self, token: Token, reader: ReplyReader) -> ThinkingEnd | None:
        """What to tell the engine after a token, which the reader has read; None: nothing."""
        if token.forced:
            self._n_arrived += 1
            if self._n_arrived == len(self._limit.closing):
                self._n_arrived, self._forced = 0, False
        return self.check(reader)

    def check(self, reader: ReplyReader) -> ThinkingEnd | None:
        """What to tell the engine before the first token; None: nothing."""
        left = max(self._limit.n_tokens - reader.n_reasoning, 0)
        if not self._forced and reader.in_reasoning and left <= LOOKAHEAD_TOKENS:
            self._forced = True
            return ThinkingEnd(reader.n_completion + left, self._limit.closing)
        if self._forced and not reader.in_reasoning and not self._n_arrived:
            self._forced = False
            return ThinkingEnd(0, ())
        return None


class ThinkBudgets(Observer):
    """Those of a call's choices whose thinking is limited. Owner: its session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._budgets: dict[RequestId, list[ThinkBudget]] = {}

    def submitted(self, run: RunningRequest, job: Job) -> None:
        if run.plan.think_limit is None:
            return
        budgets = [ThinkBudget(run.plan.think_limit) for _ in run.readers]
        self._budgets[run.id] = budgets
        for choice, budget in enumerate(budgets):
            self._tell(run, choice, budget.check(run.readers[choice]))

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        if type(event) is Token and run.id in self._budgets and event.choice not in run.finished:
            budget, reader = self._budgets[run.id][event.choice], run.readers[event.choice]
            self._tell(run, event.choice, budget.observe(event, reader))

    def _tell(self, run: RunningRequest, choice: int, end: ThinkingEnd | None) -> None:
        if end is not None:
            self._engine.force(run.id, choice, end.tokens, at=end.at)
