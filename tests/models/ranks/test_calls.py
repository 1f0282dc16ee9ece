"""Nothing that the engine asks of a runner happens on rank 0 alone, unless it was decided so."""

from __future__ import annotations

import inspect

from firn.core import ports
from firn.models.ranks.runner import LOCAL, FollowerRunner, LeaderRunner
from firn.models.runner import Runner


def methods(cls: type) -> set[str]:
    found = inspect.getmembers(cls, inspect.isfunction)
    return {name for name, _ in found if not name.startswith("_")}


def test_every_call_is_told_or_needs_not_be() -> None:
    told = {name for name in methods(LeaderRunner) if name in LeaderRunner.__dict__}
    missing = (methods(Runner) | methods(ports.Runner)) - told - LOCAL
    assert not missing, "a new method: tell the other ranks of it, or say why they need not know"


def test_a_follower_has_a_part_in_each() -> None:
    told = {name for name in methods(LeaderRunner) if name in LeaderRunner.__dict__}
    own = {name.removeprefix("on_") for name in methods(FollowerRunner) if name.startswith("on_")}
    assert told - {"lead", "number_of"} == own
