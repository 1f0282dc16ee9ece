"""Real models whose replies outgrow the memory: each goes on as if it had never waited."""

from __future__ import annotations

import random

import pytest

from firn.core.values import Sampling
from firn.engine.budget import Budget, RowCost
from tests.cache.lab import n_leases
from tests.harness import Harness, running
from tests.models.alone import assert_same, plain, prompt_of, said_alone

N_REPLY = 36


def squeeze(h: Harness, capacity: int) -> None:
    """A budget of a byte per token, with little reserved for a reply: six together outgrow it."""
    budget = Budget(RowCost(1, 0), capacity_nbytes=capacity, reserve_tokens=16, grow_tokens=16)
    h.between_steps(lambda: setattr(h.engine._loop.inflight, "budget", budget))


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_reply_that_had_to_wait_goes_on_as_it_would_have(
    name: str, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(6)
    prompts = [prompt_of(rng, n) for n in (40, 30, 50, 20, 45, 35)]
    warm = Sampling(temperature=0.8, seed=3)
    alone = [r.reply for r in said_alone(name, prompts[:2], N_REPLY, warm)]
    with (
        caplog.at_level("INFO", "firn.engine"),
        running(plain(name), chunk=32, cache_nbytes=1 << 30 if cached else None) as h,
    ):
        squeeze(h, 340)
        greedy = [h.submit(p, N_REPLY) for p in prompts[2:]]
        drawn = [h.submit(p, N_REPLY, sampling=warm) for p in prompts[:2]]
        for prompt, result in zip(prompts[2:], greedy, strict=True):
            assert result.wait().error is None
            assert len(result.reply) == N_REPLY
            assert_same(name, prompt, result.reply)
        for want, result in zip(alone, drawn, strict=True):
            assert result.wait().error is None
            assert len(result.reply) == N_REPLY
            same = sum(a == b for a, b in zip(want, result.reply, strict=True))
            assert same > N_REPLY // 2, "the same draws, but for roundings of a batch"
        if cached:
            assert h.between_steps(lambda: n_leases(h.cache)) == 0
            assert not h.cache.stats.faults
    assert "memory is low" in caplog.text
