"""Reads a prediction head from a model's weight files: mlx-lm ignores it.

The head's layer has the architecture of the model's own layers: a model with this one layer is built,
and its `sanitize` converts the tensors' names and shapes.
"""

from __future__ import annotations

import copy
import glob
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from firn.models.layers import MakeLayers
from firn.models.speculation.mtp import PredictionHead

log = logging.getLogger("firn.models")

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Family:
    """What a family calls the parts of its head; `{n}` is the number of layers."""

    prefix: str
    layer: str
    parts: Mapping[str, str]
    centred: bool = False
    """Files that were not made for MLX store norm weights minus one."""


QWEN = Family(
    prefix="mtp.",
    layer="layers.0.",
    parts={
        "fc": "join",
        "pre_fc_norm_embedding": "embed_norm",
        "pre_fc_norm_hidden": "hidden_norm",
        "norm": "norm",
    },
    centred=True,
)
DEEPSEEK = Family(
    prefix="model.layers.{n}.",
    layer="",
    parts={
        "eh_proj": "join",
        "enorm": "embed_norm",
        "hnorm": "hidden_norm",
        "shared_head.norm": "norm",
    },
)
FAMILIES: dict[str, Family] = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
}
SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of the model's own tensors."""


def headless_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes of a model and its arguments. The model leaves the tensors of a head alone, which
    some of mlx-lm's classes do only in files that were not converted."""
    model_class, args_class = _get_classes(config=config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return model_class, args_class
    starts = _starts(family, _text(config))

    class Headless(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Weights) -> Weights:
            own = {name: w for name, w in weights.items() if not name.startswith(starts)}
            kept: Weights = super().sanitize(own)
            return kept

    Headless.__name__, Headless.__qualname__ = model_class.__name__, model_class.__qualname__
    Headless.__module__ = model_class.__module__
    return Headless, args_class


def has_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the weight files hold a head of a known family. Reads names only."""
    family = FAMILIES.get(str(config["model_type"]))
    return family is not None and bool(_tensors(folder, family, _text(config)))


def read_head(folder: Path, config: Mapping[str, Any]) -> PredictionHead:
    """Raises ValueError if the files do not hold all of it."""
    family = FAMILIES[str(config["model_type"])]
    text = _text(config)
    is_raw = family.centred and _is_raw(folder)
    parts: Weights = {}
    layer: Weights = {}
    for name, value in _tensors(folder, family, text).items():
        stem, _, kind = name.rpartition(".")
        if is_raw and value.ndim == 1 and "norm" in name:
            value = value + 1.0
        if stem in family.parts:
            parts[f"{family.parts[stem]}.{kind}"] = value
        elif name.startswith(family.layer) and not name.startswith(SHARED):
            layer[name.removeprefix(family.layer)] = value
    head = PredictionHead(
        _layer(config, layer),
        hidden_size=int(text["hidden_size"]),
        eps=float(text["rms_norm_eps"]),
    )
    _quantise(head, parts, config)
    _load(head, parts, besides="layer.")
    mx.eval(head.parameters())
    return head


def probe(model: Any, make_layers: MakeLayers) -> list[Any]:
    """Layer caches that hold one token."""
    layers = make_layers()
    mx.eval(model(mx.array([[0]]), cache=layers), [layer.state for layer in layers])
    return layers


def nbytes_of(head: PredictionHead) -> int:
    return sum(int(w.nbytes) for _, w in tree_flatten(head.parameters()))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def _tensors(folder: Path, family: Family, text: Mapping[str, Any]) -> Weights:
    """The head's tensors, by their names without the prefix. MLX reads them when they are used."""
    starts = _starts(family, text)
    tensors: Weights = {}
    for path in glob.glob(str(folder / "*.safetensors")):
        for name, value in _read(path).items():
            for start in starts:
                if name.startswith(start):
                    tensors[name.removeprefix(start)] = value
    return tensors


def _starts(family: Family, text: Mapping[str, Any]) -> tuple[str, ...]:
    """What the names of the head's tensors begin with."""
    prefix = family.prefix.format(n=text["num_hidden_layers"])
    return prefix, f"language_model.{prefix}"


def _read(path: str) -> Weights:
    """Reads names and shapes; MLX reads the numbers when they are used."""
    weights = mx.load(path)
    assert isinstance(weights, dict)
    return weights


def _is_raw(folder: Path) -> bool:
    """Whether the files are as the model's authors published them, not converted by mlx-lm."""
    for path in glob.glob(str(folder / "*.safetensors")):
        for name, value in _read(path).items():
            if name.endswith("conv1d.weight"):
                return bool(value.shape[-1] != 1)
    return False


def _layer(config: Mapping[str, Any], weights: Weights) -> nn.Module:
    """The only layer of a model built from this configuration with one layer."""
    own = copy.deepcopy(dict(config))
    text = own.get("text_config", own)
    text |= {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
    text |= {"mlp_only_layers": [], "moe_layer_freq": 1, "layer_types": ["full_attention"]}
    model_class, args_class = _get_classes(config=own)
    model = model_class(args_class.from_dict(own))
    norms = {n: w for n, w in weights.items() if w.ndim == 1 and "norm" in n}
    rest = {f"model.layers.0.{n}": w for n, w in weights.items() if n not in norms}
    sanitized = model.sanitize(rest).items()
    converted = {name.rpartition("layers.0.")[2]: w for name, w in sanitized} | norms
    layer: nn.Module = model.model.layers[0]
    _quantise(layer, converted, config)
    _load(layer, converted)
    return layer


def _quantise(module: nn.Module, weights: Weights, config: Mapping[str, Any]) -> None:
    """Each part as its tensors are: their shapes tell how, whatever the configuration says of others."""
    mode = (config.get("quantization") or {}).get("mode", "affine")

    def how(path: str, part: nn.Module) -> dict[str, Any] | bool:
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(part, "to_quantized"):
            return False
        width = int(part.weight.shape[-1])
        bits = int(weights[f"{path}.weight"].shape[-1]) * 32 // width
        has_biases = f"{path}.biases" in weights
        return {
            "group_size": width // int(scales.shape[-1]),
            "bits": bits,
            "mode": "affine" if has_biases else mode,
        }

    nn.quantize(module, class_predicate=how)


def _load(module: nn.Module, weights: Weights, *, besides: str | None = None) -> None:
    wanted = {
        n
        for n, _ in tree_flatten(module.parameters())
        if besides is None or not n.startswith(besides)
    }
    missing = sorted(wanted - set(weights))
    if missing:
        raise ValueError(f"the weight files lack {missing[0]} of the prediction head")
    module.load_weights([(n, w) for n, w in weights.items() if n in wanted], strict=False)
    module.eval()
