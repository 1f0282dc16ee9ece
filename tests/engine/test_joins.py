"""When prompts join the decode batch, relative to what else happens in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firn.core.ports import Delivery
from firn.core.values import Job, Prompt, RequestId
from firn.engine import EngineLimits, EngineParts
from firn.engine.budget import Budget, RowCost
from firn.engine.loop import Loop
from tests.dict_cache import DictCache
from tests.hash_engine import Outcome
from tests.hash_runner import GREEDY, HashRow, HashRunner, HashTaken, prompt_of


class Watched(HashRunner):
    """Notes in which order rows join, and steps are launched and collected."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def join(
        self, row: HashRow, token: int, *, before: Sequence[int] = (), n_coming: int = 0
    ) -> None:
        self.calls.append("join")
        super().join(row, token, before=before, n_coming=n_coming)

    def launch(self, rows: Sequence[HashRow]) -> None:
        self.calls.append("launch")
        super().launch(rows)

    def collect(self, rows: Sequence[HashRow], *, keep_in_flight: int) -> list[HashTaken]:
        self.calls.append("collect")
        return super().collect(rows, keep_in_flight=keep_in_flight)


def test_a_prompt_that_skips_to_its_end_joins_when_what_was_read_is_committed() -> None:
    """A launch has read the step before, and a join settles the one in flight: if it came first, rows
    would have taken the tokens of two steps since their last commit."""
    runner, cache = Watched(), DictCache()
    outcomes: dict[RequestId, Outcome] = {}

    def publish(batch: Sequence[Delivery]) -> None:
        for request, event in batch:
            outcomes[request].put(event)

    budget, limits = Budget(RowCost(1, 1), capacity_nbytes=1 << 40), EngineLimits(8, 100, 8)
    parts = EngineParts(runner, cache, budget, limits)  # type: ignore[arg-type]
    loop = Loop(parts, publish, left_queue=lambda: None)

    def ask(prompt: list[int], n_reply: int) -> Outcome:
        job = Job(RequestId(str(len(outcomes))), Prompt(np.array(prompt)), n_reply, sampling=GREEDY)
        outcome = outcomes[job.id] = Outcome(job)
        loop.accept(job)
        return outcome

    first = ask(prompt_of(1, 20), 60)
    while len(first.tokens()) < 5:
        loop.step()
    cache.racing = cache.patient = True  # the next prompt is on its way from a tier
    prompt = prompt_of(2, 40)
    second = ask(prompt, 6)
    for _ in range(3):
        loop.step()
    cache.store["", tuple(prompt[:-1])] = prompt[:-1]
    cache.cursors[-1].racing = cache.cursors[-1].patient = False
    runner.calls.clear()
    loop.step()
    assert runner.calls == ["launch", "collect", "join"]
    while not (first.finished.is_set() and second.finished.is_set()):
        loop.step()
    first.check()
    second.check()
