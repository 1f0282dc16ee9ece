"""Texts as vectors, for models with sentence-transformers' files next to the weights.

    tokens -> hidden states -> pooling (mean, last token, ...) -> dense layers -> unit length

A decoder that mlx-lm has loaded to generate also serves embeddings, from the same weights. Encoders, and
decoders with bidirectional attention, are loaded by mlx-vlm: such a model only makes embeddings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING

from firn.core.errors import BadRequest, SetupError
from firn.core.values import ModelInfo
from firn.models.load.tensor_header import read_header
from firn.models.load.weight_form import AS_STORED, WeightForm

Pooling = Literal["mean", "lasttoken", "cls", "max"]
POOLING_FLAGS: Mapping[str, str] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
}
ONLY_EMBEDS = "This model only computes embeddings; it cannot generate text."
BODIES = ("model", "language_model.model", "transformer", "backbone")
"""Where mlx-lm's models keep the layers below the logits."""

# --- the folder's files --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model's embeddings are made. max_tokens: None for the model's whole context."""

    pooling: Pooling
    dense: tuple[Path, ...] = ()
    normalises: bool = True
    max_tokens: int | None = None


def read_recipe(folder: Path) -> Recipe | None:
    """None if the folder does not mention pooling. Raises SetupError for what firn cannot do."""
    try:
        return _recipe(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise SetupError(f"{folder}: its embedding configuration cannot be parsed: {e!r}") from e


def _recipe(folder: Path) -> Recipe | None:
    modules = _read(folder / "modules.json")
    paths = {str(m["type"]).rsplit(".", 1)[-1]: folder / m["path"] for m in modules or ()}
    pooling = _read(paths.get("Pooling", folder / "1_Pooling") / "config.json")
    if pooling is None:
        return None
    known = {"Transformer", "Pooling", "Dense", "Normalize"}
    if not set(paths) <= known:
        more = ", ".join(sorted(set(paths) - known))
        raise SetupError(f"{folder}: embeddings with {more} are not supported")
    dense = [folder / m["path"] for m in modules or () if str(m["type"]).endswith(".Dense")]
    limits = _read(folder / "sentence_bert_config.json") or {}
    limit = limits.get("max_seq_length")
    return Recipe(
        _pooling_mode(pooling, folder),
        dense=tuple(dense),
        normalises=modules is None or "Normalize" in paths,
        max_tokens=None if limit is None else int(limit),
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as e:
        raise SetupError(f"{path} cannot be read: {e}") from e


def _pooling_mode(config: Mapping[str, Any], folder: Path) -> Pooling:
    modes = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)]
    given = config.get("pooling_mode", modes or ["mean"])
    (mode, *more) = [given] if isinstance(given, str) else given
    if more or mode not in get_args(Pooling):
        raise SetupError(f"{folder}: pooling by {' and '.join([mode, *more])} is not supported")
    return cast("Pooling", mode)


def needs_encoder(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm lacks this model, would run it with a mask that it was trained without, or
    does not know its tensors' names."""
    kind = str(config["model_type"])
    try:
        if find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}") is None:
            return True
    except (ImportError, ValueError):  # not a module name
        return True
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return True
    return not _has_body(folder)


def _has_body(folder: Path) -> bool:
    """Whether tensor names have a generating model's prefix; sentence-transformers drops it."""
    for path in folder.glob("model*.safetensors"):
        try:
            header = read_header(path)
        except (OSError, ValueError):  # the loader will explain
            return True
        if any(name.startswith("layers.") for name in header):
            return False
    return True


# --- on the engine thread ------------------------------------------------------------------

Encode = Callable[[mx.array, mx.array], mx.array]
"""Token ids and mask, (texts, tokens) each, to vectors (texts, dimensions)."""


class TextEmbedder:
    """Owner: the engine thread."""

    def __init__(self, encode: Encode, *, normalises: bool, max_tokens: int) -> None:
        self._encode = encode
        self._normalises = normalises
        self.max_tokens = max_tokens
        self.n_dims = len(self.embed([[0]])[0])

    def embed(
        self, texts: Sequence[Sequence[int]], *, n_dims: int | None = None
    ) -> list[list[float]]:
        """Texts are padded at the end: causal attention cannot see that, and a mask excludes it."""
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), dtype=np.int32)
        mask = np.zeros((len(texts), longest), dtype=np.int32)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = text
            mask[i, : len(text)] = 1
        vectors = self._encode(mx.array(ids), mx.array(mask)).astype(mx.float32)[:, :n_dims]
        if self._normalises:
            length = mx.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / mx.maximum(length, 1e-12)
        return cast("list[list[float]]", vectors.tolist())


