"""Tiny random vision models of many of mlx-vlm's families, as folders that load like real ones.

`write_vision_folder` writes one: config, weights, tokenizer, processor, chat template. Pictures of
these models have from 12 to 70 tokens, so that chunks of 16 cut them.
"""

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import weights
from .vision_main import MAIN
from .vision_more import MORE, REFUSED
from .vision_parts import VisionEntry, token_id, tokenizer_config, tokenizer_json

VISION: dict[str, VisionEntry] = {entry.name: entry for entry in MAIN}
"""Tested on every run."""
MORE_VISION: dict[str, VisionEntry] = {entry.name: entry for entry in MORE}
"""Tested with -m sweep."""
REFUSED_VISION: dict[str, VisionEntry] = {entry.name: entry for entry in REFUSED}
"""Recognised, and refused at load."""


def _make_model(entry: VisionEntry) -> Any:
    """The model as mlx-vlm's load_model makes it, except for the weights."""
    from mlx_vlm import utils

    config = copy.deepcopy(entry.config)
    module, _ = utils.get_model_and_args(config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    args = module.ModelConfig.from_dict(config)
    args = utils.update_module_configs(
        args, module, config, ["text", "vision", "perceiver", "projector", "audio"]
    )
    return module.Model(args)


def write_vision_folder(
    name: str, path: Path, *, seed: int = 0, text: Mapping[str, Any] | None = None
) -> Path:
    """A folder for `mlx_vlm.load`. text: entries that replace those of its text_config."""
    entry = {**VISION, **MORE_VISION, **REFUSED_VISION}[name]
    if text:
        changed = {**entry.config["text_config"], **text}
        entry = replace(entry, config={**entry.config, "text_config": changed})
    importlib.import_module("mlx_vlm")
    model = _make_model(entry)
    weights.fill(model, seed=seed, dtype=mx.float32, gains=entry.gains, sanitize=False)
    path.mkdir(parents=True, exist_ok=True)
    eos = token_id("<|im_end|>")
    files = {
        "config.json": {"eos_token_id": eos, **entry.config},
        "tokenizer_config.json": tokenizer_config(entry),
        "preprocessor_config.json": entry.preprocessor,
        "processor_config.json": entry.processor,
    }
    for file, content in files.items():
        if content:
            (path / file).write_text(json.dumps(content, indent=1))
    (path / "tokenizer.json").write_text(tokenizer_json())
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "mlx"})
    return path


@functools.cache
def picture(seed: int, width: int = 96, height: int = 64) -> Any:
    """A picture with large and small structure, the same for the same seed."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(image).astype(int) + noise, 0, 255).astype(np.uint8))
