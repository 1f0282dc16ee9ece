"""Measurements on a tiny model: chunked prefill, decoding, batching, sensitivity to context.

Differences are given as a multiple of the spread of the logits, so that one tolerance fits
architectures with and without logit scaling.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

Cache = list[Any]

BATCH_METHODS = ("merge", "extend", "filter", "extract")


def tokens(n: int, *, salt: int = 0, vocab_size: int = 384) -> list[int]:
    """A fixed prompt without short repetitions."""
    return [(7 * i * i + 31 * i + 13 + 101 * salt) % (vocab_size - 16) + 16 for i in range(n)]


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference of logits, in units of their spread."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    # -inf marks ids that a model never emits; equal infinities are equal.
    same = got == want
    delta = mx.where(same, 0.0, mx.abs(got - want))
    finite = mx.where(mx.isinf(want), 0.0, want)
    spread = mx.sqrt(mx.var(finite, axis=-1)).mean()
    value: Any = (delta.max() / spread).item()
    # NaN compares as small everywhere, which must not pass for agreement.
    return float("inf") if math.isnan(value) else float(value)


def feed(model: nn.Module, ids: Sequence[int], cache: Cache, *, chunk: int) -> mx.array:
    """Logits of every position, computed in chunks through the cache."""
    parts = []
    for start in range(0, len(ids), chunk):
        logits = model(mx.array([ids[start : start + chunk]]), cache=cache)
        mx.eval(logits, [c.state for c in cache])
        parts.append(logits)
    return mx.concatenate(parts, axis=1)


def run(model: nn.Module, ids: Sequence[int], *, chunk: int) -> mx.array:
    return feed(model, ids, make_prompt_cache(model), chunk=chunk)


def describe(cache: Any) -> str:
    """A cache's class, with its parts if it is a list of caches."""
    name = type(cache).__name__
    if name != "CacheList":
        return name
    return f"CacheList({','.join(describe(c) for c in cache.caches)})"


def layout(caches: Cache) -> str:
    """The classes of a cache list in order, runs of one class written as a count."""
    runs: list[tuple[str, int]] = []
    for cache in caches:
        name = describe(cache)
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return " ".join(f"{name}*{n}" if n > 1 else name for name, n in runs)


def sensitivity(model: nn.Module, *, n_tokens: int = 96, at: int = 3) -> float:
    """How much the last logits move when one early token changes."""
    ids = tokens(n_tokens)
    other = [*ids[:at], (ids[at] + 50) % 300 + 16, *ids[at + 1 :]]
    first = run(model, ids, chunk=n_tokens)[:, -1:]
    return difference(run(model, other, chunk=n_tokens)[:, -1:], first)


def greedy(model: nn.Module, ids: Sequence[int], n_new: int) -> list[int]:
    cache = make_prompt_cache(model)
    logits = model(mx.array([ids]), cache=cache)
    out = []
    for _ in range(n_new):
        token: Any = mx.argmax(logits[0, -1]).item()
        out.append(token)
        logits = model(mx.array([[token]]), cache=cache)
    return out


# What mlx-lm raises when a model's arithmetic does not fit a batch.
BATCH_ERRORS = (ValueError, TypeError, RuntimeError, AttributeError, IndexError)


@dataclass(frozen=True)
class Stage:
    """One stage of batched decoding: its difference from single rows, or the error it raised."""

    name: str
    difference: float
    error: str = ""


def merge(rows: Sequence[Cache]) -> Cache:
    merged: Cache = [same[0].merge(list(same)) for same in zip(*rows, strict=True)]
    return merged


def _decode(model: nn.Module, cache: Cache, steps: Sequence[Sequence[int]]) -> mx.array:
    """Logits of fixed tokens fed one by one: `steps[t]` has one token per row."""
    parts = []
    for step in steps:
        logits = model(mx.array([[t] for t in step]), cache=cache)
        mx.eval(logits, [c.state for c in cache])
        parts.append(logits)
    return mx.concatenate(parts, axis=1)


def _prefilled(model: nn.Module, ids: Sequence[int]) -> Cache:
    cache: Cache = make_prompt_cache(model)
    feed(model, ids, cache, chunk=len(ids))
    return cache


@dataclass(frozen=True)
class Rows:
    """Prompts of different lengths and the tokens fed after them, with the single-row logits."""

    model: nn.Module
    prompts: list[list[int]]
    later: list[list[int]]
    want: list[mx.array]

    @classmethod
    def make(cls, model: nn.Module, lengths: Sequence[int], n_later: int) -> "Rows":
        prompts = [tokens(n, salt=i + 1) for i, n in enumerate(lengths)]
        later = [tokens(n_later, salt=i + 7) for i in range(len(lengths))]
        want = [
            _decode(model, _prefilled(model, p), [[t] for t in ids])
            for p, ids in zip(prompts, later, strict=True)
        ]
        return cls(model, prompts, later, want)

    def fresh(self, row: int) -> Cache:
        return _prefilled(self.model, self.prompts[row])

    def compare(self, cache: Cache, spans: dict[int, range]) -> float:
        """Decode `spans[row]` of each row's later tokens in one batch; rows in dict order."""
        steps = list(
            zip(*([self.later[r][t] for t in span] for r, span in spans.items()), strict=True)
        )
        got = _decode(self.model, cache, steps)
        want = mx.concatenate([self.want[r][:, s.start : s.stop] for r, s in spans.items()])
        return difference(got, want)


def batch_stages(model: nn.Module, lengths: tuple[int, int, int] = (110, 28, 45)) -> list[Stage]:
    """Merge two rows and decode; extend by a third; drop the first; take one out.

    Stops after the first stage that raises, since the batch is then unusable.
    """
    n = 6
    rows = Rows.make(model, lengths, 4 * n)
    batch: Cache = []

    def merged() -> float:
        batch.extend(merge([rows.fresh(0), rows.fresh(1)]))
        return rows.compare(batch, {0: range(n), 1: range(n)})

    def extended() -> float:
        for mine, other in zip(batch, merge([rows.fresh(2)]), strict=True):
            mine.extend(other)
        return rows.compare(batch, {0: range(n, 2 * n), 1: range(n, 2 * n), 2: range(n)})

    def filtered() -> float:
        for cache in batch:
            cache.filter(mx.array([1, 2]))
        return rows.compare(batch, {1: range(2 * n, 3 * n), 2: range(n, 2 * n)})

    def extracted() -> float:
        alone = [cache.extract(0) for cache in batch]
        return rows.compare(alone, {1: range(3 * n, 4 * n)})

    stages: list[Stage] = []
    for step in (merged, extended, filtered, extracted):
        try:
            stages.append(Stage(step.__name__, step()))
        except BATCH_ERRORS as error:
            stages.append(Stage(step.__name__, float("inf"), f"{type(error).__name__}: {error}"))
            break
    return stages


def has_batch_methods(model: nn.Module) -> bool:
    """Whether every cache can be merged, and its merged form extended, filtered and extracted."""
    caches = make_prompt_cache(model)
    if not all(hasattr(c, "merge") for c in caches):
        return False
    merged = _attempt(lambda: merge([make_prompt_cache(model), make_prompt_cache(model)]))
    return merged is not None and all(hasattr(c, m) for c in merged for m in BATCH_METHODS)


def _attempt(action: Callable[[], Cache]) -> Cache | None:
    try:
        return action()
    except AttributeError:
        return None
