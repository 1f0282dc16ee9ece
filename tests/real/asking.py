"""One greedy question through the real client, and how two answers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

Messages = list[dict[str, str]]
TIE = 1e-3
"""Tokens whose log-probabilities are closer than this are a tie: the order of summation decides,
which differs between a prompt read in one piece, one that is resumed and one in a batch."""


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=600)


def user(text: str, *, system: str | None = None) -> Messages:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


@dataclass(frozen=True)
class Reply:
    """`margins`: each token's log-probability minus the second best one's."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    finish: str
    n_prompt: int
    n_cached: int
    n_accepted: int = 0


def ask(url: str, messages: Messages, *, n: int = 24, **body: Any) -> Reply:
    """body: fields that the client does not know, such as "cache"."""
    made = client(url).chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=n,
        logprobs=True,
        top_logprobs=2,
        extra_body=body,
    )
    (choice,), usage = made.choices, made.usage
    assert choice.logprobs is not None
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    parts, details = choice.logprobs.content or [], usage.completion_tokens_details
    return Reply(
        text=choice.message.content or "",
        tokens=tuple(part.token for part in parts),
        logprobs=tuple(part.logprob for part in parts),
        margins=tuple(
            part.top_logprobs[0].logprob - part.top_logprobs[1].logprob for part in parts
        ),
        finish=choice.finish_reason,
        n_prompt=usage.prompt_tokens,
        n_cached=usage.prompt_tokens_details.cached_tokens or 0,
        n_accepted=details.accepted_prediction_tokens or 0 if details else 0,
    )


def ask_together(url: str, asked: Sequence[Messages], **body: Any) -> list[Reply]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda messages: ask(url, messages, **body), asked))


@dataclass(frozen=True)
class Comparison:
    n_equal: int
    n_ties: int
    n: int

    def __str__(self) -> str:
        ties = f", {self.n_ties} parted at a tie" if self.n_ties else ""
        return f"{self.n_equal} of {self.n} equal{ties}"

    @property
    def good(self) -> bool:
        return self.n_equal + self.n_ties == self.n and 10 * self.n_ties <= self.n


def compare(ours: Sequence[Reply], theirs: Sequence[Reply]) -> Comparison:
    """Token by token; at the first difference, the margin in `ours` tells whether it was a tie."""
    n_equal = n_ties = 0
    for a, b in zip(ours, theirs, strict=True):
        parts = [
            i for i, pair in enumerate(zip(a.tokens, b.tokens, strict=False)) if len(set(pair)) > 1
        ]
        if a.tokens == b.tokens and a.text == b.text:
            n_equal += 1
        elif parts and a.margins[parts[0]] < TIE:
            n_ties += 1
    return Comparison(n_equal, n_ties, len(ours))


@dataclass(frozen=True)
class Drift:
    """How far replies from an inexact cache are from the exact ones."""

    n: int
    n_equal: int
    n_first: int
    """Replies with the same first token."""
    n_same_tokens: int
    """Tokens before the first different one, in all replies; after it, the texts are unrelated."""
    n_tokens: int
    mean: float
    worst: float
    """Mean and largest difference of the log-probabilities of those same tokens."""

    @staticmethod
    def between(exact: Sequence[Reply], other: Sequence[Reply]) -> Drift:
        n_equal = n_first = n_same = 0
        apart: list[float] = []
        for a, b in zip(exact, other, strict=True):
            same = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
            n = same.index(False) if False in same else len(same)
            n_equal += a.tokens == b.tokens
            n_first += n > 0
            n_same += n
            apart += [abs(x - y) for x, y in zip(a.logprobs[:n], b.logprobs[:n], strict=True)]
        n_tokens = sum(len(reply.tokens) for reply in exact)
        mean, worst = sum(apart) / max(len(apart), 1), max(apart, default=0.0)
        return Drift(len(exact), n_equal, n_first, n_same, n_tokens, mean, worst)

    def __str__(self) -> str:
        return (
            f"{self.n_equal} of {self.n} replies equal, {self.n_first} first tokens, "
            f"{self.n_same_tokens} of {self.n_tokens} tokens before the first difference; their "
            f"log-probabilities {self.mean:.1e} apart on average, {self.worst:.1e} at most"
        )
