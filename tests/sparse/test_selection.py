"""Which tokens are kept, and which prompts are thinned at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firn.core.values import (
    Job,
    PictureSpan,
    Prompt,
    RequestId,
)
from firn.sparse.rules import Sparse
from firn.sparse.selection import CHUNK, recipe_of, recipes_of, select, thinned, why_not

ROUNDING = 1e-6
"""For shares like 0.9999999999999999."""


def job_of(n_prompt: int, sparse: Sparse | None) -> Job:
    ids = np.arange(n_prompt, dtype=np.int64)
    return Job(RequestId("r"), Prompt(ids), max_tokens=8, preparation=sparse)


def test_the_best_chunks_are_kept_with_the_first_and_the_last() -> None:
    scores = np.zeros(10 * CHUNK, dtype=np.float32)
    scores[5 * CHUNK + 3] = 1.0
    kept = select(scores, start=0, keep=0.4)
    chunks = sorted({int(p) // CHUNK for p in kept})
    assert chunks == [0, 4, 5, 6, 9], "what matters, and what is beside it"
    assert len(kept) == 5 * CHUNK


def test_what_is_essential_leaves_the_best_of_the_rest_its_share() -> None:
    """What the answer needs is read, however many tools there are."""
    scores = np.zeros(40 * CHUNK, dtype=np.float32)
    scores[35 * CHUNK] = 1.0
    kept = select(scores, start=0, keep=0.1, essential=[(0, 20 * CHUNK)])
    assert set(range(35 * CHUNK, 36 * CHUNK)) <= set(kept.tolist())
    assert len(kept) == (20 + 1 + 1) * CHUNK


def test_cached_tokens_are_kept_and_chunks_have_absolute_positions() -> None:
    scores = np.zeros(10 * CHUNK, dtype=np.float32)
    scores[7 * CHUNK] = 1.0
    kept = select(scores, start=70, keep=0.2)
    assert kept[:70].tolist() == list(range(70))
    assert set(range(70, 96)) <= set(kept.tolist()), "the rest of the chunk in which it was resumed"
    assert {p for p in kept.tolist() if p >= 96} == {*range(224, 256), *range(288, 320)}


@example(n=65, start=0, keep=0.9999999999999999, essential=[], seed=0)
@given(
    n=st.integers(2, 2000),
    start=st.integers(0, 1999),
    keep=st.floats(0.01, 1.0),
    essential=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=3),
    seed=st.integers(0, 5),
)
def test_for_any_scores_the_selection_keeps_its_rules(
    n: int, start: int, keep: float, essential: list[tuple[int, int]], seed: int
) -> None:
    start = min(start, n - 1)
    ranges = [(a, min(a + length, n)) for a, length in essential if a < n]
    scores = np.random.default_rng(seed).random(n).astype(np.float32)
    kept = select(scores, start=start, keep=keep, essential=ranges)
    positions = set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    assert kept[-1] == n - 1
    assert set(range(start + 1)) <= positions, "what is cached, and the first chunk"
    assert all(set(range(*r)) <= positions for r in ranges)
    forced = len(select(scores, start=start, keep=0.0, essential=ranges))
    most = forced + keep * (n - forced)
    assert len(positions) <= most + ROUNDING
    assert len(positions) > most - CHUNK - ROUNDING, "as much as it may be"


def test_a_prompt_of_which_nearly_all_is_kept_is_read_in_full() -> None:
    prompt = Prompt(np.arange(1000, dtype=np.int64))
    assert thinned(prompt, np.arange(950), start=0, recipe="r") is None
    thin = thinned(prompt, np.arange(0, 1000, 2), start=0, recipe="r")
    assert thin is not None
    assert thin.whole is prompt
    assert thin.positions.end(len(thin)) - len(thin) == 499
    assert thin.positions.end(len(thin)) == 999
    grown = thin.grown([7, 8])
    assert grown.positions.at(499, 502).tolist() == [998, 999, 1000]
    assert grown.positions.end(len(grown)) - len(grown) == 499
    assert grown.whole is prompt


@pytest.mark.parametrize(
    "job",
    [
        job_of(5000, Sparse(1.0, 0)),
        job_of(1024, Sparse(0.2, 1024)),
        replace(job_of(5000, Sparse(0.2, 0)), prompt_logprobs=True),
        replace(job_of(5000, Sparse(0.2, 0)), max_tokens=0),
        job_of(9000, Sparse(0.2, 0)),
        replace(
            job_of(5000, Sparse(0.2, 0)),
            prompt=Prompt(np.arange(5000), picture_spans=(PictureSpan(10, 90, b"picture"),)),
        ),
    ],
)
def test_which_prompts_may_not_be_thinned(job: Job) -> None:
    assert why_not(job, job.preparation, n_expected=0, max_tokens=8192)


@pytest.mark.parametrize(
    ("essential", "n_expected", "is_thinned"),
    [
        (((0, 5000),), 0, False),
        (((0, 100), (400, 5000)), 0, False),
        (((0, 100), (4000, 5000)), 0, True),
        (((0, 3900),), 0, True),
        (((0, 4400),), 0, False),  # with a share of the rest, over nine tenths
        (((3900, 5000),), 3900, False),  # everything that is not cached
        (((0, 3900),), 3900, True),  # everything that is cached
    ],
)
def test_a_prompt_of_which_too_little_may_be_skipped_is_not_even_scored(
    essential: tuple[tuple[int, int], ...], n_expected: int, is_thinned: bool
) -> None:
    job = job_of(5000, Sparse(0.2, 0))
    job = replace(job, prompt=replace(job.prompt, essential=essential))
    assert (
        why_not(job, job.preparation, n_expected=n_expected, max_tokens=8192) == ""
    ) is is_thinned


def test_a_prompt_that_can_be_resumed_near_enough_is_read_in_full() -> None:
    job = job_of(5000, Sparse(0.2, 1024))
    assert why_not(job, job.preparation, n_expected=3975, max_tokens=8192) == ""
    assert why_not(job, job.preparation, n_expected=3976, max_tokens=8192)


def test_each_share_has_a_recipe_of_its_own_among_the_listed_ones() -> None:
    assert len(set(recipes_of("s"))) == 100
    for keep in (0.01, 0.2, 0.29, 0.3, 1.0):
        assert recipe_of("s", keep) in recipes_of("s")
