"""The real engine on a runner without a model: jobs in, their clients' events out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firn.cache.off import CacheOff
from firn.core.errors import FirnError
from firn.core.events import (
    Admitted,
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    PromptLogprobs,
    Token,
)
from firn.core.ports import Delivery, EngineCache
from firn.core.values import (
    CacheControl,
    Job,
    Namespace,
    Prompt,
    RequestId,
    Sampling,
)
from firn.engine import EngineLimits, EngineParts, NoPreparation
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine
from firn.sparse.prefill import SparsePrefill
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scorer
from tests.hash_runner import GREEDY, Faults, HashRunner, _nothing, reply_to, scores_of

WAIT_S = 60.0
"""Bounds every wait of a test; none takes long unless something hangs."""


@dataclass(eq=False)
class Outcome:
    """The events that one job's client has received."""

    job: Job
    events: list[EngineEvent] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)
    n_ends: int = 0

    def put(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, JobDone | JobFailed):
            self.n_ends += 1
            self.finished.set()

    def wait(self) -> Outcome:
        assert self.finished.wait(WAIT_S), f"job {self.job.id} was left waiting"
        return self

    def of(self, kind: type[EngineEvent]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def tokens(self, choice: int = 0) -> list[int]:
        return [e.id for e in self.of(Token) if e.choice == choice]

    def reason(self, choice: int = 0) -> str | None:
        found = [e.reason for e in self.of(ChoiceDone) if e.choice == choice]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def error(self) -> FirnError | None:
        found = self.of(JobFailed)
        return found[0].error if found else None

    @property
    def n_cached(self) -> int:
        return int(self.of(Admitted)[0].n_cached)

    def expected(self, choice: int = 0) -> list[int]:
        job = self.job
        return reply_to(
            job.prompt.ids.tolist(),
            job.max_tokens,
            sampling=job.sampling,
            choice=choice,
            eos=job.eos,
        )

    def check(self) -> None:
        """Checks that the job ran to its end, and that all events were right, in order, unique."""
        assert self.error is None, repr(self.error)
        assert self.n_ends == 1
        assert isinstance(self.events[0], Admitted)
        assert isinstance(self.events[-1], JobDone)
        for choice in range(self.job.n):
            want = self.expected(choice)
            assert self.tokens(choice) == want
            ended = bool(want) and want[-1] in self.job.eos
            assert self.reason(choice) == ("stop" if ended else "length")
        if self.job.prompt_logprobs:
            ids = self.job.prompt.ids.tolist()
            found = [score for event in self.of(PromptLogprobs) for score in event.logprobs]
            assert found == scores_of(ids, 0, len(ids) - 1, self.job.top_logprobs or 0)


class HashEngine:
    """The real engine thread on a HashRunner. Use as a context manager."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        cache: EngineCache | None = None,
        max_rows: int = 8,
        max_queue: int = 10_000,
        chunk: int = 8,
        aligned: bool = False,
        group_rows: int = 1 << 30,
        capacity_nbytes: int = 1 << 40,
        logprobs_chunk_nbytes: int = 1 << 30,
        publish: Callable[[Sequence[Delivery]], None] = _nothing,
        budget: Budget | None = None,
        largest_chunk: int = 0,
        common_chunk: int = 0,
        dispatch_waits: bool = False,
        scorer: Scorer | None = None,
    ) -> None:
        self.runner = HashRunner(faults, group_rows=group_rows)
        self.cache = cache if cache is not None else CacheOff()
        self.budget = budget or Budget(RowCost(1, 1), capacity_nbytes=capacity_nbytes)
        self.outcomes: dict[RequestId, Outcome] = {}
        self.n_deaths = 0
        self.died = threading.Event()
        self._also_publish = publish
        self._ids = itertools.count()
        limits = EngineLimits(
            max_rows,
            max_queue,
            chunk,
            aligned,
            largest_chunk=largest_chunk,
            common_chunk=common_chunk,
            dispatch_waits=dispatch_waits,
            logprobs_chunk_nbytes=logprobs_chunk_nbytes,
        )
        preparer = SparsePrefill(scorer) if scorer else NoPreparation()
        self.engine = Engine(
            lambda: EngineParts(self.runner, self.cache, self.budget, limits, preparer),
            self._publish,
            on_death=self._on_death,
        )
        self.engine.start()

    def _publish(self, batch: Sequence[Delivery]) -> None:
        assert batch, "an empty publication"
        self._also_publish(batch)
        for request, event in batch:
            self.outcomes[request].put(event)

    def _on_death(self) -> None:
        self.n_deaths += 1
        self.died.set()

    def __enter__(self) -> HashEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(timeout_s=WAIT_S)
        assert not self.engine._thread.is_alive(), "the engine thread hangs"

    def job(
        self,
        prompt: Sequence[int] | Prompt,
        n_reply: int = 8,
        *,
        sampling: Sampling = GREEDY,
        n: int = 1,
        eos: Sequence[int] = (),
        namespace: str = "",
        control: CacheControl = CacheControl(),
        scored: int | None = None,
        sparse: Sparse | None = None,
    ) -> Job:
        if not isinstance(prompt, Prompt):
            prompt = Prompt(np.array(prompt, dtype=np.int64))
        return Job(
            id=RequestId(f"job{next(self._ids)}"),
            prompt=prompt,
            max_tokens=n_reply,
            sampling=sampling,
            n=n,
            eos=frozenset(eos),
            namespace=Namespace(namespace),
            cache=control,
            top_logprobs=scored,
            prompt_logprobs=scored is not None,
            preparation=sparse,
        )

    def submit(self, prompt: Sequence[int] | Prompt, n_reply: int = 8, **options: Any) -> Outcome:
        outcome = Outcome(self.job(prompt, n_reply, **options))
        self.outcomes[outcome.job.id] = outcome
        self.engine.submit(outcome.job)
        return outcome

    def cancel(self, outcome: Outcome) -> None:
        self.engine.cancel(outcome.job.id)

    def hold(self) -> threading.Event:
        """Holds the engine between two steps until this is set, so that jobs arrive together."""
        reached, gate = threading.Event(), threading.Event()

        def wait() -> None:
            reached.set()
            assert gate.wait(WAIT_S), "held for ever"

        self.engine.call(lambda _: wait())
        assert reached.wait(WAIT_S)
        return gate

    def between_steps(self, function: Callable[[], Any] = lambda: None) -> Any:
        """Runs on the engine thread and waits; the engine has then processed all earlier calls."""
        return self.engine.call(lambda _: function()).result(WAIT_S)

    def leftovers(self) -> dict[str, int]:
        """Counts of everything that requests could have left behind; empty if there is nothing."""

        def count() -> dict[str, int]:
            engine = self.engine
            counts = {
                "sequences": len(engine._loop.inflight.sequences),
                "waiting": len(engine._loop.inflight.waiting),
                "tasks": len(engine._loop.inflight.tasks),
                "rows": len(engine._loop.inflight.rows),
                "queued": engine._n_queued,
                "groups": len(self.runner.groups()),
                "reserved_nbytes": self.budget.reserved_nbytes,
                "cursors": len(getattr(self.cache, "cursors", ())),
            }
            return {name: n for name, n in counts.items() if n}

        found: dict[str, int] = self.between_steps(count)
        return found
