"""Prompts read in few shapes: the same past and the same answers, whatever is padded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from firn.backends.cuda import shapes
from firn.backends.cuda.shapes import (
    FULL,
    WIDTHS,
    FewBuckets,
    find_buckets,
    growth,
    rounded,
    width_for,
)
from firn.core.values import Job, Prompt, RequestId, Sampling
from firn.models.decode.execution import PLAIN_EXECUTION, Execution
from firn.models.decode.runner import Runner
from firn.models.patches import Patches
from firn.sparse.placing import ArgumentsByPosition
from firn.sparse.thinned import Thinned
from tests.cache.tiny import tiny
from tests.harness import model_info

PLAIN = ["qwen3", "llama", "qwen3_moe"]


def make_runner(name: str, *, few: bool, max_rows: int = 4) -> tuple[Runner, list[tuple[int, int]]]:
    """A runner, and what its model is given: (tokens, columns of the first layer's mask)."""
    model, make_layers = tiny(name)()
    seen: list[tuple[int, int]] = []

    def watched(ids: mx.array, cache: Any = None, **more: Any) -> mx.array:
        masks = getattr(cache[0], "_masks", None)
        seen.append((ids.shape[1], 0 if masks is None else masks.n_columns))
        out: mx.array = model(ids, cache=cache, **more)
        return out

    runner = Runner(
        watched,
        model_info(model, make_layers),
        make_layers=make_layers,
        max_rows=max_rows,
        arguments=ArgumentsByPosition(Patches()),
        execution=Execution(FewBuckets(mx.float32)) if few else PLAIN_EXECUTION,
    )
    return runner, seen


def prompt_of(n: int, seed: int = 0) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(1, 50, n))


def read(runner: Runner, prompt: Prompt, *ends: int) -> Any:
    row = runner.start(None)
    for end in ends:
        runner.prefill(row, prompt, end)
        runner.finish_chunk(row)
    return row


def past(row: Any) -> list[mx.array]:
    return [a for layer in row.layers for a in layer.keys_and_values()]


@pytest.mark.parametrize("name", PLAIN)
def test_a_padded_chunk_leaves_the_same_past(name: str) -> None:
    prompt = prompt_of(400)
    plain, padded = make_runner(name, few=False)[0], make_runner(name, few=True)[0]
    ends = (20, 21, 90, 399)
    a, b = read(plain, prompt, *ends), read(padded, prompt, *ends)
    assert a.n_tokens == b.n_tokens == 399
    for mine, theirs in zip(past(a), past(b), strict=True):
        assert mine.shape == theirs.shape
        assert mx.allclose(mine, theirs, atol=1e-4)


