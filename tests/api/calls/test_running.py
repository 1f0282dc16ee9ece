"""Draft counts of a reply that a stop string has cut short."""

from __future__ import annotations

import pytest

from firn.api.calls.running import RunningRequest
from firn.core.events import Token
from firn.core.values import GenerateRequest, RawText, RequestId


@pytest.mark.parametrize("n_shown", range(1, 6))
def test_drafted_tokens_behind_the_stop_are_not_accepted_ones(n_shown: int) -> None:
    """A step with six drafted tokens, four of them accepted, and the stop at each of its five."""
    run = RunningRequest(RequestId("a"), GenerateRequest("", RawText("a")), first_choice=0)
    step = [
        Token(0, 7),
        Token(0, 7),
        Token(0, 7),
        Token(0, 7),
        Token(0, 7, n_drafted=6, n_accepted=4),
    ]
    for token in step[:n_shown]:
        run.n_drafted += token.n_drafted
        run.n_accepted += token.n_accepted
    for token in step[n_shown:]:
        run.drop(token)
    assert (run.n_drafted, run.n_accepted) == (6, min(n_shown, 4))
    for token in step:  # another step, before the engine learned of the stop
        run.drop(token)
    assert (run.n_drafted, run.n_accepted) == (12, min(n_shown, 4))
