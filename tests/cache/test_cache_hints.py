"""A position marked by a caller is a checkpoint, even where no rule of ours would keep one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from firn.cache.planning.checkpoints import N_HINTS, due
from firn.cache.tree import CheckpointKind
from firn.core.values import Job, Prompt, RequestId
from tests.harness import GREEDY, Harness, Result, running
from tests.models.alone import plain
from tests.zoo import VOCAB_SIZE

CHAT = tuple(range(500, 6000, 500))


def test_a_hint_in_the_middle_is_kept() -> None:
    without = due(CHAT, 5600, n_restored=0, n_shared=0)
    marked = due(CHAT, 5600, n_restored=0, n_shared=0, hints=(2500,))
    assert 2500 not in without
    assert marked == dict(sorted({**without, 2500: CheckpointKind.SHARED}.items()))


def test_hints_before_what_was_restored_are_done() -> None:
    assert 2500 not in due(CHAT, 5600, n_restored=2500, n_shared=2500, hints=(2500,))


def test_the_last_few_count() -> None:
    kept = due(CHAT, 5600, n_restored=0, n_shared=0, hints=CHAT[1:8])
    assert [p for p in CHAT[1:8] if kept.get(p) is CheckpointKind.SHARED] == list(
        CHAT[1:8][-N_HINTS:]
    )


def test_a_hint_lies_on_the_grid_like_all_others() -> None:
    assert 2048 in due(CHAT, 5600, n_restored=0, n_shared=0, hints=(2500,), grid=1024)


def ask(harness: Harness, ids: list[int], hints: tuple[int, ...]) -> Result:
    """Boundaries every 50 tokens, of which the rules keep the first and the last few."""
    request = RequestId(f"hint{len(harness.results)}")
    result = harness.results[request] = Result()
    prompt = Prompt(np.array(ids), boundaries=tuple(range(50, len(ids), 50)), hints=hints)
    harness.engine.submit(Job(request, prompt, max_tokens=2, sampling=GREEDY))
    return result.wait()


@pytest.mark.parametrize(("hints", "n_cached"), [((), 50), ((200,), 200)])
def test_a_recurrent_model_resumes_at_a_hint(hints: tuple[int, ...], n_cached: int) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(16, VOCAB_SIZE) for _ in range(500)]
    other = [rng.randrange(16, VOCAB_SIZE) for _ in range(100)]
    with running(plain("qwen3_next")) as harness:
        assert ask(harness, ids, hints).n_cached == 0
        assert ask(harness, ids[:230] + other, ()).n_cached == n_cached
