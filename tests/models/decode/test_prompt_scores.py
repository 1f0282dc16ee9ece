"""Scores of a prompt's tokens on tiny models of every kind: the same as in one plain pass."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.models.decode.sampling import SCORED_ROWS, score
from tests.harness import running
from tests.models.alone import plain, prompt_of
from tests.zoo import build

KINDS = ("qwen3", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v32", "llama4")


def expected(name: str, ids: list[int]) -> np.ndarray:
    model = build(name)
    logits = model(mx.array([ids]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("name", KINDS)
def test_scores_are_those_of_a_plain_pass(name: str) -> None:
    """Prompts longer and shorter than a chunk, while another row decodes; cached or not."""
    rng = random.Random(3)
    prompts = [prompt_of(rng, n) for n in (1, 2, 33, 90)]
    with running(plain(name), chunk=32, block=16) as h:
        busy = h.submit(prompt_of(rng, 20), 40)
        for _ in range(2):  # the second time there is something that it must not reuse
            for prompt in prompts:
                result = h.ask(prompt, 2, scored=True)
                assert result.n_cached == 0
                want = expected(name, prompt)
                assert [s.token for s in result.scores] == prompt[1:]
                got = [s.logprob for s in result.scores]
                chosen = [want[i, token] for i, token in enumerate(prompt[1:])]
                assert got == pytest.approx(chosen, abs=2e-3)
                for i, each in enumerate(result.scores):
                    best = np.sort(want[i])[::-1][:2]
                    assert [p for _, p in each.top] == pytest.approx(best, abs=2e-3)
        assert h.ask([*prompts[-1], 5], 2).n_cached > 0
        busy.wait()


@pytest.mark.parametrize("n", [1, SCORED_ROWS - 1, SCORED_ROWS, SCORED_ROWS + 1, 3 * SCORED_ROWS])
@pytest.mark.parametrize("top", [0, 1, 7, 99])
def test_rows_are_scored_in_pieces_that_do_not_show(n: int, top: int) -> None:
    vocab = 50
    logits = mx.random.normal((n, vocab), key=mx.random.key(n))
    tokens = np.random.default_rng(n).integers(0, vocab, n)
    logprobs = score(logits.astype(mx.bfloat16), tokens, top=top).read()
    rows = np.array(logits.astype(mx.bfloat16).astype(mx.float32), dtype=np.float64)
    normal = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    assert [f.token for f in logprobs] == tokens.tolist()
    assert [f.logprob for f in logprobs] == pytest.approx(
        normal[range(n), tokens].tolist(), abs=1e-5
    )
    for row, each in zip(normal, logprobs, strict=True):
        assert len(each.top) == min(top, vocab - 1)
        values = [value for _, value in each.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(np.sort(row)[::-1][: len(values)].tolist(), abs=1e-5)
        assert all(abs(row[token] - value) < 1e-5 for token, value in each.top)
