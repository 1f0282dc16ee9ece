"""Where pictures stand in a prompt: from placeholders in a rendered text to spans of tokens. Pure.

    rendered   user: look at <image> and <image>
    expanded   user: look at <image><image><image> and <image><image>
    tokens     |---- text ---|--- span 0: its digest --|- text -|-- span 1 --|

The template writes one placeholder for each picture. The same characters in a caller's own text are no
picture: they are found by rendering once more with that text marked, and are tokenized in two halves,
as text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from firn.core.errors import BadImage
from firn.core.ports import Pictures, Tokenizer
from firn.core.values import ImagePart, MediaSpan, Message, PreparedImage, TokenArray

MAX_IMAGES = 256
"""In one prompt. Each is decoded before the prompt's length is known."""


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    return [p for m in messages for p in m.parts if isinstance(p, ImagePart)]


class Illustration:
    """The pictures of one prompt. Owner: whoever makes the prompt."""

    def __init__(self, messages: Sequence[Message], pictures: Pictures) -> None:
        """Raises BadImage."""
        self._parts = images_of(messages)
        if len(self._parts) > MAX_IMAGES:
            raise BadImage(self._parts[MAX_IMAGES].param, f"more than {MAX_IMAGES} images.")
        self._placeholder = pictures.placeholder
        self._inline = pictures.inline
        self._mark = ""
        self.prepared: list[PreparedImage] = [pictures.prepare(p) for p in self._parts]

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The template's text with one placeholder for each picture, and no others."""

        def rendered(change: Any) -> str:
            plain = change(messages)
            written = [_written_out(m, self._placeholder) for m in plain] if self._inline else plain
            return tokenizer.render(written, tools=change(tools), kwargs=change(kwargs))

        text = rendered(lambda value: value)
        if text.count(self._placeholder) == len(self._parts):
            return text
        self._mark = f"placeholder-{secrets.token_hex(8)}"
        text = rendered(lambda value: _replaced(value, self._placeholder, self._mark))
        if text.count(self._placeholder) != len(self._parts):
            param = self._parts[0].param
            raise BadImage(param, "the model's chat template has no place for images here.")
        return text

    def expand(self, text: str) -> str:
        """Every placeholder as what its picture becomes."""
        pieces = text.split(self._placeholder)
        expanded = [pieces[0]]
        for image, piece in zip(self.prepared, pieces[1:], strict=True):
            expanded += [image.text, piece]
        return "".join(expanded)

    def encode(self, tokenizer: Tokenizer, expanded: str) -> list[int]:
        if not self._mark:
            return tokenizer.encode(expanded, add_special=False)
        pieces = expanded.split(self._mark)
        head, tail = self._placeholder[:1], self._placeholder[1:]
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            text = (tail if i else "") + piece + (head if i < len(pieces) - 1 else "")
            ids += tokenizer.encode(text, add_special=False)
        return ids

    def readable(self, expanded: str) -> str:
        """The expanded text with the caller's own words as they were."""
        return expanded.replace(self._mark, self._placeholder) if self._mark else expanded

    def spans(self, ids: TokenArray) -> tuple[MediaSpan, ...]:
        """The tokens that stand for each picture."""
        found: list[MediaSpan] = []
        at = 0
        for part, image in zip(self._parts, self.prepared, strict=True):
            start = _find(ids, image.ids, at)
            if start < 0:
                raise BadImage(part.param, "the model's tokenizer breaks the image's placeholder.")
            at = start + len(image.ids)
            found.append(MediaSpan(start, at, image.digest))
        return tuple(found)


def _find(ids: TokenArray, wanted: TokenArray, start: int) -> int:
    """The first position from `start` on where `wanted` stands; -1: nowhere."""
    last = len(ids) - len(wanted)
    for at in np.flatnonzero(ids[start : last + 1] == wanted[0]) + start:
        if np.array_equal(ids[at : at + len(wanted)], wanted):
            return int(at)
    return -1


def _replaced(value: Any, old: str, new: str) -> Any:
    """In every text of a nested value."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {k: _replaced(v, old, new) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(v, old, new) for v in value]
    return value


def _written_out(message: Mapping[str, Any], placeholder: str) -> Mapping[str, Any]:
    """A message whose pictures are a part of its text, each on a line of its own."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [p["text"] if p["type"] == "text" else f"{placeholder}\n" for p in content]
    return {**message, "content": "".join(texts)}
