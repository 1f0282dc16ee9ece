"""Where the time of a prefill chunk and of a decode step goes, measured on the model itself.

Products are timed by running every weight matrix once, attention by running the layers' shapes, Python
by building a step without computing it. The rest is the difference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.models.layers import MakeLayers, leaves

N_TRIES = 3
DEPTH = 1024
"""Tokens in the cache that a step attends to."""


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """How one chunk or step spends its time, in seconds. The parts are measured separately, so
    `rest_s` is a difference."""

    n_tokens: int
    total_s: float
    products_s: float
    attention_s: float
    python_s: float

    @property
    def whole_s(self) -> float:
        """What the parts are shares of. Measured alone, they may take longer than together."""
        return max(self.total_s, self.products_s + self.attention_s + self.python_s)

    @property
    def rest_s(self) -> float:
        return max(self.total_s - self.products_s - self.attention_s - self.python_s, 0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    prefill: TimeSplit
    decode: TimeSplit


def measure(model: Any, make_layers: MakeLayers, *, chunk: int) -> Timing:
    """Call it on the thread that owns the model. Takes as long as a few chunks."""
    layers = make_layers()
    for start in range(0, DEPTH, chunk):
        _feed(model, layers, min(chunk, DEPTH - start))
    args = getattr(model, "args", None)
    n_heads = int(getattr(args, "num_attention_heads", 0) or 0)
    shapes = [s for layer in leaves(layers) if (s := _shape(layer, n_heads)) is not None]
    return Timing(
        prefill=_split(model, layers, chunk, shapes), decode=_split(model, layers, 1, shapes)
    )


def _split(model: Any, layers: list[Any], n: int, shapes: list[_AttentionShape]) -> TimeSplit:
    steps = [_feed(model, layers, n) for _ in range(N_TRIES)]
    return TimeSplit(
        n_tokens=n,
        total_s=statistics.median(total for total, _ in steps),
        products_s=_median(lambda: _products(model, n)),
        attention_s=_median(lambda: [_attend(shape, n) for shape in shapes]) if shapes else 0.0,
        python_s=statistics.median(python for _, python in steps),
    )


def _feed(model: Any, layers: list[Any], n: int) -> tuple[float, float]:
    """Total seconds, and those of them spent in Python."""
    ids = mx.ones((1, n), dtype=mx.int32)
    began = time.perf_counter()
    logits = model(ids, cache=layers)
    built = time.perf_counter()
    # Prefill computes no logits. Reading even one token's would compute those of the whole chunk.
    mx.eval([layer.state for layer in layers], logits if n == 1 else [])
    return time.perf_counter() - began, built - began


def _products(model: Any, n: int) -> list[mx.array]:
    """Every linear layer, each applied to `n` tokens; the head only in a step."""
    out = []
    is_step = n == 1
    is_tied = not hasattr(model, "lm_head")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            if is_step or "lm_head" not in name:
                out.append(module(mx.ones((1, n, _width(module)), dtype=_dtype(module))))
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and is_step and is_tied:
            out.append(module.as_linear(mx.ones((1, 1, _width(module)), dtype=_dtype(module))))
    return out


def _width(module: Any) -> int:
    bits = getattr(module, "bits", None)
    return int(module.weight.shape[-1]) * (32 // bits if bits else 1)


def _dtype(module: Any) -> mx.Dtype:
    weight = module.scales if "scales" in module else module.weight
    dtype: mx.Dtype = weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16


@dataclass(frozen=True, slots=True)
class _AttentionShape:
    """The shape of one attention layer."""

    n_heads: int
    n_kv_heads: int
    n_keys: int
    width: int
    dtype: mx.Dtype


def _shape(layer: Any, n_heads: int) -> _AttentionShape | None:
    """None for a layer that does not attend."""
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, mx.array) or keys.ndim != 4:
        return None
    _, n_kv, n_keys, width = keys.shape
    return _AttentionShape(
        max(n_heads, n_kv), n_kv, min(int(layer.offset), n_keys), width, keys.dtype
    )


def _attend(shape: _AttentionShape, n: int) -> mx.array:
    q = mx.ones((1, shape.n_heads, n, shape.width), dtype=shape.dtype)
    k = mx.ones((1, shape.n_kv_heads, max(shape.n_keys, n), shape.width), dtype=shape.dtype)
    mask = "causal" if n > 1 else None
    return mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1, mask=mask)


def _median(work: Callable[[], Any]) -> float:
    """Seconds to compute what `work` builds: a step's Python is timed by itself."""
    times = []
    for _ in range(N_TRIES):
        built = work()
        began = time.perf_counter()
        mx.eval(built)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
