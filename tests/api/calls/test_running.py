"""Draft counts of a reply that a stop string has cut short."""

from __future__ import annotations

import pytest

from firn.api.calls.prepared import ReplyPlan
from firn.api.calls.running import RunningRequest
from firn.core.events import ChoiceDone, Token
from firn.core.values import RequestId, ToolChoice
from firn.text.reply.formats import PLAIN
from firn.text.reply.reader import ReplyReader
from tests.fakes import FakeTokenizer


def running(*, stop: str) -> RunningRequest:
    def reader(*, choice: int) -> ReplyReader:
        return ReplyReader(
            FakeTokenizer(),
            choice=choice,
            stop=(stop,),
            format=PLAIN,
            tools=(),
            tool_choice=ToolChoice(),
            prompt_tail="",
            new_id=str,
            logprobs=False,
        )

    return RunningRequest(ReplyPlan(RequestId("a"), 3, reader), first_choice=0)


def step(text: str) -> list[Token]:
    """Six drafted tokens, four of them accepted, and the one that the model picked."""
    *accepted, last = FakeTokenizer().encode(text, add_special=False)
    return [*(Token(0, id) for id in accepted), Token(0, last, n_drafted=6, n_accepted=4)]


@pytest.mark.parametrize("n_shown", range(1, 6))
def test_drafted_tokens_behind_the_stop_are_not_accepted_ones(n_shown: int) -> None:
    run = running(stop="abcde"[n_shown - 1])
    shown = [run.feed(token) is not None for token in step("abcde")]
    assert shown == [True] * n_shown + [False] * (5 - n_shown)
    assert (run.usage.n_drafted, run.usage.n_accepted) == (6, min(n_shown, 4))
    for token in step("abcde"):  # another step, before the engine learned of the stop
        assert run.feed(token) is None
    assert (run.usage.n_drafted, run.usage.n_accepted) == (12, min(n_shown, 4))
    assert run.usage.n_completion == n_shown
    assert run.feed(ChoiceDone(0, "length")) is None, "it has finished"
