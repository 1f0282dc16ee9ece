"""Weights in float32, which a CPU multiplies fastest.

BLAS supports neither 16-bit nor quantised numbers; MLX has loops of its own for those, at 1/40 of
the speed. Widening hardly changes a weight: every 16-bit number is a float32 number, and a
quantised one is a scale times an integer plus an offset, which float32 holds to the last bit but
one.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from firn.config import WeightsDtype
from firn.core.units import GIB
from firn.host.machine import memory

log = logging.getLogger("firn.models")

SHARE = 0.6
"""Share of the available memory that widened weights may take; caches need the rest."""


def apply(model: Any, choice: WeightsDtype) -> bool:
    """Widen the weights; returns whether that was done. auto: only if there is enough memory."""
    if choice == "model" or not is_narrow(model):
        return False
    need, free = widened_nbytes(model), memory().available
    if choice == "auto" and free is not None and need > SHARE * free:
        log.warning(
            "the weights stay in 16 bits or quantised, which is slow on this CPU: float32 would "
            "need %.1f GiB, and %.1f GiB is free (--cpu-dtype float32 widens them anyway)",
            need / GIB,
            free / GIB,
        )
        return False
    log.debug("the weights are widened to float32, %.1f GiB (--cpu-dtype)", need / GIB)
    widen(model)
    return True


def widen_as(part: Any, choice: WeightsDtype, *, like: Any) -> None:
    """Widen a part that is loaded later, if the model itself was widened."""
    if choice != "model" and is_narrow(part) and not is_narrow(like):
        widen(part)


def widened_nbytes(model: Any) -> int:
    """The size of the weights in float32."""
    n = sum(int(w.size) for _, w in tree_flatten(model.parameters()) if _is_float(w))
    n += sum(_n_packed(module) for _, module in model.named_modules() if _is_quantised(module))
    return 4 * n


def is_narrow(model: Any) -> bool:
    """Whether most weights are not float32."""
    sizes = {True: 0, False: 0}
    for _, w in tree_flatten(model.parameters()):
        sizes[w.dtype != mx.float32] += w.nbytes
    return sizes[True] > sizes[False]


def widen(model: Any) -> None:
    """Widen module by module, so that only one is in memory twice."""
    for name, module in list(model.named_modules()):
        if _is_quantised(module) and (plain := _plain(module)) is not None:
            _replace(model, name, plain)
            module = plain
        for key, value in module.items():
            if not key.startswith("_") and _is_float(value):
                module[key] = value.astype(mx.float32)
                mx.eval(module[key])
    model.set_dtype(mx.float32)  # arrays in lists
    mx.eval(model.parameters())


def _plain(module: Any) -> Any | None:
    """The layer with its weights unpacked; None for a class that has only a quantised form."""
    name = type(module).__name__.removeprefix("Quantized")
    home = nn if hasattr(nn, name) else sys.modules[type(module).__module__]
    cls = getattr(home, name, None)
    if cls is None or cls is type(module):
        return None
    plain = cls.__new__(cls)
    nn.Module.__init__(plain)  # its own would draw random weights
    plain.weight = mx.dequantize(
        module.weight,
        _wide(module.scales),
        _wide(module.biases) if module.get("biases") is not None else None,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=mx.float32,
    )
    if "bias" in module:
        plain.bias = module.bias
    if hasattr(module, "group"):  # a rank's slice: the ranks' results are summed
        plain.group = module.group
    mx.eval(plain.weight)
    return plain


def _replace(model: Any, name: str, module: Any) -> None:
    """Replace the module of this name ("layers.3.mlp.up_proj")."""
    *path, last = name.split(".")
    owner = model
    for step in path:
        owner = owner[int(step)] if isinstance(owner, list | tuple) else owner[step]
    if isinstance(owner, list):
        owner[int(last)] = module
    else:
        owner[last] = module


def _is_quantised(module: Any) -> bool:
    return all(key in module for key in ("weight", "scales")) and hasattr(module, "bits")


def _n_packed(module: Any) -> int:
    return int(module.weight.nbytes) * 8 // int(module.bits)


def _is_float(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def _wide(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if _is_float(value) else value
