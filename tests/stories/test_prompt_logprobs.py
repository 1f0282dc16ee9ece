"""Logprobs of prompts from a whole server on a built-in model, as evaluation harnesses ask for."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from firn.config import CacheConfig, Config, ModelConfig
from firn.demo.builtin import builtin_folder
from tests.api import real

MODEL = "firn-demo"
FACT = "The price of the Fenlux clock is 500.49 euros."
CHAT = (
    f"<|im_start|>user\n{FACT}\n\nWhat is the price of the Fenlux clock?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    folder = builtin_folder(MODEL)
    assert folder is not None
    config = Config(
        model=ModelConfig(path=MODEL),
        cache=CacheConfig(cache_memory_mb=64, cache_block_tokens=16, no_ssd_cache=True),
    )
    with real.serving(folder, config=config) as server:
        yield server.openai()


def score(client: openai.OpenAI, text: str, n_behind: int) -> float:
    """Log probability of the last `n_behind` tokens of a text."""
    reply = client.completions.create(
        model=MODEL, prompt=text, echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert reply.choices[0].text == text
    assert reply.choices[0].logprobs is not None
    logprobs = reply.choices[0].logprobs.token_logprobs
    assert logprobs is not None
    return sum(logprobs[-n_behind:])


def test_a_prompts_logprobs_are_those_its_tokens_had_as_a_reply(client: openai.OpenAI) -> None:
    """Twice: the second time all of it is in the cache, which has no logprobs."""
    made = client.completions.create(
        model=MODEL, prompt=CHAT, max_tokens=24, temperature=0, logprobs=1
    )
    assert made.choices[0].text == FACT
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    for _ in range(2):
        again = score(client, CHAT + FACT, len(logprobs.token_logprobs))
        assert again == pytest.approx(sum(logprobs.token_logprobs), abs=0.05)


def test_the_right_answer_is_the_likeliest(client: openai.OpenAI) -> None:
    answers = [FACT, FACT.replace("500.49", "212.07"), FACT.replace("clock", "lamp")]
    ids = [client.completions.create(model=MODEL, prompt=a, max_tokens=0) for a in answers]
    n_tokens = [each.usage.prompt_tokens for each in ids if each.usage]
    scores = [score(client, CHAT + a, n) for a, n in zip(answers, n_tokens, strict=True)]
    assert scores.index(max(scores)) == 0
    assert scores[0] > -1.0


def test_a_prompt_computed_for_logprobs_is_reused(client: openai.OpenAI) -> None:
    text = "Please note: the port of server Wilvex is 86103. " * 4
    score(client, text, 1)
    usage = client.completions.create(model=MODEL, prompt=f"{text}Hello", max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= usage.prompt_tokens - 16
