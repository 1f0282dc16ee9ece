"""Several tokens a step on real (tiny) models: the text is that of one token a step, whatever is guessed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from firn.core.values import Sampling
from tests.harness import GREEDY, Harness, Result, running
from tests.models.alone import TIE, plain, prompt_of
from tests.models.drafting import Bold, Knowing
from tests.zoo import VOCAB_SIZE

KINDS = {
    "qwen3": "KVCache",
    "gemma3_text": "RotatingKVCache and KVCache",
    "qwen3_next": "ArraysCache and KVCache",
    "mamba2": "ArraysCache",
    "falcon_h1": "CacheList of ArraysCache and KVCache",
    "deepseek_v3": "MLA",
    "deepseek_v32": "CacheList of two KVCaches",
    "llama4": "ChunkedKVCache: no batched form",
}
every_kind = pytest.mark.parametrize("name", KINDS)
RIGHT = {"always": 1.0, "never": 0.0, "often": 0.7}
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": Sampling(temperature=1.0, seed=7, top_p=0.95, top_k=40),
    "penalised": Sampling(
        temperature=0.8,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias=((20, 2.0), (30, -5.0)),
    ),
}
Story = list[tuple[list[int], int, int, Sampling]]
"""Requests: prompt, tokens of the reply, choices, sampling."""


def story(seed: int, *, samplings: Sequence[Sampling], n_requests: int = 8) -> Story:
    rng = random.Random(seed)
    found: Story = []
    for i in range(n_requests):
        prompt = prompt_of(rng, rng.choice([3, 20, 31, 33, 64, 100]))
        n = 2 if i % 4 == 3 else 1
        found.append((prompt, rng.randint(5, 40), n, samplings[i % len(samplings)]))
    return found


def tell(harness: Harness, requests: Story) -> list[Result]:
    """All at once: more than there are rows, so they join and leave at every step."""
    results = [harness.submit(p, n, n=c, sampling=s) for p, n, c, s in requests]
    return [result.wait() for result in results]


def known(requests: Story, results: Sequence[Result]) -> dict[Any, list[int]]:
    return {
        (tuple(prompt), choice): reply
        for (prompt, *_), result in zip(requests, results, strict=True)
        for choice, reply in result.tokens.items()
    }


def assert_equal(got: Result, want: Result) -> int:
    """Token by token, up to a tie; returns how many could be compared."""
    n = 0
    assert got.error is None and want.error is None
    assert set(got.tokens) == set(want.tokens)
    for choice, reply in want.tokens.items():
        said = got.tokens[choice]
        for i, token in enumerate(reply):
            if i >= len(said) or said[i] != token:
                margin = want.margins[choice][i]
                assert margin < TIE, f"token {i} of {len(reply)}: {said[i : i + 3]}, not {token}"
                break
            assert got.logprobs[choice][i] == pytest.approx(want.logprobs[choice][i], abs=1e-3)
            n += 1
        else:
            assert len(said) == len(reply)
            assert got.reasons[choice] == want.reasons[choice]
    return n


@every_kind
@pytest.mark.parametrize("right", RIGHT)
def test_text_is_that_of_one_token_a_step(name: str, right: str) -> None:
    requests = story(1, samplings=list(SAMPLINGS.values()), n_requests=9)
    options: dict[str, Any] = {"chunk": 32, "cache_nbytes": None, "max_rows": 4}
    with running(plain(name), **options) as harness:
        want = tell(harness, requests)
    drafter = Knowing(known(requests, want), right=RIGHT[right], vocab_size=VOCAB_SIZE)
    speculation = Bold(drafter)
    with running(plain(name), speculation=lambda: speculation, **options) as harness:
        got = tell(harness, requests)
    n_said = sum(len(reply) for result in want for reply in result.tokens.values())
    n_compared = sum(assert_equal(g, w) for g, w in zip(got, want, strict=True))
    assert n_compared > 0.8 * n_said, "too many ties to tell"
    totals = speculation.totals
    assert totals.n_drafted > 100
    if right == "always" and n_compared == n_said:
        assert totals.n_accepted == totals.n_drafted
    if right == "never":
        assert totals.n_accepted == 0
