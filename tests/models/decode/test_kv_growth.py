"""A prompt's caches hold all of it from the first chunk on, and grow in small steps after it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from firn.core.values import Job, Prompt, RequestId
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.runner import Runner
from tests.cache.tiny import tiny
from tests.harness import model_info

N_HEADS, DIM = 2, 64


def keys(layer: Any) -> mx.array:
    return layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys


def feed(layer: Any, n_tokens: int, seed: int = 0) -> None:
    new = mx.random.normal((1, N_HEADS, n_tokens, DIM), key=mx.random.key(seed))
    layer.update_and_fetch(new, new)


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache])
def test_one_allocation_for_a_prompt_and_small_ones_after_it(make: Any) -> None:
    layer = make()
    for start in range(0, 3000, 500):
        ShapeBuckets().grow([layer], 3000)
        feed(layer, 500, start)
        assert keys(layer).shape[-2] == 3584, "3000 and an eighth, in whole steps"
    ShapeBuckets().end_growth([layer])
    feed(layer, 400)
    assert keys(layer).shape[-2] <= 3000 + 400 + 512


def test_caches_with_room_hold_the_same_keys() -> None:
    plain, roomy = KVCache(), KVCache()
    for n, start in ((100, 0), (300, 1), (64, 2), (1, 3)):
        ShapeBuckets().grow([roomy], 464)
        for layer in (plain, roomy):
            feed(layer, n, start)
    assert mx.array_equal(*(layer.keys_and_values()[0] for layer in (plain, roomy)))


def test_a_restored_row_grows_once_to_the_rest() -> None:
    layer = KVCache()
    feed(layer, 700)
    ShapeBuckets().grow([layer], 5000)
    feed(layer, 200)
    grown = keys(layer).shape[-2]
    assert 5000 <= grown <= 5000 + 5000 // 8 + 3 * 256
    ShapeBuckets().grow([layer], 5000)
    feed(layer, 2000)
    assert keys(layer).shape[-2] == grown


def test_windows_keep_their_own_step_and_nested_caches_are_found() -> None:
    window, nested = RotatingKVCache(max_size=512), KVCache()
    ShapeBuckets().grow([window, CacheList(nested)], 4000)
    assert window.step == 256
    assert nested.step > 4000
    ShapeBuckets().end_growth([CacheList(nested)])
    assert nested.step == 256


def test_the_runner_makes_room_for_a_prompt_and_ends_it_after() -> None:
    model, make_layers = tiny("qwen3")()
    runner = Runner(model, model_info(model, make_layers), make_layers=make_layers, max_rows=4)
    prompt = Prompt(np.arange(900, dtype=np.int64) % 50)
    row = runner.start(None)
    runner.prefill(row, prompt, 100)
    runner.finish_chunk(row)
    assert keys(row.layers[0]).shape[-2] >= 900
    runner.prefill(row, prompt, 899)
    runner.finish_chunk(row)
    (row,) = runner.choices(row, Job(RequestId("1"), prompt, 4), [0])
    assert {layer.step for layer in row.layers} == {256}
