"""firn's attention and sigmoid are the same functions as MLX's own, for every mask and head count."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from firn import app
from firn.backends.cpu import softmax as cpu_softmax
from firn.backends.cpu.softmax import (
    MIN_SCORES,
    _plain_attention,
    _plain_sigmoid,
    attention,
    install_if_faster,
    sigmoid,
)
from firn.config import CacheConfig, Config, ModelConfig
from firn.models.patches import Patches
from tests.backends.fakes import pretend

N_TOKENS, N_KEYS = 32, 256
Float64 = npt.NDArray[np.float64]
EPSILON = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = mx.fast.scaled_dot_product_attention, mx.sigmoid
    yield
    mx.fast.scaled_dot_product_attention, mx.sigmoid = before


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    rng = np.random.default_rng(list(shape))
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def heads(batch: int, n_heads: int, n_kv: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    q = 3 * normal(batch, n_heads, N_TOKENS, 32, dtype=dtype)
    k = normal(batch, n_kv, N_KEYS, 32, dtype=dtype)
    return [q, k, normal(batch, n_kv, N_KEYS, 16, dtype=dtype)]


def causal() -> mx.array:
    ends = mx.arange(N_KEYS - N_TOKENS, N_KEYS)
    return mx.arange(N_KEYS)[None] <= ends[:, None]


MASKS = {
    "none": lambda batch, n_heads: None,
    "causal": lambda batch, n_heads: "causal",
    "flags": lambda batch, n_heads: causal(),
    "padding": lambda batch, n_heads: (
        causal() & (mx.arange(N_KEYS)[None] >= mx.arange(batch)[:, None] * 7)[:, None, None]
    ),
    "of each head": lambda batch, n_heads: normal(batch, n_heads, N_TOKENS, N_KEYS) > -1,
    "added": lambda batch, n_heads: mx.where(causal(), 0.0, -1e9),
    "added to each head": lambda batch, n_heads: normal(1, n_heads, N_TOKENS, N_KEYS),
}


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "n_heads", "n_kv"), [(1, 4, 4), (2, 6, 2), (3, 4, 1)])
def test_attention_equals_mlx_own(
    batch: int, n_heads: int, n_kv: int, mask: str, dtype: mx.Dtype
) -> None:
    q, k, v = heads(batch, n_heads, n_kv, dtype)
    given = MASKS[mask](batch, n_heads)
    if isinstance(given, mx.array) and given.dtype != mx.bool_:
        given = given.astype(dtype)
    assert q.size // 32 * N_KEYS >= MIN_SCORES
    ours = attention(q, k, v, scale=0.2, mask=given)
    theirs = _plain_attention(q, k, v, scale=0.2, mask=given)
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    true = exact(q, k, v, given)
    assert far(ours, true) <= 2 * far(theirs, true) + 4 * EPSILON[dtype]


def exact(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> Float64:
    """Attention in double precision."""
    share = q.shape[1] // k.shape[1]
    a, b, c = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (q, k, v))
    scores = 0.2 * a @ np.repeat(b, share, axis=1).swapaxes(-1, -2)
    given = causal() if isinstance(mask, str) else mask
    if given is not None and given.dtype == mx.bool_:
        scores = np.where(np.array(given), scores, -np.inf)
    elif given is not None:
        scores = scores + np.array(given.astype(mx.float32), dtype=np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Float64 = weights @ np.repeat(c, share, axis=1)
    return out


def far(a: mx.array, true: Float64) -> float:
    return float(np.abs(np.array(a.astype(mx.float32)) - true).max())


def test_huge_scores_do_not_overflow() -> None:
    q, k, v = heads(1, 4, 4)
    ours = attention(1e4 * q, k, v, scale=1.0)
    assert mx.all(mx.isfinite(ours))
    assert mx.abs(ours - _plain_attention(1e4 * q, k, v, scale=1.0)).max() < 1e-3


def test_a_token_that_may_attend_to_nothing_gets_a_number() -> None:
    """A NaN would spread into the keys of the next layer, and from there everywhere."""
    q, k, v = heads(1, 4, 4)
    mask = causal() & (mx.arange(N_TOKENS) != 5)[:, None]
    ours, theirs = (f(q, k, v, scale=0.2, mask=mask) for f in (attention, _plain_attention))
    assert mx.all(mx.isfinite(ours))
    others = mx.arange(N_TOKENS)[:, None] != 5
    assert mx.abs(mx.where(others, ours - theirs, 0)).max() < 1e-5


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_sigmoid_equals_mlx_own(dtype: mx.Dtype) -> None:
    x = mx.linspace(-120, 120, 10_001).astype(dtype)
    true = 1 / (1 + np.exp(-np.array(x.astype(mx.float32), dtype=np.float64)))
    ours, theirs = sigmoid(x), _plain_sigmoid(x)
    assert ours.dtype == theirs.dtype
    assert far(ours, true) <= 2 * far(theirs, true) + EPSILON[dtype]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.inf, 1.0), (-math.inf, 0.0), (1e30, 1.0), (-1e30, 0.0), (0.0, 0.5)],
)
def test_sigmoid_of_extreme_values_is_exact(value: float, expected: float) -> None:
    assert sigmoid(mx.array(value)).item() == expected


@pytest.mark.parametrize("a", [mx.arange(-3, 4), mx.array([True, False]), 0.5], ids=str)
def test_sigmoid_of_other_types_is_left_to_mlx(a: Any) -> None:
    assert mx.array_equal(sigmoid(a), _plain_sigmoid(a))


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="there is a GPU here")
def test_a_loaded_model_uses_the_replacements() -> None:
    """mlx-lm compiles functions at its first step; they keep what was installed then."""
    code = """if True:
        import mlx.core as mx
        from firn import app
        from firn.config import CacheConfig, Config, ModelConfig
        from firn.backends.cpu import softmax as cpu_softmax

        called = set()
        def noting(name, function):
            return lambda *args, **more: called.add(name) or function(*args, **more)
        for name in ("attention", "sigmoid"):
            setattr(cpu_softmax, name, noting(name, getattr(cpu_softmax, name)))
        ours = cpu_softmax.attention
        cpu_softmax._seconds = lambda function: 1.0 if function is ours else 2.0
        cache = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
        app.build(Config(model=ModelConfig(path="firn-demo"), cache=cache)).close()
        print(*sorted(called))
    """
    environ = {**os.environ, "TESTS_DEVICE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["attention", "sigmoid"]


def test_a_lone_token_is_left_to_mlx() -> None:
    q, k, v = heads(1, 4, 4)
    last = q[:, :, -1:]
    assert mx.array_equal(attention(last, k, v, scale=0.2), _plain_attention(last, k, v, scale=0.2))


def test_sinks_are_left_to_mlx() -> None:
    q, k, v = heads(1, 4, 4)
    v = k  # MLX requires the same width here
    sinks = mx.ones(4)
    ours = attention(q, k, v, scale=0.2, sinks=sinks)
    assert mx.array_equal(ours, _plain_attention(q, k, v, scale=0.2, sinks=sinks))


def test_the_faster_attention_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for ours_s, theirs_s in ((1.0, 2.0), (2.0, 1.0)):
        cost = {attention: ours_s, _plain_attention: theirs_s}
        monkeypatch.setattr(cpu_softmax, "_seconds", cost.__getitem__)
        patches = Patches()
        assert install_if_faster(patches) == (ours_s < theirs_s)
        expected = attention if ours_s < theirs_s else _plain_attention
        assert mx.fast.scaled_dot_product_attention is expected
        patches.undo()
        assert mx.fast.scaled_dot_product_attention is _plain_attention


@pytest.mark.parametrize(("reuse", "allowed"), [("full", True), ("exact", False)])
def test_exact_reuse_keeps_mlx_own_softmax(
    reuse: Any, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one is faster may change between two runs, and one run restores what the other stored."""
    asked: list[bool] = []
    monkeypatch.setattr(cpu_softmax, "install_if_faster", lambda patches: asked.append(True))
    cache = CacheConfig(no_ssd_cache=True, cache_memory_mb=64, reuse=reuse)
    pretend("cpu", monkeypatch)
    app.build(Config(model=ModelConfig(path="firn-demo"), cache=cache)).close()
    assert bool(asked) == allowed
