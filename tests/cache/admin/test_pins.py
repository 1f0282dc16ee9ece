"""Unpinning a prompt releases what pinning it pinned, whatever was stored meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from firn.cache.admin import control as admin
from firn.core.errors import BadRequest
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import DENSE, SHAPES, LabEngine, Shape, prompt_of, tree
from tests.hash_runner import prompt_of as words

BLOCK = 8
EVERYONE = Namespace("")
SYSTEM = words(1, 44)
ASKED = [*SYSTEM, 7]
"""The system prompt, followed by what a chat template appends to it."""


def pin(lab: LabEngine, ids: list[int]) -> dict[str, Any]:
    cap = 1 << 30
    return lab.between_steps(lambda: admin.pin(lab.tree, prompt_of(ids), EVERYONE, cap_nbytes=cap))


def unpin(lab: LabEngine, ids: list[int]) -> dict[str, Any]:
    return lab.between_steps(lambda: admin.unpin(lab.tree, prompt_of(ids), EVERYONE))


def ask(lab: LabEngine, ids: list[int], n_reply: int = 1, **options: Any) -> None:
    lab.submit(ids, n_reply, **options).wait().check()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "meanwhile",
    [
        [],
        [[*SYSTEM, 10, 11, 12]],
        [[*SYSTEM, 5, *words(3, 20)], [*SYSTEM, 10, 11, 12]],
        [ASKED],
        [[*ASKED, *words(4, 30)]],
    ],
    ids=["nothing", "another chat", "two", "the prompt itself", "the prompt and more"],
)
def test_whatever_came_since(shape: Shape, meanwhile: list[list[int]]) -> None:
    with LabEngine(shape, cache=tree(shape, block=BLOCK)) as lab:
        ask(lab, [*SYSTEM, 200, *words(2, 20)], boundaries=[len(SYSTEM)])
        pinned = pin(lab, ASKED)
        assert pinned["pinned_tokens"] == 44
        for ids in meanwhile:
            ask(lab, ids, boundaries=[len(SYSTEM)])
        assert unpin(lab, ASKED) == {"unpinned_tokens": 44, "pinned_bytes": 0}
        assert unpin(lab, ASKED)["unpinned_tokens"] == 0
        lab.check()


def test_what_another_prompt_is_pinned_for_stays() -> None:
    other = [*SYSTEM[:42], *words(5, 20)]
    with LabEngine(DENSE, cache=tree(DENSE, block=BLOCK)) as lab:
        ask(lab, [*SYSTEM, 200, *words(2, 20)])
        ask(lab, other)
        pin(lab, ASKED)
        before = pin(lab, other)["pinned_bytes"]
        assert unpin(lab, ASKED)["unpinned_tokens"] == 4, "the blocks before that are shared"
        assert 0 < admin.pinned_nbytes(lab.tree) < before
        lab.between_steps(lambda: lab.tree.set_room(0))
        lab.between_steps(lambda: lab.tree.set_room(1 << 40))
        outcome = lab.submit(other, 1, control=CacheControl(write=False)).wait()
        assert outcome.n_cached == len(other) - 1
        assert unpin(lab, other)["pinned_bytes"] == 0


def test_what_is_pinned_stays_so_if_it_may_not_be_pinned_once_more() -> None:
    with LabEngine(DENSE, cache=tree(DENSE, block=BLOCK)) as lab:
        ask(lab, [*SYSTEM, 200, *words(2, 20)])
        before = pin(lab, ASKED)["pinned_bytes"]

        def pin_again() -> None:
            with pytest.raises(BadRequest, match="the limit is 1"):
                admin.pin(lab.tree, prompt_of(ASKED), EVERYONE, cap_nbytes=1)

        lab.between_steps(pin_again)
        assert admin.pinned_nbytes(lab.tree) == before > 1
        assert unpin(lab, ASKED) == {"unpinned_tokens": 44, "pinned_bytes": 0}
