"""Sessions with planted facts, interleaved and batched: every answer is from its own session.

Slow: only trained models give answers that are right or wrong, and they are larger than random ones.
"""

from __future__ import annotations

import pytest

from tests.oracle import Oracle

MODELS = ("firn-demo", "firn-demo-hybrid")


@pytest.mark.parametrize("model", MODELS)
def test_batched_sessions_answer_for_themselves(model: str) -> None:
    with Oracle(model, cache_nbytes=None) as oracle:
        assert oracle.wrong([oracle.exam(seed, n_facts=8) for seed in range(12)]) == []


@pytest.mark.parametrize(("model", "n_room"), [("firn-demo", 4), ("firn-demo-hybrid", 3)])
def test_five_times_as_many_sessions_as_memory_holds(model: str, n_room: int) -> None:
    with Oracle(model) as measured:
        one = measured.exam(0, n_facts=6)
        assert measured.wrong([one]) == []
        session_nbytes = measured.cache.records.memory.nbytes
    with Oracle(model, cache_nbytes=n_room * session_nbytes) as oracle:
        exams = [oracle.exam(seed, n_facts=6) for seed in range(5 * n_room)]
        assert oracle.wrong(exams, rounds=2) == []
        assert oracle.cache.stats.evictions
        assert oracle.cache.records.memory.nbytes <= n_room * session_nbytes
        assert not oracle.cache.stats.faults


def test_the_oracle_can_fail() -> None:
    """A reply about another session's document is caught."""
    with Oracle(cache_nbytes=None) as oracle:
        mine, other = oracle.exam(1), oracle.exam(2)
        question = mine.session.questions[0]
        assert oracle.text(oracle.put(other, 0)) != question.answer
