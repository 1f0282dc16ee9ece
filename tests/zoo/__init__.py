"""A tiny random model of every architecture in mlx-lm, for tests that must hold for all of them.

`build` makes one in memory, `write_folder` writes one for `mlx_lm.load`. What cannot be built, and
what mlx-lm itself gets wrong, is recorded in `facts`.
"""

import copy
import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import folder, weights
from .base import VOCAB_SIZE, Entry
from .facts import CACHES, KNOWN_UPSTREAM, UNBUILDABLE
from .text_dense import DENSE
from .text_hybrid import HYBRID
from .text_moe import EXPERTS
from .text_window import WINDOWED
from .wrappers import WRAPPERS

__all__ = [
    "CACHES",
    "KNOWN_UPSTREAM",
    "UNBUILDABLE",
    "VOCAB_SIZE",
    "ZOO",
    "Entry",
    "build",
    "build_entry",
    "write_folder",
]

ZOO: dict[str, Entry] = {**DENSE, **WINDOWED, **EXPERTS, **HYBRID, **WRAPPERS}


def build(name: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """The named model with random weights, evaluated and ready for inference.

    Parameters that the architecture keeps in its own precision (`cast_predicate`) stay there.
    """
    return build_entry(ZOO[name], dtype=dtype, seed=seed)


def build_entry(entry: Entry, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    # Some ModelArgs write into the dictionaries they are given.
    args = module.ModelArgs.from_dict(copy.deepcopy(entry.config))
    model: nn.Module = module.Model(args)
    key = repr((entry, dtype, seed))
    if key in _drawn:
        model.load_weights(_own(_drawn[key]))
    else:
        weights.fill(model, seed=seed, dtype=dtype, gains=entry.gains)
        _drawn[key] = _own(tree_flatten(model.parameters()))
    model.eval()
    return model


_drawn: dict[str, list[tuple[str, mx.array]]] = {}
"""Weights of the models built so far. Drawing them takes most of the time of building one."""


def _own(values: list[tuple[str, mx.array]]) -> list[tuple[str, mx.array]]:
    """Copies that a test may write into, evaluated so that they need no stream of this thread."""
    own = [(path, mx.array(value)) for path, value in values]
    mx.eval([value for _, value in own])
    return own


def write_folder(name: str, path: Path) -> None:
    """A model folder for `mlx_lm.load`: config, weights, tokenizer, chat template."""
    folder.write(build(name), ZOO[name].config, path)
