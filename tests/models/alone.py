"""Reference replies: a prompt alone in an engine, or in a plain mlx-lm loop over one row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from firn.core.values import Sampling
from tests.harness import GREEDY, Result, running
from tests.zoo import VOCAB_SIZE, build

TIE = 1e-3
"""Lead of the best token below which rounding decides, so that two ways to compute may differ."""

Built = tuple[Any, Callable[[], list[Any]]]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(16, VOCAB_SIZE) for _ in range(length)]


def plain(name: str) -> Callable[[], Built]:
    """For the harness: builds the model on the engine's thread."""
    return lambda: with_caches(build(name))


def with_caches(model: Any) -> Built:
    return model, lambda: make_prompt_cache(model)


@cache
def reference_model(name: str) -> Any:
    return build(name)


_said: dict[tuple[str, tuple[int, ...], Sampling], Result] = {}


def said_alone(
    name: str, prompts: Sequence[Sequence[int]], n_reply: int, sampling: Sampling = GREEDY
) -> list[Result]:
    """An engine's reply to each prompt alone, one token a step. Each reply is computed once."""
    keys = [(name, tuple(prompt), sampling) for prompt in prompts]
    new = [k for k in keys if k not in _said or len(_said[k].reply) < n_reply]
    if new:
        with running(plain(name), cache_nbytes=None) as harness:
            for key in new:
                _said[key] = harness.ask(key[1], n_reply, sampling=sampling)
    return [beginning(_said[key], n_reply) for key in keys]


def beginning(result: Result, n_reply: int, reason: str = "length") -> Result:
    """The result as if it had ended after `n_reply` tokens."""
    return Result(
        tokens={0: result.reply[:n_reply]},
        logprobs={0: result.logprobs[0][:n_reply]},
        margins={0: result.margins[0][:n_reply]},
        reasons={0: reason},
    )


def steps(name: str, prompt: Sequence[int], replies: Sequence[int] = ()) -> mx.array:
    """Logits (1 + replies, vocabulary): after the prompt, and after each given token of a reply.

    The reply is read in one pass: a step for each of its tokens would take ten times as long, for
    the same result up to rounding.
    """
    model = reference_model(name)
    layers = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=layers)
        mx.eval([layer.state for layer in layers])
    return model(mx.array([[prompt[-1], *replies]]), cache=layers)[0]


def assert_same(name: str, prompt: Sequence[int], said: Sequence[int]) -> int:
    """Assert that `said` is one row's greedy reply; return how many tokens could be compared."""
    logits = steps(name, prompt, said[:-1])
    want = mx.argmax(logits, axis=-1).tolist()
    best = mx.sort(logits, axis=-1)
    margins = (best[:, -1] - best[:, -2]).tolist()
    for i, (got, token, margin) in enumerate(zip(said, want, margins, strict=True)):
        if got != token:
            assert margin < TIE, f"{name}: token {i} of {len(said)} after {len(prompt)}"
            return i
    return len(said)
