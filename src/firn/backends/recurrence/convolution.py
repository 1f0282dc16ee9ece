"""Short convolutions of recurrent layers: a product for each tap, instead of a general convolution.

Such a layer sees a few tokens of its own channel. MLX's CPU backend computes that as a loop over the
channels, which takes ten times as long as the same sums channel by channel side by side.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from firn.models.patches import Patches

MAX_TAPS = 8
MIN_VALUES = 1 << 11
"""Of the result: with fewer, the number of operations dominates."""

_plain_conv = nn.Conv1d.__call__


def install(patches: Patches) -> None:
    """Replace those convolutions of nn.Conv1d, for this process, unless they are replaced already."""
    if nn.Conv1d.__call__ is not _convolved:
        patches.replace(nn.Conv1d, "__call__", _convolved)


def suits(layer: Any, x: mx.array) -> bool:
    """Whether each channel has its own taps, with nothing skipped or padded."""
    n_channels, n_taps, n_inputs = layer.weight.shape
    n_tokens = x.shape[-2] - n_taps + 1
    return (
        n_inputs == 1
        and x.shape[-1] == n_channels == layer.groups
        and (layer.stride, layer.padding, layer.dilation) == (1, 0, 1)
        and 1 < n_taps <= MAX_TAPS
        and n_tokens * n_channels >= MIN_VALUES
    )


def taps(x: mx.array, weight: mx.array) -> mx.array:
    """x (batch, tokens + taps - 1, channels), weight (channels, taps, 1)."""
    n_taps = weight.shape[1]
    n_tokens = x.shape[-2] - n_taps + 1
    of_channels = weight[..., 0].T
    y: mx.array = x[:, :n_tokens] * of_channels[0]
    for i in range(1, n_taps):
        y = y + x[:, i : i + n_tokens] * of_channels[i]
    return y


def _convolved(layer: Any, x: mx.array) -> mx.array:
    if x.ndim != 3 or not suits(layer, x):
        out: mx.array = _plain_conv(layer, x)
        return out
    y = taps(x, layer.weight)
    return y + layer.bias if "bias" in layer else y
