"""Tiny vision models as the engine has them, and the same models as mlx-vlm runs them."""

from __future__ import annotations

import base64
import functools
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from firn.core.values import Chat, Message, MessagePart, PicturePart, Prompt, TextPart
from firn.media.pictures import PictureLimits, Pictures
from firn.models.load import loader
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.models.vision import load as vision_load
from firn.models.vision.gemma import has_whole_pictures
from firn.models.vision.processor import VisionProcessor
from firn.models.vision.vision_model import VisionModel
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.messages import to_template
from firn.text.prompt.template import Template
from tests.zoo.vision import MORE_VISION, VISION, picture, write_vision_folder

FAMILIES = tuple(VISION)
MORE = tuple(MORE_VISION)
every_family = pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.sweep) for name in MORE)]
)
TIE = 1e-3


_HOME = tempfile.TemporaryDirectory(prefix="firn-vision-")


@functools.cache
def folder(name: str) -> Path:
    """Written once per process, and removed with it."""
    return write_vision_folder(name, Path(_HOME.name) / name)


@functools.cache
def tokenizer(name: str) -> HfTokenizer:
    return loader.load_tokenizer(folder(name))


@functools.cache
def processor(name: str) -> VisionProcessor:
    found = loader.load_processor(folder(name), tokenizer(name))
    assert found is not None
    return found


@functools.cache
def pictures(name: str) -> Pictures:
    whole = has_whole_pictures(reference_model(name))
    return Pictures(processor(name), whole=whole, limits=PictureLimits())


@functools.cache
def maker(name: str) -> PromptMaker:
    return PromptMaker(tokenizer(name), context_length=4096, pictures=pictures(name))


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(shown: str | Image.Image | int, param: str = "messages") -> MessagePart:
    """Text, a picture, or a picture by its number."""
    if isinstance(shown, str):
        return TextPart(shown)
    image = picture(shown, 96 - 16 * (shown % 2), 64) if isinstance(shown, int) else shown
    return PicturePart(data_url(image), param=param)


def user(*shown: str | Image.Image | int) -> Message:
    return Message("user", tuple(part(s, f"messages[0].content[{i}]") for i, s in enumerate(shown)))


def said(text: str) -> Message:
    return Message("assistant", (TextPart(text),))


def prompt_of(name: str, *messages: Message) -> Prompt:
    return maker(name).make(Chat(messages))


def build(
    name: str, *, path: Path | None = None, feature_nbytes: int = 1 << 30
) -> Callable[[], tuple[Any, Callable[[], Any]]]:
    """For tests.harness. path: a folder other than the family's own."""

    def make() -> tuple[Any, Callable[[], list[Any]]]:
        home = path or folder(name)
        config = json.loads((home / "config.json").read_text())
        model = vision_load.load_weights(
            home,
            config,
            adapter=None,
            trust_remote_code=False,
            feature_nbytes=feature_nbytes,
        )
        return model, model.make_cache

    return make


# --- mlx-vlm's own way ---------------------------------------------------------------------


@functools.cache
def reference_model(name: str) -> Any:
    from mlx_vlm.utils import load_model

    return load_model(folder(name))


@functools.cache
def reference_processor(name: str) -> Any:
    from mlx_vlm.utils import load_processor

    return load_processor(folder(name), trust_remote_code=False)


def reference_inputs(name: str, messages: Sequence[Message]) -> dict[str, Any]:
    """The whole prompt and all of its pictures through the processor in one call."""
    style = Template.read(tokenizer(name)).style
    text = tokenizer(name).render(to_template(messages, style=style), tools=None, kwargs={})
    shown = [_image(p) for m in messages for p in m.parts if isinstance(p, PicturePart)]
    run = reference_processor(name)
    found = dict(run(text=[text], images=shown)) if shown else dict(run.tokenizer([text]))
    return {k: _to_mlx(v) for k, v in found.items()}


def _to_mlx(value: Any) -> Any:
    if isinstance(value, list) and len({getattr(v, "shape", ()) for v in value}) > 1:
        return [mx.array(v) for v in value]  # pictures of several sizes
    return value if value is None else mx.array(np.array(value))


def reference(
    name: str, messages: Sequence[Message], n_reply: int
) -> tuple[list[int], list[int], list[float]]:
    """The prompt's ids, the greedy reply, and by how much each token won."""
    from mlx_vlm.generate.ar import generate_step

    inputs = reference_inputs(name, messages)
    ids = inputs.pop("input_ids")
    bos = tokenizer(name).token_id("<bos>")
    if ids[0, 0].item() == bos and ids[0, 1].item() == bos:  # the processor adds one of its own
        raise AssertionError("two beginnings")
    mask, pixels = inputs.pop("attention_mask"), inputs.pop("pixel_values", None)
    model = reference_model(name)
    for field in ("_position_ids", "_rope_deltas"):  # left over from the last prompt
        if hasattr(model.language_model, field):
            setattr(model.language_model, field, None)
    tokens, margins = [], []
    steps = generate_step(ids, model, pixels, mask, max_tokens=n_reply, temperature=0.0, **inputs)
    for token, logprobs in steps:
        second, first = mx.sort(logprobs.reshape(-1))[-2:].tolist()
        tokens.append(int(token))
        margins.append(first - second)
    return ids[0].tolist(), tokens, margins


def agree(got: Sequence[int], want: Sequence[int], margins: Sequence[float]) -> bool:
    """Equal up to the first position where the reference itself was undecided."""
    for mine, theirs, margin in zip(got, want, margins, strict=True):
        if mine != theirs:
            return margin < TIE
    return True


def _image(part: PicturePart) -> Image.Image:
    data = base64.b64decode(part.url.partition(",")[2])
    return Image.open(io.BytesIO(data)).convert("RGB")


__all__ = ["VisionModel", "picture"]
