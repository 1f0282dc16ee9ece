"""The zoo."""

import copy
import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from . import folder, weights
from .base import VOCAB_SIZE, Entry
from .facts import KNOWN_UPSTREAM, UNBUILDABLE
from .text_dense import DENSE
from .text_hybrid import HYBRID
from .text_moe import EXPERTS
from .text_window import WINDOWED
from .wrappers import WRAPPERS

ZOO: dict[str, Entry] = {**DENSE, **WINDOWED, **EXPERTS, **HYBRID, **WRAPPERS}


def build(name: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """The entry's model with random weights, evaluated and ready for inference."""
    entry = ZOO[name]
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    # Some ModelArgs write into the dictionaries they are given.
    args = module.ModelArgs.from_dict(copy.deepcopy(entry.config))
    model: nn.Module = module.Model(args)
    weights.fill(model, seed=seed, dtype=dtype, gains=entry.gains)
    model.eval()
    return model


def write_folder(name: str, path: Path) -> None:
    """A model folder for `mlx_lm.load`: config, weights, tokenizer, chat template."""
    folder.write(build(name), ZOO[name].config, path)
