"""Convolutions by taps, and state space layers in shorter chunks: what the libraries compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import ssm as mlx_lm_ssm

from firn.backends.recurrence import convolution, replacements, ssm
from firn.models.patches import Patches

ENOUGH = convolution.MIN_VALUES


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Of a process where no backend is installed: another test may have left one."""
    installed = mlx_lm_ssm.ssm_attn
    monkeypatch.setattr(mlx_lm_ssm, "ssm_attn", getattr(installed, replacements.MARK, installed))
    made = Patches()
    yield made
    made.undo()


@pytest.mark.parametrize("n_taps", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_taps_are_the_convolution(
    n_taps: int, bias: bool, n_tokens: int, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "MIN_VALUES", 1)
    layer = nn.Conv1d(6, 6, n_taps, groups=6, bias=bias)
    if bias:
        layer.bias = mx.random.normal((6,))
    x = mx.random.normal((2, n_tokens + n_taps - 1, 6))
    want = convolution._plain_conv(layer, x)
    convolution.install(patches)
    monkeypatch.setattr(convolution, "_plain_conv", None)
    got = layer(x)
    assert got.shape == want.shape
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "n_channels"),
    [
        (nn.Conv1d(4, 4, 3, groups=2), 4),
        (nn.Conv1d(4, 8, 3, groups=4), 4),
        (nn.Conv1d(4, 4, 3, groups=4, stride=2), 4),
        (nn.Conv1d(4, 4, 3, groups=4, padding=1), 4),
        (nn.Conv1d(4, 4, 3, groups=4, dilation=2), 4),
        (nn.Conv1d(4, 4, convolution.MAX_TAPS + 1, groups=4), 4),
        (nn.Conv1d(1, 1, 1), 1),
    ],
    ids=["groups", "wider", "stride", "padding", "dilation", "taps", "one tap"],
)
def test_other_convolutions_are_left_to_mlx(layer: Any, n_channels: int, patches: Patches) -> None:
    x = mx.random.normal((1, ENOUGH, n_channels))
    assert not convolution.suits(layer, x)
    want = convolution._plain_conv(layer, x)
    convolution.install(patches)
    assert mx.array_equal(layer(x), want)


def test_few_values_are_left_to_mlx() -> None:
    layer = nn.Conv1d(4, 4, 3, groups=4)
    assert convolution.suits(layer, mx.zeros((1, ENOUGH // 4 + 2, 4)))
    assert not convolution.suits(layer, mx.zeros((1, ENOUGH // 4 + 1, 4)))


def update(n_tokens: int, lengths: list[int] | None) -> tuple[mx.array, mx.array]:
    keys = iter(mx.random.split(mx.random.key(n_tokens), 8))

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    mask, n_valid = None, None
    if lengths is not None:
        n_valid = mx.array(lengths)
        mask = mx.arange(n_tokens)[None] < n_valid[:, None]
    x, b, c = some(2, n_tokens, 4, 8), some(2, n_tokens, 2, 6), some(2, n_tokens, 2, 6)
    y, state = mlx_lm_ssm.ssm_update(
        *(x, some(4), b, c, some(4), some(2, n_tokens, 4), some(4), some(2, 4, 8, 6)),
        (0.0, 1e9),
        mask=mask,
        lengths=n_valid,
    )
    return (y if mask is None else mx.where(mask[..., None, None], y, 0)), state


@pytest.mark.parametrize("lengths", [None, [100, 64], [1, 128], [37, 0]])
@pytest.mark.parametrize("step", [16, 64])
def test_shorter_chunks_are_the_same_layer(
    lengths: list[int] | None, step: int, patches: Patches
) -> None:
    want = update(130, lengths)
    for _ in range(2):
        replacements.install(patches, ssm.shortened(step))
    for got, plain in zip(update(130, lengths), want, strict=True):
        assert mx.allclose(got, plain, rtol=1e-4, atol=1e-4)
    patches.undo()
    assert not hasattr(mlx_lm_ssm.ssm_attn, replacements.MARK)


def test_what_is_imported_later_is_shortened_then(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacements.install(patches, ssm.shortened(16))
    module = ModuleType(ssm.HOMES[1])
    module.ssm_attn = lambda *, step=256: step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ssm.HOMES[1], module)
    replacements.install(patches, ssm.shortened(16))
    assert module.ssm_attn() == 16  # type: ignore[attr-defined]