def from_decoder(model: Any, recipe: Recipe, *, context_length: int) -> TextEmbedder:
    """An embedder on a model that mlx-lm has loaded. Raises SetupError."""
    body = _body_of(model)
    dense = [_dense(path) for path in recipe.dense]

    def encode(ids: mx.array, mask: mx.array) -> mx.array:
        vectors = pool(body(ids).astype(mx.float32), mask, recipe.pooling)
        for layer in dense:
            vectors = layer(vectors)
        return vectors

    limit = min(recipe.max_tokens or context_length, context_length)
    try:
        return TextEmbedder(encode, normalises=recipe.normalises, max_tokens=limit)
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise SetupError(f"this architecture does not expose its hidden states: {e}") from e


def _body_of(model: Any) -> Any:
    for path in BODIES:
        module = model
        for name in path.split("."):
            module = getattr(module, name, None)
        if callable(module):
            return module
    raise SetupError("this architecture does not expose its hidden states")


def _dense(path: Path) -> Callable[[mx.array], mx.array]:
    config = _read(path / "config.json") or {}
    name = str(config.get("activation_function", "Identity")).rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise SetupError(f"{path}: the activation {name} is not supported")
    try:
        weights = cast("dict[str, mx.array]", mx.load(str(path / "model.safetensors")))
        weight, bias = weights["linear.weight"], weights.get("linear.bias")
    except (OSError, RuntimeError, KeyError) as e:
        raise SetupError(f"{path} cannot be loaded: {e}") from e
    activate = ACTIVATIONS[name]

    def apply(x: mx.array) -> mx.array:
        y = x @ weight.T.astype(mx.float32)
        return activate(y if bias is None else y + bias.astype(mx.float32))

    return apply


def pool(hidden: mx.array, mask: mx.array, mode: Pooling) -> mx.array:
    """Hidden states (texts, tokens, width) of right-padded texts to (texts, width)."""
    real = mask[:, :, None].astype(hidden.dtype)
    match mode:
        case "mean":
            return (hidden * real).sum(axis=1) / real.sum(axis=1)
        case "max":
            return mx.where(real > 0, hidden, -mx.inf).max(axis=1)
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            last = mask.sum(axis=1)[:, None, None] - 1
            return mx.take_along_axis(hidden, last, axis=1)[:, 0]


# --- models that only embed ----------------------------------------------------------------


def load_encoder(
    folder: Path,
    recipe: Recipe,
    config: Mapping[str, Any],
    *,
    served_name: str,
    form: WeightForm = AS_STORED,
) -> tuple[TextEmbedder, ModelInfo]:
    """Load a model with mlx-vlm, whose models pool and project themselves. Raises SetupError."""
    kind = str(config["model_type"])
    try:
        from mlx_vlm.embedding_loader import load_embedding_model
    except ImportError as e:
        raise SetupError(f"{folder} ({kind}) computes embeddings: install firn[vision]") from e
    try:
        model = load_embedding_model(folder)
        form.widen(model)
        model.pooling_config = {"pooling_mode": recipe.pooling}

        def encode(ids: mx.array, mask: mx.array) -> mx.array:
            return cast("mx.array", model(ids, attention_mask=mask).text_embeds)

        limit = _encoder_limit(config, recipe)
        embedder = TextEmbedder(encode, normalises=recipe.normalises, max_tokens=limit)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as e:
        raise SetupError(f"{folder} ({kind}) cannot be loaded for embeddings: {e}") from e
    weights = [w for _, w in tree_flatten(model.parameters())]
    info = ModelInfo(
        name=served_name,
        path=str(folder),
        architecture=kind,
        fingerprint=bytes(32),  # nothing of it is cached
        context_length=limit,
        vocab_size=int(config["vocab_size"]),
        dtype=str(weights[0].dtype).removeprefix("mlx.core."),
        weights_nbytes=sum(w.nbytes for w in weights),
        layer_kinds=(),
        batchable=True,
        unbatchable_why=None,
        generates=False,
        created=int(time.time()),
    )
    return embedder, info


def _encoder_limit(config: Mapping[str, Any], recipe: Recipe) -> int:
    n_positions = int(config.get("max_position_embeddings", 512))
    if "roberta" in str(config["model_type"]):
        n_positions -= 2  # its first two positions are for padding
    return min(recipe.max_tokens or n_positions, n_positions)


def refuse_to_generate() -> list[Any]:
    """The `make_layers` of a model that has no layers to generate with."""
    raise BadRequest(ONLY_EMBEDS, param="model")


# --- from any thread -----------------------------------------------------------------------


class EngineEmbedder:
    """Implements core.ports.Embedder: `run` has the engine thread call a function."""

    def __init__(
        self,
        run: Callable[[Callable[[TextEmbedder], list[list[float]]]], Future[list[list[float]]]],
        *,
        n_dims: int,
        max_tokens: int,
    ) -> None:
        self._run = run
        self.n_dims = n_dims
        self.max_tokens = max_tokens

    def embed(
        self, texts: Sequence[Sequence[int]], *, n_dims: int | None = None
    ) -> Future[list[list[float]]]:
        return self._run(lambda embedder: embedder.embed(texts, n_dims=n_dims))
