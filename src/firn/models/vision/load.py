"""Loading a vision checkpoint: its processor, its weights, and the check that firn can serve it.

mlx-vlm's model families differ in many details. Instead of trusting a list, firn tries the model: the
same picture goes through mlx-vlm's own call and through firn's, in chunks, and the logits must agree.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.errors import SetupError
from firn.core.ports import Tokenizer
from firn.core.values import PictureSpan, Prompt
from firn.models.faults import LOAD_FAULTS, first_line
from firn.models.load.selfcheck import distance
from firn.models.vision.picture import Picture
from firn.models.vision.processor import VisionProcessor
from firn.models.vision.vision_model import VisionModel, to_mlx

log = logging.getLogger("firn.models")

FAR = 0.05
"""In standard deviations of the logits. Rounding stays far below it, in bfloat16 too."""


def require_extra(name: str) -> None:
    """Raises SetupError if the vision packages are not installed."""
    missing = [m for m in ("mlx_vlm", "PIL") if importlib.util.find_spec(m) is None]
    if missing:
        raise SetupError(
            f"{name} accepts pictures, which needs more packages: pip install 'firn[vision]' "
            "(or serve it without them: --text-only)."
        )


def load_processor(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    trust_remote_code: bool = False,
) -> VisionProcessor:
    """Needs no weights and no particular thread. Raises SetupError."""
    from mlx_vlm import utils
    from transformers import AutoProcessor
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()  # it warns about checkpoints that work
    try:
        _refuse_code(folder, config, trust_remote_code)
        # Importing the family's package registers its processor with AutoProcessor.
        utils.get_model_and_args(dict(config))
        processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        if not hasattr(processor, "tokenizer"):
            raise SetupError(f"{folder} has no picture processor (preprocessor_config.json).")
        return VisionProcessor(processor, tokenizer, config)
    except SetupError:
        raise
    except LOAD_FAULTS as e:
        raise SetupError(
            f"The picture processor of {folder} cannot be loaded: {first_line(e)}"
        ) from e


def load_weights(
    folder: Path,
    config: Mapping[str, Any],
    *,
    adapter: Path | None,
    trust_remote_code: bool,
    feature_nbytes: int,
) -> VisionModel:
    """Raises SetupError."""
    from mlx_vlm import utils

    kind = str(config["model_type"])
    try:
        _refuse_code(folder, config, trust_remote_code)
        model = utils.load_model(folder)
        if adapter is not None:
            model = utils.apply_lora_layers(model, str(adapter))
            model.eval()
            mx.eval(model.parameters())
    except SetupError:
        raise
    except LOAD_FAULTS as e:
        raise SetupError(f"{folder} ({kind}) cannot be loaded: {first_line(e)}") from e
    for part in ("language_model", "get_input_embeddings"):
        if not hasattr(model, part):
            raise SetupError(f"{kind}: mlx-vlm's model has no {part}, so it cannot be served.")
    return VisionModel(model, feature_nbytes=feature_nbytes)


def check_pictures(model: VisionModel, picture: Picture, architecture: str) -> None:
    """Raises SetupError if pictures do not come out as in mlx-vlm."""
    try:
        fault = _fault(model, picture)
    except LOAD_FAULTS as e:
        fault = first_line(e)
    model.features.clear()
    if fault:
        raise SetupError(
            f"{architecture}: its pictures cannot be served ({fault}); "
            "serve it without them (--text-only)."
        )


def _fault(model: VisionModel, picture: Picture) -> str | None:
    text = mx.array(
        [list(range(70, 133, 7))]
    )  # no control tokens: those are at the ends of a vocabulary
    by_ids = model(text, cache=model.make_cache())[0, -1]
    features = model.text_features(text)
    more = {} if features.per_layer is None else {"per_layer_inputs": features.per_layer}
    by_embeds = model(text, cache=model.make_cache(), inputs_embeds=features.embeds, **more)[0, -1]
    if distance(by_ids, by_embeds) > FAR:
        return "text comes out different by ids and by embeddings"
    if distance(_logits_by_mlx_vlm(model, picture), _logits_by_firn(model, picture)) > FAR:
        return "a picture that is read in chunks comes out different"
    return None


def _logits_by_mlx_vlm(model: VisionModel, picture: Picture) -> mx.array:
    """One call with everything that mlx-vlm's generator would pass."""
    ids = mx.array(picture.ids.astype(np.int32))[None]
    tensors = to_mlx(picture)
    out = model.model.get_input_embeddings(input_ids=ids, mask=mx.ones_like(ids), **tensors)
    tensors.pop("pixel_values")
    given = {k: v for k, v in out.to_dict().items() if v is not None}
    if model.whole_pictures:
        given["mm_token_type_ids"] = (ids == picture.image_token).astype(mx.int32)
    language = model.model.language_model
    logits: mx.array = language(ids, cache=model.make_cache(), **{**tensors, **given}).logits[0, -1]
    return logits


def _logits_by_firn(model: VisionModel, picture: Picture) -> mx.array:
    """In two chunks, the first of which ends in the middle of the picture if it may be cut."""
    span = PictureSpan(picture.first, picture.last, b"load-time check")
    prompt = Prompt(picture.ids, picture_spans=(span,), picture_inputs=(picture,))
    middle = picture.first if model.whole_pictures else (picture.first + picture.last) // 2
    layers = model.make_cache()
    logits = mx.zeros((1, 1, 1))
    for start, end in ((0, middle), (middle, len(prompt))):
        if start < end:
            ids = mx.array(picture.ids[start:end].astype(np.int32))[None]
            logits = model(ids, cache=layers, **model.chunk(prompt, start, end))
    return logits[0, -1]


def _refuse_code(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    if "model_file" in config and not trust_remote_code:
        raise SetupError(f"{folder} contains its own Python code; see --trust-remote-code.")
