"""Tiny random models of every layer kind, to compare a cached answer with an uncached one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from tests.cache.lab import nodes_of
from tests.harness import Harness, Result, running
from tests.zoo import VOCAB_SIZE, ZOO, Entry, build_entry

Build = Callable[[], tuple[Any, Callable[[], list[Any]]]]

WINDOW = 32
"""The window of every windowed model in the zoo."""


def tiny(
    name: str,
    *,
    bits: int = 0,
    dtype: mx.Dtype = mx.float32,
    gains: Mapping[str, float] = MappingProxyType({}),
    **config: Any,
) -> Build:
    """A builder for Harness. bits: plain attention's live cache is quantised, as in mlx-lm."""
    base = ZOO[name]
    config, factors = {**base.config, **config}, {**base.gains, **gains}
    entry = Entry(name, base.module, config, gains=factors)

    def make() -> tuple[Any, Callable[[], list[Any]]]:
        model = build_entry(entry, dtype=dtype)

        def layers() -> list[Any]:
            return [_quantised(layer, bits) for layer in make_prompt_cache(model)]

        return model, layers

    return make


def _quantised(layer: Any, bits: int) -> Any:
    if isinstance(layer, CacheList):
        layer.caches = tuple(_quantised(c, bits) for c in layer.caches)
    elif bits and type(layer) is KVCache:
        return layer.to_quantized(group_size=32, bits=bits)
    return layer


def tokens(seed: int, n: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(3, VOCAB_SIZE) for i in range(n)]


@contextmanager
def cold_and_warm(build: Build, *, chunk: int, **options: Any) -> Any:
    """Two engines over one model, without and with a cache; in exact mode, with the same chunks."""
    with (
        running(build, cache_nbytes=None, chunk=chunk, exact=options.get("exact", False)) as cold,
        running(build, chunk=chunk, **options) as warm,
    ):
        yield cold, warm


class Reference:
    """The uncached answers, each computed once."""

    def __init__(self, cold: Harness) -> None:
        self._cold = cold
        self._known: dict[tuple[int, ...], Result] = {}

    def __call__(self, ids: Sequence[int], n_reply: int = 2) -> Result:
        key = (n_reply, *ids)
        if key not in self._known:
            self._known[key] = self._cold.ask(ids, n_reply)
        return self._known[key]


def same_bits(a: Result, b: Result) -> bool:
    return a.tokens == b.tokens and a.logprobs == b.logprobs


def payloads(harness: Harness) -> dict[tuple[bytes, str], list[mx.array]]:
    """Every record in memory, by its content address."""
    by_address: dict[tuple[bytes, str], list[mx.array]] = {}
    for node in nodes_of(harness.cache.records.tree):
        for part, record in node.records.items():
            arrays = list(record.arrays.stacks)
            by_address[node.key, part.value] = arrays
    return by_address
