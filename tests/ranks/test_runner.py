"""No call of the engine to its runner happens on rank 0 alone, unless it is listed as local."""

from __future__ import annotations

import inspect

from firn.core import ports
from firn.models.decode.runner import Runner
from firn.ranks.runner import FollowerRunner, LeaderRunner

LOCAL = frozenset(
    {
        *("confirm", "force", "groups", "live_nbytes", "batched_prefill", "resume", "close"),
        "read_picture",
    }
)
"""Methods that are not sent to followers: they run no collective, change only what is sampled, or are
never called with ranks. (`resume` also marks a row as alone; `join` sends that.)"""


def methods(cls: type) -> set[str]:
    members = inspect.getmembers(cls, inspect.isfunction)
    return {name for name, _ in members if not name.startswith("_")}


def test_every_call_is_sent_to_followers_or_listed_as_local() -> None:
    sent = {name for name in methods(LeaderRunner) if name in LeaderRunner.__dict__}
    missing = (methods(Runner) | methods(ports.Runner)) - sent - LOCAL
    assert not missing, (
        "a new method: send it to the other ranks, or list it as local with a reason"
    )


def test_a_follower_has_a_method_for_each_call_sent() -> None:
    sent = {name for name in methods(LeaderRunner) if name in LeaderRunner.__dict__}
    own = {name.removeprefix("on_") for name in methods(FollowerRunner) if name.startswith("on_")}
    assert sent - {"lead", "number_of"} == own
