"""It must be the same function as MLX's own, whatever the mask and the heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from firn import app
from firn.config import CacheConfig, Config, ModelConfig
from firn.models import cpu_attention
from firn.models.cpu_attention import MIN_SCORES, _plain, attention

N_TOKENS, N_KEYS = 64, 512
Float64 = npt.NDArray[np.float64]
EPSILON = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = mx.fast.scaled_dot_product_attention
    yield
    mx.fast.scaled_dot_product_attention = before


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
def test_it_is_the_same_function(
    batch: int, n_heads: int, n_kv: int, mask: str, dtype: mx.Dtype
) -> None:
    q, k, v = heads(batch, n_heads, n_kv, dtype)
    given = MASKS[mask](batch, n_heads)
    if isinstance(given, mx.array) and given.dtype != mx.bool_:
        given = given.astype(dtype)
    assert q.size // 32 * N_KEYS >= MIN_SCORES
    ours = attention(q, k, v, scale=0.2, mask=given)
    theirs = _plain(q, k, v, scale=0.2, mask=given)
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    true = exact(q, k, v, given)
    assert far(ours, true) <= 2 * far(theirs, true) + 4 * EPSILON[dtype]


def exact(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> Float64:
    """In double precision."""
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
    assert mx.abs(ours - _plain(1e4 * q, k, v, scale=1.0)).max() < 1e-3


def test_a_token_that_may_look_at_nothing_gets_a_number() -> None:
    """A NaN would go on into the keys of the next layer, and from there everywhere."""
    q, k, v = heads(1, 4, 4)
    mask = causal() & (mx.arange(N_TOKENS) != 5)[:, None]
    ours, theirs = (f(q, k, v, scale=0.2, mask=mask) for f in (attention, _plain))
    assert mx.all(mx.isfinite(ours))
    assert mx.abs(ours - theirs).max() < 1e-5


def test_a_lone_token_is_left_to_mlx() -> None:
    q, k, v = heads(1, 4, 4)
    last = q[:, :, -1:]
    assert mx.array_equal(attention(last, k, v, scale=0.2), _plain(last, k, v, scale=0.2))


def test_sinks_are_left_to_mlx() -> None:
    q, k, v = heads(1, 4, 4)
    v = k  # MLX wants them of one width here
    sinks = mx.ones(4)
    ours = attention(q, k, v, scale=0.2, sinks=sinks)
    assert mx.array_equal(ours, _plain(q, k, v, scale=0.2, sinks=sinks))


def test_the_faster_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for ours_s, theirs_s in ((1.0, 2.0), (2.0, 1.0)):
        cost = {attention: ours_s, _plain: theirs_s}
        monkeypatch.setattr(cpu_attention, "_seconds", cost.__getitem__)
        assert cpu_attention.install_if_faster() == (ours_s < theirs_s)
        expected = attention if ours_s < theirs_s else _plain
        assert mx.fast.scaled_dot_product_attention is expected


@pytest.mark.parametrize(("reuse", "allowed"), [("full", True), ("exact", False)])
def test_exact_reuse_keeps_to_mlx(
    reuse: Any, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one is faster may change between two runs; what one has stored, the other restores."""
    asked: list[bool] = []
    monkeypatch.setattr(cpu_attention, "install_if_faster", lambda: asked.append(True))
    cache = CacheConfig(no_ssd_cache=True, cache_memory_mb=64, reuse=reuse)
    app.build(Config(model=ModelConfig(path="firn-demo"), cache=cache)).close()
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert bool(asked) == (allowed and on_cpu)