def test_a_wide_chunk_in_a_full_ones_place_leaves_the_same_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if full chunks had 64 tokens."""
    for name, value in (("FULL", 64), ("NARROW", 16), ("WIDTHS", (16, 32, 48, 64))):
        monkeypatch.setattr(shapes, name, value)
    prompt = prompt_of(200)
    plain, (padded, seen) = make_runner("qwen3", few=False)[0], make_runner("qwen3", few=True)
    ends = (64, 105, 128, 180, 199)
    a, b = read(plain, prompt, *ends), read(padded, prompt, *ends)
    assert seen[1] == (48, 0), "padded, without a mask"
    assert a.n_tokens == b.n_tokens == 199
    for mine, theirs in zip(past(a), past(b), strict=True):
        assert mx.allclose(mine, theirs, atol=1e-4)


def test_replies_after_padded_chunks_are_the_same() -> None:
    prompt = prompt_of(120)
    texts = []
    for few in (False, True):
        runner, _ = make_runner("qwen3", few=few)
        row = read(runner, prompt, 30, 119)
        job = Job(
            id=RequestId("r"), prompt=prompt, max_tokens=8, sampling=Sampling(temperature=0.0)
        )
        (row,) = runner.choices(row, job, [0])
        runner.join(row, int(prompt.ids[-1]))
        tokens: list[int] = []
        while len(tokens) < 8:
            runner.launch([row])
            tokens += [t for taken in runner.collect([row], keep_in_flight=0) for t in taken.tokens]
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_prompts_of_any_length_are_read_in_few_shapes() -> None:
    runner, seen = make_runner("qwen3", few=True)
    for n in range(300, 500, 23):
        read(runner, prompt_of(n, n), 40 + n % 9, n - 1)
    assert {width for width, _ in seen} <= set(WIDTHS)
    assert len(set(seen)) <= 6, seen


def test_full_chunks_in_their_place_are_not_padded() -> None:
    layer = KVCache()
    FewBuckets(mx.float32).grow([layer], 3 * FULL)
    zeros = mx.zeros((1, 2, FULL, 8))
    layer.update_and_fetch(zeros, zeros)
    few = FewBuckets(mx.float32)
    assert few.fit([layer], FULL) is None
    padded = few.fit([layer], FULL - 1)
    assert padded is not None
    assert padded.width == FULL
    mask = padded.layers[0].make_mask(FULL, return_array=False, window_size=None)
    assert mask == "causal", "padding behind its tokens needs no mask of its own"
    assert few.fit([layer], FULL + 1) is None, "long ones are worth a plan"
    layer.offset += 1
    assert few.fit([layer], FULL) is not None, "not in its place"


@pytest.mark.parametrize("n_total", [1, FULL - 1, FULL, FULL + 1, 3 * FULL, 4 * FULL + 5])
@pytest.mark.parametrize("start", [0, 256, FULL, FULL + 256])
def test_chunks_end_where_their_shapes_are_common(n_total: int, start: int) -> None:
    """Each is a multiple of a full one in a full one's place, or short enough to be padded."""
    few, largest, n_chunks = FewBuckets(mx.float32), 3 * FULL, 0
    while start < n_total:
        end = few.end(start, min(start + largest, n_total))
        assert start < end <= n_total
        is_common = start % FULL == 0 and end % FULL == 0
        assert is_common or end - start <= FULL
        start, n_chunks = end, n_chunks + 1
    assert n_chunks <= 4


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000, 2048, 2049, 5000, 16_700, 100_000])
def test_buffers_have_few_sizes(n: int) -> None:
    size = rounded(n)
    assert n <= size <= max(n * 9 / 8 + 1, 256 + n)
    assert size % 256 == 0
    assert rounded(size) == size
    assert size + growth(size) == rounded(size + 1)
    between = {rounded(n) for n in range(4096, 8193)}
    assert len(between) <= 9


def test_growing_goes_from_one_size_to_the_next() -> None:
    layer = KVCache()
    FewBuckets(mx.float32).grow([layer], 3000)
    tokens = mx.zeros((1, 2, 3000, 8))
    layer.update_and_fetch(tokens, tokens)
    assert layer.keys.shape[-2] == rounded(3256)
    FewBuckets(mx.float32).grow([layer], 3260)
    assert layer.keys.shape[-2] == rounded(3260 + 256), "room for padding"
    FewBuckets(mx.float32).end_growth([layer])
    n = layer.offset = layer.keys.shape[-2]
    one = mx.zeros((1, 2, 1, 8))
    layer.update_and_fetch(one, one)
    assert layer.keys.shape[-2] == rounded(n + 1)


def test_scores_of_the_prompt_are_those_of_its_tokens() -> None:
    prompt = prompt_of(90)
    logprobs = []
    for few in (False, True):
        runner, _ = make_runner("qwen3", few=few)
        row = runner.start(None)
        runner.prefill(row, prompt, 20, top_logprobs=2)
        scores = runner.finish_chunk(row).logprobs
        runner.prefill(row, prompt, 89, top_logprobs=2)
        logprobs.append([*scores, *runner.finish_chunk(row).logprobs])
    assert len(logprobs[0]) == len(logprobs[1]) == 89
    for a, b in zip(*logprobs, strict=True):
        assert a.token == b.token
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_skipped_tokens_keep_their_places_in_a_padded_chunk() -> None:
    whole = prompt_of(400)
    kept = np.concatenate([np.arange(30), np.arange(64, 100), np.arange(300, 321)])
    thin = Prompt(whole.ids[kept], positions=Thinned(kept, whole, ""))
    rows = [read(make_runner("qwen3", few=few)[0], thin, 20, 86) for few in (False, True)]
    for mine, theirs in zip(past(rows[0]), past(rows[1]), strict=True):
        assert mx.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2"])
