"""What rank 0 does where a server with one process would do nothing."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from firn.assembly.sharding import ONE_PROCESS
from firn.backends.contract import Weights
from firn.cache.tiers import TierOptions
from firn.core.errors import SetupError
from firn.ranks.calls import RankCall
from firn.ranks.joining import RankMember
from firn.ranks.leader_parts import LeaderParts

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}


class OneFollower:
    """A leader whose only follower answers what the test says."""

    n_followers = 1

    def __init__(self, **answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.told: list[tuple[object, ...]] = []

    def gather(self, name: str, *, timeout_s: float) -> dict[int, RankCall]:
        return {1: RankCall(name, (self.answers[name],))}

    def tell(self, name: str, *args: object) -> None:
        self.told.append((name, *args))


def parts(leader: OneFollower) -> LeaderParts:
    member = RankMember(cast("Any", SimpleNamespace(rank=0, size=2)))
    return LeaderParts(member, cast("Any", leader), options="o")


CHECKED = {"error": "", "options": "o", "node": "another"}


@pytest.mark.parametrize(("given", "used"), [("auto", "float32"), ("model", "model")])
def test_all_compute_weights_in_one_form_that_no_machine_chooses(given: Any, used: str) -> None:
    leader, weights = OneFollower(checked=CHECKED), Weights()
    weights.dtype = given
    parts(leader).prepare(LLAMA, "m", text_only=False, weights=weights)
    assert weights.dtype == used
    assert leader.told == [("load", used)]


def test_ranks_with_other_options_are_not_told_to_load() -> None:
    leader = OneFollower(checked=CHECKED | {"options": "other"})
    with pytest.raises(SetupError, match="rank 1's options"):
        parts(leader).prepare(LLAMA, "m", text_only=False, weights=Weights())
    assert leader.told == []


@pytest.mark.parametrize(
    ("node", "has_own_memory", "least"),
    [("another", False, 70), (platform.node(), False, 35), (platform.node(), True, 70)],
)
def test_the_least_capacity_counts_for_all(node: str, has_own_memory: bool, least: int) -> None:
    ready = {"weights": "aa", "dtypes": "float32", "capacity": 70}
    leader = OneFollower(checked=CHECKED | {"node": node}, ready=ready)
    own = parts(leader)
    own.prepare(LLAMA, "m", text_only=False, weights=Weights())
    info: Any = SimpleNamespace(fingerprint=b"\xaa", dtype="float32", batchable=True)
    assert own.begin(info, 100, has_own_memory=has_own_memory) == least
    assert ONE_PROCESS.begin(info, 100, has_own_memory=has_own_memory) == 100


def test_each_rank_has_a_folder_and_a_root_of_its_own() -> None:
    options, own = TierOptions("/cache"), parts(OneFollower())
    assert Path(own.options_of(options).location) == Path("/cache/rank-0-of-2")
    assert ONE_PROCESS.options_of(options) == options
    assert (own.text, ONE_PROCESS.text) == ("rank 0 of 2", "")
    assert (own.n_ranks, ONE_PROCESS.n_ranks) == (2, 1)
