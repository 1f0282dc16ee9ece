"""Estimates of the memory that requests need, and the account of what is reserved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.core.errors import NeverFits
from firn.core.memory_plan import Transient
from firn.core.values import Job, Prompt, RequestId
from firn.engine.budget import (
    GROW_TOKENS,
    LEARN_FROM_TOKENS,
    MAX_FACTOR,
    MIN_FACTOR,
    REPLY_RESERVE_TOKENS,
    Budget,
    RowCost,
)

COST = RowCost(per_token_nbytes=10, fixed_nbytes=500)


def job(n_prompt: int, max_tokens: int = 0, *, n: int = 1, name: str = "job") -> Job:
    prompt = Prompt(np.zeros(n_prompt, dtype=np.int64))
    return Job(RequestId(name), prompt, max_tokens, n=n)


def teach(budget: Budget, ratio: float) -> None:
    """Tells the budget repeatedly that rows used this share of their estimate."""
    for _ in range(100):
        budget.learn([10_000], int(ratio * budget.cost.of(10_000)))


def test_a_row_costs_its_tokens_and_a_fixed_part() -> None:
    assert COST.of(0) == 500
    assert COST.of(100) == 1500
    assert RowCost(0, 147 << 20).of(1_000_000) == 147 << 20, "a purely recurrent model"


def test_need_counts_prompt_and_reply_of_every_choice() -> None:
    budget = Budget(COST, capacity_nbytes=1 << 30)
    assert budget.need_nbytes(job(100, 20)) == 500 + 100 * 10 + 20 * 10
    assert budget.need_nbytes(job(100, 20, n=3)) == 3 * (500 + 100 * 10 + 20 * 10)


def test_only_a_part_of_a_long_reply_is_reserved() -> None:
    budget = Budget(COST, capacity_nbytes=1 << 30)
    most = budget.need_nbytes(job(100, REPLY_RESERVE_TOKENS))
    assert budget.need_nbytes(job(100, 1_000_000)) == most


def test_a_prompt_over_the_capacity_never_fits() -> None:
    budget = Budget(COST, capacity_nbytes=1500)
    budget.need_nbytes(job(100, 1_000_000))  # its reply may have to end early; its prompt fits
    with pytest.raises(NeverFits) as caught:
        budget.need_nbytes(job(101))
    assert caught.value.status == 400
    with pytest.raises(NeverFits):
        budget.need_nbytes(job(60, n=2))


def test_the_learned_factor_may_admit_more_but_never_refuses_more() -> None:
    """A factor above one makes requests wait, but never rejects one for good."""
    budget = Budget(COST, capacity_nbytes=1500)
    teach(budget, 10.0)
    assert budget.need_nbytes(job(100)) > 1500
    teach(budget, 0.5)
    assert budget.need_nbytes(job(150)) <= 1500


def test_admitting_never_raises_what_asking_did_not() -> None:
    """The factor may change between the two calls."""
    budget = Budget(COST, capacity_nbytes=1500)
    teach(budget, 0.5)
    request = job(150)
    need = budget.need_nbytes(request)
    teach(budget, 1.0)
    budget.admit(request, need)
    assert budget.reserved_nbytes == need


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9000), max_size=9), st.integers(0, 1 << 30))),
)
def test_the_factor_stays_within_its_bounds(seen: list[tuple[list[int], int]]) -> None:
    budget = Budget(COST, capacity_nbytes=1 << 30)
    for lengths, used in seen:
        before = budget.factor
        budget.learn(lengths, used)
        assert MIN_FACTOR <= budget.factor <= MAX_FACTOR
        if not lengths or sum(lengths) / len(lengths) < LEARN_FROM_TOKENS:
            assert budget.factor == before


@given(st.floats(MIN_FACTOR, MAX_FACTOR))
def test_the_factor_converges_to_what_is_measured(ratio: float) -> None:
    budget = Budget(COST, capacity_nbytes=1 << 30)
    teach(budget, ratio)
    assert budget.factor == pytest.approx(ratio, rel=0.01)


def test_short_rows_teach_nothing() -> None:
    """Their buffers start at 256 tokens, which says nothing about longer rows."""
    budget = Budget(RowCost(1024, 0, 256), capacity_nbytes=1 << 30)
    for _ in range(64):
        budget.learn([13] * 8, 8 * 256 * 1024)
    assert budget.factor == 1.0
    assert budget.need_nbytes(job(8192)) == 8 << 20
    assert budget.need_nbytes(job(13)) == 256 << 10, "the step itself is in the estimate"


def test_a_growing_reply_is_counted_as_it_grows() -> None:
    budget = Budget(RowCost(1, 0), capacity_nbytes=100_000)
    long = job(100, 32_768)
    assert budget.need_nbytes(long) == 100 + REPLY_RESERVE_TOKENS
    assert budget.grown_nbytes(long, [700]) == 100 + REPLY_RESERVE_TOKENS
    assert budget.grown_nbytes(long, [5000]) == 100 + 5000 + GROW_TOKENS
    assert budget.grown_nbytes(long, [32_700]) == 100 + 32_768, "never more than it may say"
    assert budget.grown_nbytes(long, [5000, 10]) == 200 + 5256 + REPLY_RESERVE_TOKENS
    assert not budget.outgrown(long, [99_000])
    assert budget.outgrown(long, [99_950])


def test_chunks_shrink_with_depth_and_with_the_measured_peak() -> None:
    scores = Transient(1 << 10, 64)
    budget = Budget(COST, capacity_nbytes=1, transient=scores, chunk_nbytes=256 << 20)
    assert budget.chunk_tokens(0, most=1024) == 1024
    assert budget.chunk_tokens(16_000, most=1024) == 128
    budget.learn_chunk(1024, 16_000, int(0.5 * scores.chunk_nbytes(1024, 16_000)))
    grown = budget.chunk_tokens(16_000, most=1024)
    assert grown >= 128
    budget.learn_chunk(1024, 16_000, 3 * scores.chunk_nbytes(1024, 16_000))
    assert budget.chunk_factor == 3.0, "more than thought counts at once"
    assert budget.chunk_tokens(16_000, most=1024) == 64
    budget.learn_chunk(1, 0, 1 << 30)
    budget.learn_chunk(1024, 16_000, 0)
    assert budget.chunk_factor == 3.0, "a tiny chunk and an unknown peak teach nothing"
    assert Budget(COST, capacity_nbytes=1).chunk_tokens(1 << 20, most=512) == 512


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.booleans(), st.integers(1, 300), st.integers(1, 3)),
        max_size=60,
    )
)
def test_the_reservation_is_the_sum_of_all_requests(
    steps: list[tuple[int, bool, int, int]],
) -> None:
    """Compared with a dictionary: admitting twice replaces, releasing an unknown job does nothing."""
    budget = Budget(COST, capacity_nbytes=1 << 20)
    model: dict[str, int] = {}
    for name, admits, n_prompt, n in steps:
        request = job(n_prompt, 5, n=n, name=str(name))
        if admits:
            need = budget.need_nbytes(request)
            budget.admit(request, need)
            model[request.id] = need
        else:
            budget.release(request)
            model.pop(request.id, None)
        assert budget.reserved_nbytes == sum(model.values())
        assert budget.free_nbytes() == (1 << 20) - sum(model.values())
    for request_id in list(model):
        budget.release(job(1, name=request_id))
    assert budget.reserved_nbytes == 0
    assert budget.free_nbytes() == budget.capacity_nbytes