def test_rows_with_a_window_or_without_attention_are_not_padded(name: str) -> None:
    runner, seen = make_runner(name, few=True)
    read(runner, prompt_of(60), 20, 59)
    assert [width for width, _ in seen] == [20, 39]


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2"])
def test_padding_moves_no_state(name: str) -> None:
    """It is not taken for the last tokens of a convolution either."""
    prompt = prompt_of(400)
    plain, (padded, seen) = make_runner(name, few=False)[0], make_runner(name, few=True)
    ends = (1, 20, 21, 90, 399)
    a, b = read(plain, prompt, *ends), read(padded, prompt, *ends)
    assert {width for width, _ in seen} <= set(WIDTHS)
    assert a.n_tokens == b.n_tokens == 399
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        assert getattr(theirs, "lengths", None) is None, "no later pass has padding of this one"
        kept = zip(_arrays(mine), _arrays(theirs), strict=True)
        assert all(mx.allclose(one, other, atol=1e-3) for one, other in kept)


def _arrays(layer: Any) -> list[mx.array]:
    return list(layer.keys_and_values() if type(layer) is KVCache else layer.cache)


def test_a_window_in_the_mask_is_kept() -> None:
    masks = shapes._Masks(4, 3, 8, mx.float32)
    seen = np.array(masks.get(2)) == 0
    assert seen.tolist() == [
        [False, False, False, True, True, False, False, False],
        [False, False, False, False, True, True, False, False],
        [False, False, False, False, False, True, True, False],
    ]
    assert masks.get(2) is masks.get(2)


def test_a_model_that_takes_its_mask_for_booleans_is_refused() -> None:
    with pytest.raises(ValueError, match="different"):
        find_buckets(*tiny("deepseek_v3")())


def test_a_model_that_fails_the_trial_is_refused() -> None:
    model, make_layers = tiny("qwen3")()
    assert find_buckets(model, make_layers).fit(make_layers(), 3) is not None
    with pytest.raises(ValueError, match="plain attention"):
        find_buckets(*tiny("mamba2")())
    with pytest.raises(ValueError, match="different"):
        find_buckets(*tiny("olmo_hybrid")())

    def forgets_its_mask(ids: mx.array, cache: Any) -> mx.array:
        for layer in cache:
            if hasattr(layer, "_masks"):
                layer._masks = shapes._Masks(0, ids.shape[1], layer._masks.n_columns, mx.float32)
        out: mx.array = model(ids, cache=cache)
        return out

    with pytest.raises(ValueError, match="different"):
        find_buckets(forgets_its_mask, make_layers)

    def refuses(ids: mx.array, cache: Any) -> mx.array:
        if hasattr(cache[0], "_masks"):
            raise TypeError("no such mask")
        out: mx.array = model(ids, cache=cache)
        return out

    with pytest.raises(ValueError, match="no such mask"):
        find_buckets(refuses, make_layers)


def test_prompts_read_together_have_a_common_width() -> None:
    runner, seen = make_runner("qwen3", few=True)
    plain, _ = make_runner("qwen3", few=False)
    prompts = [prompt_of(n, n) for n in (31, 40, 37)]
    lots = []
    for r in (plain, runner):
        rows = [r.start(None) for _ in prompts]
        r.batched_prefill(rows, prompts, [len(p) - 1 for p in prompts])
        for row in rows:
            r.finish_chunk(row)
        lots.append(rows)
    assert seen[-1][0] == width_for(39) == 64
    for a, b in zip(*lots, strict=True):
        for mine, theirs in zip(past(a), past(b), strict=True):
            assert mine.shape == theirs.shape
            assert mx.allclose(mine, theirs, atol=1e-4)
