"""Forced tokens on real (tiny) models: after them comes what the model says next."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from firn.core.values import RequestId, Sampling
from firn.models.decode.sampling import Picker, pick
from tests.harness import Harness, Result, running
from tests.models.alone import assert_same, plain, prompt_of

KINDS = ("qwen3", "gemma3_text", "qwen3_next")
FORCED = [20, 21, 22]


def submit_forced(harness: Harness, prompt: list[int], n_reply: int, *, at: int) -> Result:
    """Submit between two steps and force right after, before many tokens are picked."""
    started = harness.engine.call(lambda _: harness.submit(prompt, n_reply))
    result = started.result(60)
    request = RequestId(str(len(harness.results) - 1))
    harness.engine.force(request, 0, FORCED, at=at)
    return result


@pytest.mark.parametrize("name", KINDS)
def test_after_forced_tokens_comes_what_the_model_says(name: str) -> None:
    """In a batch while a long prompt is read, so that some steps are in flight and some are not."""
    rng = random.Random(1)
    prompts = [prompt_of(rng, n) for n in (20, 50, 37)]
    with running(plain(name), chunk=16) as harness:
        others = [harness.submit(prompt, 30) for prompt in prompts]
        prompt = prompt_of(rng, 40)
        result = submit_forced(harness, prompt, 24, at=9)
        others.append(harness.submit(prompt_of(rng, 200), 4))
        for each in (result, *others):
            assert each.wait().error is None
    said = result.reply
    at = next(i for i in range(9, 24) if said[i : i + 3] == FORCED)
    assert assert_same(name, prompt, said[:at]) > 2
    longer = [*prompt, *said[: at + 3]]
    assert assert_same(name, longer, said[at + 3 :]) > 2


def test_a_row_remembers_what_was_forced_not_what_it_would_have_picked() -> None:
    """Penalties count the forced token, and the logprob is its own; the other row is free."""
    logits = mx.zeros((2, 10))
    logits[:, 5], logits[:, 6] = 1.0, 0.5

    def picker() -> Picker:
        return Picker(
            Sampling(temperature=0.0, frequency_penalty=2.0),
            choice=0,
            vocab_size=10,
            prompt=np.array([1]),
            top_logprobs=0,
        )

    rows = [picker(), picker()]
    first = pick(logits, rows, [6, None])
    assert first.tokens.tolist() == [6, 5]
    assert first.chosen is not None
    assert (first.chosen[1] - first.chosen[0]).item() == pytest.approx(0.5)
    assert pick(logits, rows).tokens.tolist() == [5, 6], "each avoids what it has said"
