"""From a model's name to a model that answers: resolve, check, load, describe.

Anything wrong with a folder becomes one line in a SetupError. Runs on the engine thread, which owns
the arrays it creates.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import make_prompt_cache

from firn.core.errors import SetupError
from firn.core.values import ModelInfo
from firn.models.decode.batch import why_not_batchable
from firn.models.faults import LOAD_FAULTS, first_line
from firn.models.layers import MakeLayers
from firn.models.load import local as local_models
from firn.models.load.fingerprint import Fingerprint, weight_files
from firn.models.load.foreign import WHAT_TO_DO, foreign_format
from firn.models.load.hub import HubRules, folder_of
from firn.models.load.packaged import no_such_model
from firn.models.load.recognise import context_length, is_vision
from firn.models.load.selfcheck import batch_fault
from firn.models.load.weight_form import AS_STORED, WeightForm
from firn.models.load.weight_memory import WeightMemory
from firn.models.model_arguments import IdsOnly, ModelArguments
from firn.models.speculation.mtp_load import headless_classes
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.models.vision import load as vision_load
from firn.models.vision.picture import Picture
from firn.models.vision.processor import VisionProcessor

log = logging.getLogger("firn.models")

FEATURE_NBYTES = 256 << 20

HUB_RULES = HubRules()
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
"""Each of these is the tokenizer of some model families."""
EMBEDDINGS = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embeddings", "embeddings",
     "embedding", "embed_in", "embed"}
)  # fmt: skip
"""What models call their table of token embeddings."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    info: ModelInfo
    make_layers: MakeLayers
    probe: list[Any]
    """Layer caches that hold one token: what a live row looks like."""
    arguments: ModelArguments
    """What the model takes besides ids."""


def resolve(name: str, rules: HubRules = HUB_RULES) -> Path:
    """The folder of a local path or hub id; downloads the latter."""
    local = Path(os.path.expanduser(name))
    if local.exists():
        if not local.is_dir():
            foreign = foreign_format(local)
            raise SetupError(
                foreign or f"{name} is a file; a model is a folder with a config.json."
            )
        return local
    if not name.startswith((".", "/", "~")) and not _in_hub_cache(name):
        downloaded = local_models.find(name)
        if downloaded is not None:
            log.info("%s is in %s", name, downloaded)
            return downloaded
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise no_such_model(name)
    folder = folder_of(name, rules)
    if name.upper().endswith("GGUF") and not (folder / "config.json").exists():
        raise SetupError(f"{name} is a model in llama.cpp's format; {WHAT_TO_DO}.")
    return folder


