"""A row that takes several tokens in a step: each is an event, and the step is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from firn.core.events import Token
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine
from tests.hash_runner import HashRow, HashTaken, prompt_of

WIDTH = 3


@pytest.mark.parametrize("max_tokens", [WIDTH * 2, WIDTH * 2 + 1])
def test_a_steps_drafts_are_counted_with_its_last_token(max_tokens: int) -> None:
    """A reply that ends within a step takes no more of it."""
    with HashEngine(cache=DictCache(), chunk=8) as lab:
        runner: Any = lab.runner
        collect, taken = runner.collect, list[HashTaken]()

        def wide(rows: Sequence[HashRow], **more: Any) -> list[HashTaken]:
            """Every third time, what the row took in three steps, as one."""
            taken.extend(collect(rows, **more))
            if len(taken) < WIDTH:
                return []
            ids = tuple(id for each in taken for id in each.tokens)
            taken.clear()
            return [HashTaken(rows[0], ids, (None,) * len(ids), n_drafted=4, n_right=len(ids) - 1)]

        runner.collect = wide
        done = lab.submit(prompt_of(1, 20), max_tokens).wait()
        done.check()
        counts = [(token.n_drafted, token.n_accepted) for token in done.of(Token)]
        assert lab.leftovers() == {}
    assert counts == [(0, 0), (0, 0), (4, 2), (0, 0), (0, 0), (4, 2), (0, 0)][:max_tokens]
