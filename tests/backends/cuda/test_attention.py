"""Which attention the kernel computes on CUDA. The kernel itself is tested there at every start,
and by `benchmarks/attention.py`; these tests cover what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from firn.backends.cuda import attention
from firn.backends.cuda.attention import MAX_TOKENS, WIDTHS, suits, takes_all
from firn.models.patches import Patches
from tests.backends.fakes import is_on_cuda


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Install a stand-in for a correct kernel; return the shapes of the queries it was given."""
    taken: list[tuple[int, ...]] = []

    def attend(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array) -> mx.array:
        taken.append(q.shape)
        return plain(q, k, v, scale=scale, mask=mask)

    plain = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(attention, "attention", attend)
    monkeypatch.setattr(attention, "_is_right", lambda width: width in WIDTHS)
    patches = Patches()
    attention.install(patches)
    yield taken
    patches.undo()


def heads(
    n_tokens: int = 1, *, n_columns: int = 40, width: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> list[mx.array]:
    shapes = [(2, 4, n_tokens, width), (2, 2, n_columns, width), (2, 2, n_columns, width)]
    return [mx.random.normal(s).astype(dtype) for s in shapes]


def mask(n_tokens: int = 1, n_columns: int = 40) -> mx.array:
    return mx.arange(n_columns)[None] <= mx.arange(n_columns - n_tokens, n_columns)[:, None]


@pytest.mark.usefixtures("kernel")
def test_a_few_tokens_of_bfloat16_under_a_mask_of_booleans_are_for_the_kernel() -> None:
    fit = [n for n in range(1, 100) if suits(*heads(n), mask(n))]
    assert fit == list(range(1, MAX_TOKENS + 1))
    assert suits(*heads(), mask()[None, None])
    assert not suits(*heads(dtype=mx.float16), mask())
    assert not suits(*heads(width=80), mask())
    assert not suits(*heads(), mask().astype(mx.bfloat16)), "numbers to add"
    assert not suits(*heads(), mask()[None])
    assert not suits(*heads(), mask()[:, :1]), "one value for all columns"
    q, k, v = heads()
    assert not suits(q, k, v[..., :32], mask()), "values of another width"


def test_all_other_attention_is_left_to_mlx(kernel: list[tuple[int, ...]]) -> None:
    few, many = heads(), heads(MAX_TOKENS + 1)
    sinks = mx.ones(4, dtype=mx.bfloat16)
    others: list[tuple[list[mx.array], dict[str, Any]]] = [
        (few, {}),
        (few, {"mask": None}),
        (few, {"mask": "causal"}),
        (few, {"mask": mask(), "sinks": sinks}),
        (heads(dtype=mx.float32), {"mask": mask()}),
        (many, {"mask": mask(MAX_TOKENS + 1)}),
    ]
    for arrays, more in others:
        got = mx.fast.scaled_dot_product_attention(*arrays, scale=0.1, **more)
        assert mx.array_equal(got, attention.plain_attention(*arrays, scale=0.1, **more))
    assert kernel == []
    mx.fast.scaled_dot_product_attention(*few, scale=0.1, mask=mask(), sinks=None)
    assert len(kernel) == 1, "without sinks"


def test_attention_of_a_step_goes_to_the_kernel(kernel: list[tuple[int, ...]]) -> None:
    q, k, v = heads(3)
    got = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask(3), sinks=None)
    assert kernel == [q.shape]
    assert mx.allclose(got, attention.plain_attention(q, k, v, scale=0.1, mask=mask(3)))


@pytest.mark.usefixtures("kernel")
def test_it_is_known_whether_the_kernel_takes_all_of_a_models_attention() -> None:
    def layer(width: int, n_tokens: int = 3, **more: mx.array | None) -> None:
        mx.fast.scaled_dot_product_attention(
            *heads(n_tokens, width=width), scale=0.1, mask=mask(n_tokens), **more
        )

    assert takes_all(lambda: [layer(64), layer(128)])
    assert takes_all(lambda: [layer(64), layer(80, MAX_TOKENS + 1)]), "not a few tokens"
    assert not takes_all(lambda: [layer(64), layer(80)])
    assert not takes_all(lambda: layer(64, sinks=mx.zeros(4, dtype=mx.bfloat16)))
    assert not takes_all(lambda: None), "nothing is known of a model that masks by hand"


@pytest.mark.skipif(is_on_cuda(), reason="there the kernel is right")
def test_a_kernel_that_fails_is_told_once_and_leaves_attention_to_mlx(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    attention._is_right.cache_clear()
    patches = Patches()
    request.addfinalizer(patches.undo)
    attention.install(patches)
    q, k, v = heads()
    for _ in range(3):
        got = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask())
        assert mx.allclose(got, attention.plain_attention(q, k, v, scale=0.1, mask=mask()))
    assert caplog.text.count("attention of a few tokens is left to MLX") == 1