def _in_hub_cache(name: str) -> bool:
    try:
        return name.count("/") == 1 and bool(mlx_utils.hf_repo_to_path(name))
    except (FileNotFoundError, ValueError):  # huggingface_hub: no complete snapshot, or not an id
        return False


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        foreign = foreign_format(folder)
        raise SetupError(foreign or f"{folder} has no config.json: it is not a model folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SetupError(f"{path} cannot be read: {first_line(e)}") from e
    if not isinstance(config, dict) or "model_type" not in config:
        raise SetupError(f"{path} has no model_type.")
    return config


def load(
    folder: Path,
    *,
    served_name: str,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    picture: Picture | None = None,
    feature_nbytes: int = FEATURE_NBYTES,
    memory: WeightMemory | None = None,
    form: WeightForm = AS_STORED,
    max_context: int | None = None,
    shard: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """Read the weights and describe the model. The caller's thread owns the arrays from then on.

    picture: an example from the model's processor; with it the vision tower is loaded, too. memory:
    remembers the weights' digests from one start to the next. form: in which
    the device computes weights. max_context: an upper limit on the context. shard:
    reduces a model to this rank's part before its weights are read.
    """
    config = read_config(folder)
    vision, kind = picture is not None, str(config["model_type"])
    _check_files(folder, adapter, vision=vision)
    hashing = Fingerprint(folder, adapter=adapter, vision=vision, memory=memory)
    arguments: ModelArguments = IdsOnly()
    if picture is None:
        model, config = _load_weights(folder, config, adapter, trust_remote_code, shard)
        widened = form.widen(model)
    else:
        model = arguments = vision_load.load_weights(
            folder,
            config,
            adapter=adapter,
            trust_remote_code=trust_remote_code,
            feature_nbytes=feature_nbytes,
        )
        widened = form.widen(model.model)
        vision_load.check_pictures(model, picture, kind)
    logits, layers = _first_token(model, f"{folder} ({kind})", form)
    make_layers = partial(make_prompt_cache, model)
    why_not = why_not_batchable(layers) or batch_fault(model, make_layers, kind)
    n_vocab, (weights_dtype, weights_nbytes) = int(logits.shape[-1]), _weights(model)
    info = ModelInfo(
        name=served_name,
        path=str(folder),
        architecture=kind,
        fingerprint=_with_rounding(hashing.result(), widened=widened),
        context_length=min(context_length(config), max_context or sys.maxsize),
        vocab_size=n_vocab,
        n_embeddings=_n_embeddings(model, n_vocab),
        dtype=weights_dtype,
        weights_nbytes=weights_nbytes,
        layer_kinds=tuple(type(layer).__name__ for layer in layers),
        batchable=why_not is None,
        unbatchable_why=why_not,
        vision=vision,
        whole_pictures=vision and model.whole_pictures,
        created=int(time.time()),
    )
    return LoadedModel(model, info, make_layers, layers, arguments)


def check(folder: Path, *, adapter: Path | None, trust_remote_code: bool, vision: bool) -> None:
    """Find out what would prevent loading this model, as far as that shows without reading weights:
    files, architecture, and the names and shapes of the tensors. Raises SetupError."""
    config = read_config(folder)
    _check_files(folder, adapter, vision=vision)
    if not vision:  # mlx-vlm has no lazy way that checks as much
        try:
            mlx_utils.load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        except LOAD_FAULTS as e:
            raise _cannot_be_loaded(folder, config, e) from e


def _cannot_be_loaded(folder: Path, config: Mapping[str, Any], e: BaseException) -> SetupError:
    return SetupError(f"{folder} ({config.get('model_type')}) cannot be loaded: {first_line(e)}")


def _with_rounding(digest: bytes, *, widened: bool) -> bytes:
    """Weights that were widened to float32 are the same weights, but results are rounded differently."""
    if not widened:
        return digest
    return hashlib.blake2b(digest, digest_size=32, person=b"firn-float32").digest()


def _first_token(model: Any, name: str, form: WeightForm) -> tuple[mx.array, list[Any]]:
    """Run one token to prove that the model works; returns logits and layers. Raises SetupError."""

    def run() -> tuple[mx.array, list[Any]]:
        layers = make_prompt_cache(model)
        logits = model(mx.array([[0]]), cache=layers)
        mx.eval(logits, model.parameters())
        return logits, layers

    try:
        try:
            return run()
        except RuntimeError:
            if not form.rescue(model):
                raise
            return run()
    except LOAD_FAULTS as e:
        raise SetupError(f"{name} does not run on this machine: {first_line(e)}") from e


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> HfTokenizer:
    """The tokenizer and chat template. Needs no weights and no particular thread."""
    config = read_config(folder)
    extra: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    extra |= _template_of_processor(folder)
    try:
        eos = mlx_utils.load_config(folder).get("eos_token_id", config.get("eos_token_id"))
        wrapper = mlx_utils.load_tokenizer(folder, extra, eos_token_ids=eos)
    except LOAD_FAULTS as e:
        # Name a missing file first: the library's own message does not.
        why = tokenizer_fault(folder) or f"The tokenizer cannot be loaded: {first_line(e)}"
        raise SetupError(f"{folder}: {why}") from e
    return HfTokenizer(wrapper)


def tokenizer_fault(folder: Path) -> str | None:
    """Which tokenizer files a folder lacks; None if it is complete."""
    present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if present == ["vocab.json"] and not (folder / "merges.txt").exists():
        return "The tokenizer is not complete: vocab.json is there, merges.txt is missing."
    if present or any(folder.glob("*.tiktoken")):
        return None
    return f"The tokenizer is missing: none of {', '.join(TOKENIZER_FILES)}."


def load_processor(
    folder: Path, tokenizer: HfTokenizer, *, trust_remote_code: bool = False
) -> VisionProcessor | None:
    """The picture processor of a vision checkpoint; None for any other. Raises SetupError."""
    config = read_config(folder)
    if not is_vision(config):
        return None
    vision_load.require_extra(folder.name)
    return vision_load.load_processor(
        folder, config, tokenizer, trust_remote_code=trust_remote_code
    )


def _template_of_processor(folder: Path) -> dict[str, Any]:
    """Older vision checkpoints keep the chat template with the processor, not the tokenizer."""
    if (folder / "chat_template.jinja").exists():
        return {}
    path = folder / "chat_template.json"
    try:
        own = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if own.get("chat_template"):
            return {}
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return {}
    return {"chat_template": template} if isinstance(template, str) else {}


def _check_files(folder: Path, adapter: Path | None, *, vision: bool) -> None:
    if not weight_files(folder, vision=vision):
        if glob.escape(str(folder)) != str(folder):
            raise SetupError(
                f"{folder}: mlx-lm finds no weights in a folder with [, * or ? in its path; rename it."
            )
        foreign = foreign_format(folder)
        raise SetupError(foreign or f"{folder} has no model*.safetensors: the weights are missing.")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(f for f in named if not (folder / f).exists())
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise SetupError(f"{index} cannot be read: {first_line(e)}") from e
        if missing:
            raise SetupError(
                f"{folder} is missing {len(missing)} weight files, such as {missing[0]}."
            )
    if adapter is not None and not (adapter / "adapter_config.json").exists():
        raise SetupError(f"{adapter} has no adapter_config.json: it is not an adapter folder.")


def _load_weights(
    folder: Path,
    config: Mapping[str, Any],
    adapter: Path | None,
    trust_remote_code: bool,
    shard: Callable[[Any], None] | None,
) -> tuple[Any, dict[str, Any]]:
    try:
        model, full_config = mlx_utils.load_model(
            folder,
            lazy=shard is not None,
            get_model_classes=headless_classes,
            trust_remote_code=trust_remote_code,
        )
        if shard is not None:
            shard(model)
            mx.eval(model.parameters())
        if adapter is not None:
            model = mlx_utils.load_adapters(model, str(adapter))
            model.eval()
            mx.eval(model.parameters())
    except LOAD_FAULTS as e:
        raise _cannot_be_loaded(folder, config, e) from e
    return model, dict(full_config)


def _n_embeddings(model: Any, default: int) -> int:
    """Rows of the embedding table. Ids beyond them must not be fed: MLX would read past its end."""
    n_rows = {
        path: module.weight.shape[0]
        for path, module in model.named_modules()
        if path.rsplit(".", 1)[-1] in EMBEDDINGS
        and isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    }
    return int(n_rows[min(n_rows, key=len)]) if n_rows else default


def _weights(model: Any) -> tuple[str, int]:
    """The type of most floating-point weights, and the bytes of all weights."""
    sizes: dict[str, int] = {}
    weights = [w for _, w in tree_flatten(model.parameters())]
    for w in weights:
        if mx.issubdtype(w.dtype, mx.floating):
            name = str(w.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + w.size
    most = max(sizes, key=lambda k: sizes[k], default="unknown")
    return most, sum(w.nbytes for w in weights)
