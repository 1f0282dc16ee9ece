"""How far a call has come, as quotas see it."""

from __future__ import annotations

import numpy as np

from firn.api.calls.prepared import ReplyPlan
from firn.api.calls.progress import CallProgress
from firn.api.calls.running import RunningRequest
from firn.core.errors import StepFailed
from firn.core.events import Admitted, EngineEvent, JobDone, JobFailed, PromptLogprobs
from firn.core.values import Job, Prompt, RequestId, ToolChoice
from firn.text.reply.formats import PLAIN
from firn.text.reply.reader import ReplyReader
from tests.fakes import FakeTokenizer


def submitted(progress: CallProgress, id: str) -> RunningRequest:
    def reader(*, choice: int) -> ReplyReader:
        return ReplyReader(
            FakeTokenizer(),
            choice=choice,
            stop=(),
            format=PLAIN,
            tools=(),
            tool_choice=ToolChoice(),
            prompt_tail="",
            new_id=str,
            logprobs=False,
        )

    run = RunningRequest(ReplyPlan(RequestId(id), 3, reader), first_choice=0)
    progress.submitted(run, Job(run.id, Prompt(np.zeros(3, np.int64)), 1))
    return run


def receive(progress: CallProgress, run: RunningRequest, event: EngineEvent) -> None:
    progress.observe(run, event, run.feed(event) or ())


def test_a_request_waits_from_its_arrival_until_it_has_a_row() -> None:
    """While its prompt is made, too: no key may have more places by sending longer prompts."""
    progress = CallProgress(2)
    assert progress.n_waiting == 2
    first, second = submitted(progress, "a"), submitted(progress, "a-1")
    assert progress.n_waiting == 2
    receive(progress, first, Admitted(1))
    assert (progress.n_waiting, progress.n_computed, progress.n_read) == (1, 2, 1)
    receive(progress, second, JobDone())
    assert progress.n_waiting == 0


def test_a_call_has_ended_with_its_last_event() -> None:
    progress = CallProgress(1)
    run = submitted(progress, "a")
    receive(progress, run, Admitted(0))
    receive(progress, run, PromptLogprobs(1, ()))
    assert not progress.ended
    receive(progress, run, JobFailed(StepFailed("it broke")))
    assert progress.ended
