"""The model's own picture processor, called with one picture at a time.

mlx-vlm and transformers process the whole prompt with all of its pictures. A picture by itself, in
the markup that the chat template puts around it, gives the same tokens and the same pixel values.
These do not depend on the pictures before and after it, so a longer chat keeps its prefix.

Used from the tokenize pool.
"""

from __future__ import annotations

import enum
import hashlib
import json
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firn.core.errors import SetupError, TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import TokenArray
from firn.models.vision.picture import Picture

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3)."""

PROCESS_FAULTS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OSError,
    ArithmeticError, AssertionError, MemoryError,
)  # fmt: skip
"""What processors raise for pictures they cannot process."""
TOKEN_NAMES = ("image_token", "boi_token", "image_placeholder", "img_context_token")
KNOWN_PLACEHOLDERS = (
    "<|image_pad|>", "<image>", "<start_of_image>", "<image_soft_token>", "<|image|>", "[IMG]",
    "<|media_pad|>", "<|IMAGE_PLACEHOLDER|>", "<IMG_CONTEXT>", "<|patch|>", "<image_placeholder>",
    "<im_patch>",
)  # fmt: skip
ID_NAMES = (
    "image_token_id", "image_token_index", "media_placeholder_token_id", "img_context_token_id",
    "image_patch_id", "im_patch_id",
)  # fmt: skip
LIBRARIES = ("mlx-vlm", "transformers", "pillow", "numpy", "torch", "torchvision")
"""Those that decide how pixels become tensors; not all of them need to be installed."""
MAX_SETTINGS_DEPTH = 4
NOT_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """text: replaces the placeholder in a rendered prompt, and becomes the tokens `ids`."""

    text: str
    inputs: Picture

    @property
    def ids(self) -> TokenArray:
        return self.inputs.own_ids

    @property
    def nbytes(self) -> int:
        tensors = self.inputs.tensors.values()
        return sum(v.nbytes for v in tensors if isinstance(v, np.ndarray))


class _Listener:
    """The processor's tokenizer; remembers the text that it was last given.

    This class's name is part of the digest of a processor's settings, and so of every picture's records.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.last_text: str | None = None

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        only = text[0] if isinstance(text, list | tuple) and len(text) == 1 else text
        self.last_text = only if isinstance(only, str) else None
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class VisionProcessor:
    """Thread-safe: it processes one picture at a time.

    placeholder: what stands for a picture in a rendered prompt. inline: the chat template does not know
    pictures, so the placeholder must be written into the message's text.
    """

    def __init__(self, processor: Any, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        """Raises SetupError if no way to put a picture into a prompt works."""
        self._processor = processor
        self._tokenizer = tokenizer
        self._config = config
        self._lock = threading.Lock()
        self._listener = _Listener(processor.tokenizer)
        processor.tokenizer = self._listener
        self.settings = _settings(processor)
        grey = np.full((64, 64, 3), 127, dtype=np.uint8)
        faults = []
        for placeholder, markup, inline in self._conventions():
            self.placeholder, self._markup, self.inline = placeholder, markup, inline
            try:
                self.example = self.process(grey)
                return
            except PROCESS_FAULTS as e:
                faults.append(f"{placeholder}: {e}")
        why = faults[0] if faults else "it has no image token"
        raise SetupError(f"The model's picture processor does not work: {_one_line(why)}")

    def process(self, pixels: Pixels) -> ProcessedPicture:
        """Raises one of PROCESS_FAULTS."""
        from PIL import Image

        image = Image.fromarray(pixels)
        with self._lock:
            self._listener.last_text = None
            output = dict(self._processor(text=[self._markup], images=[image]))
            last_text = self._listener.last_text
        if "images" in output:
            output["pixel_values"] = output.pop("images")
        ids = np.array(output["input_ids"], dtype=np.int64).reshape(-1)
        image_token = self._image_token(ids)
        at = np.flatnonzero(ids == image_token)
        if not len(at) or "pixel_values" not in output:
            raise ValueError("the processor has put no picture into the prompt")
        tensors = {k: _to_numpy(v) for k, v in output.items() if k not in NOT_TENSORS}
        picture = Picture(ids, int(at[0]), int(at[-1]) + 1, image_token, tensors)
        return ProcessedPicture(self._own_text(last_text, ids), picture)

    def _own_text(self, last_text: str | None, ids: TokenArray) -> str:
        """The expanded markup, without what surrounds the placeholder."""
        text = last_text if last_text is not None else self._tokenizer.decode([int(t) for t in ids])
        before, _, after = self._markup.partition(self.placeholder)
        if not (text.startswith(before) and text.endswith(after)):
            raise ValueError("the processor has changed the text around the picture")
        return text[len(before) : len(text) - len(after)]

    def _image_token(self, ids: TokenArray) -> int:
        """The id that stands for a feature."""
        present = set(ids.tolist())
        named = [self._config.get(name) for name in ID_NAMES]
        named += [getattr(self._processor, name, None) for name in ID_NAMES]
        for value in named:
            if isinstance(value, int) and value in present:
                return value
        values, counts = np.unique(ids, return_counts=True)
        return int(values[counts.argmax()])

    def _conventions(self) -> Iterator[tuple[str, str, bool]]:
        """Ways of writing a picture that may be this model's: placeholder, markup around it, inline."""
        names = [getattr(self._processor, n, None) for n in TOKEN_NAMES]
        names += [getattr(self._listener, n, None) for n in TOKEN_NAMES]
        known = [n for n in KNOWN_PLACEHOLDERS if self._tokenizer.token_id(n) is not None]
        candidates = list(dict.fromkeys([n for n in names if isinstance(n, str) and n] + known))
        rendered = _render_pair(self._tokenizer)
        if rendered is not None:
            without, with_picture = rendered
            for name in candidates:
                if with_picture.count(name) == without.count(name) + 1:
                    yield name, _inserted(without, with_picture, name), False
        for name in candidates:
            yield name, name, True


def _render_pair(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A message without and with a picture, as the chat template renders them; None if it fails."""
    text = {"type": "text", "text": "alpha", "content": "alpha"}
    pair: list[str] = []
    for parts in ([text], [{"type": "image"}, text]):
        try:
            message = [{"role": "user", "content": parts}]
            pair.append(tokenizer.render(message, tools=None, kwargs={}))
        except TemplateFailed:
            return None
    return (pair[0], pair[1]) if all("alpha" in r for r in pair) else None


def _inserted(without: str, with_picture: str, placeholder: str) -> str:
    """What the picture added to the text; the placeholder alone if that is not clear."""
    n_more = len(with_picture) - len(without)
    n_before = 0
    while n_before < len(without) and without[n_before] == with_picture[n_before]:
        n_before += 1
    markup = with_picture[n_before : n_before + n_more]
    clean = with_picture[:n_before] + with_picture[n_before + n_more :] == without
    return markup if clean and markup.count(placeholder) == 1 else placeholder


def _settings(processor: Any) -> bytes:
    """A digest of what decides how pixels become tensors: settings, code, libraries."""
    parts = [processor, getattr(processor, "image_processor", None)]
    content = {
        "versions": {name: _version(name) for name in LIBRARIES},
        "parts": [_plain(part, depth=MAX_SETTINGS_DEPTH) for part in parts],
        "code": [_source_digest(type(part)) for part in parts],
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).digest()


def _plain(value: Any, *, depth: int) -> Any:
    """The value in JSON types. An object becomes its class and fields; below `depth`, its class."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if depth == 0 or isinstance(value, type | _Listener | types.FunctionType | types.MethodType):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(k): _plain(v, depth=depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(v, depth=depth - 1) for v in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    fields = {k: _plain(v, depth=depth - 1) for k, v in _fields(value)}
    return {"class": type(value).__qualname__, **fields}


def _fields(value: object) -> Iterator[tuple[str, Any]]:
    slots = [n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())]
    for name in (*getattr(value, "__dict__", ()), *slots):
        if hasattr(value, name):
            yield name, getattr(value, name)


def _source_digest(cls: type) -> str:
    """Digest of the file that defines the class: a checkpoint may bring its own."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    try:
        return hashlib.blake2b(Path(path or "").read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return ""


def _to_numpy(value: Any) -> Any:
    """Any library's array as NumPy's; a list of arrays of one shape as one array."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        items = [_to_numpy(v) for v in value]
        shapes = {getattr(v, "shape", ()) for v in items}
        return np.array(items) if len(shapes) == 1 else items
    return np.array(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
