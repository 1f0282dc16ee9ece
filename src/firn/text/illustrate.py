"""Where pictures stand in a prompt: from placeholders in a rendered text to spans of tokens. Pure.

    rendered   user: look at <image> and <image>
    expanded   user: look at <image><image><image> and <image><image>
    tokens     |---- text ---|--- span 0: its digest --|- text -|-- span 1 --|

The template writes one placeholder for each picture. The same characters in a caller's own text, or
those of the tokens that a picture becomes, are no picture: they are found by rendering once more with
that text marked, and are tokenized in two halves, as text.
"""

from __future__ import annotations

import re
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
        self._marks: dict[str, str] = {}
        """What stands in the text for what a caller has written."""
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
        others = self._other_tokens(tokenizer)
        if text.count(self._placeholder) == len(self._parts) and not any(o in text for o in others):
            return text
        written = (self._placeholder, *others)
        self._marks = {f"placeholder-{secrets.token_hex(8)}": own for own in written}
        text = rendered(lambda value: _replaced(value, self._marks))
        if text.count(self._placeholder) != len(self._parts):
            param = self._parts[0].param
            raise BadImage(param, "the model's chat template has no place for images here.")
        return text

    def _other_tokens(self, tokenizer: Tokenizer) -> list[str]:
        """What a picture's tokens begin with, where that is not the placeholder: Gemma 3 has both."""
        found = {tokenizer.decode([int(image.ids[0])]) for image in self.prepared}
        return sorted(found - {self._placeholder, ""})

    def expand(self, text: str) -> str:
        """Every placeholder as what its picture becomes."""
        pieces = text.split(self._placeholder)
        expanded = [pieces[0]]
        for image, piece in zip(self.prepared, pieces[1:], strict=True):
            expanded += [image.text, piece]
        return "".join(expanded)

    def encode(self, tokenizer: Tokenizer, expanded: str) -> list[int]:
        if not self._marks:
            return tokenizer.encode(expanded, add_special=False)
        ids: list[int] = []
        text = ""
        for piece in re.split(f"({'|'.join(self._marks)})", expanded):
            written = self._marks.get(piece)
            if written is None:
                text += piece
            else:
                ids += tokenizer.encode(text + written[:1], add_special=False)
                text = written[1:]
        return ids + tokenizer.encode(text, add_special=False)

    def readable(self, expanded: str) -> str:
        """The expanded text with the caller's own words as they were."""
        for mark, written in self._marks.items():
            expanded = expanded.replace(mark, written)
        return expanded

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


def _replaced(value: Any, marks: Mapping[str, str]) -> Any:
    """Marks in place of what they stand for, in every text of a nested value."""
    if isinstance(value, str):
        for mark, written in marks.items():
            value = value.replace(written, mark)
        return value
    if isinstance(value, Mapping):
        return {k: _replaced(v, marks) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(v, marks) for v in value]
    return value


def _written_out(message: Mapping[str, Any], placeholder: str) -> Mapping[str, Any]:
    """A message whose pictures are a part of its text, each on a line of its own."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [p["text"] if p["type"] == "text" else f"{placeholder}\n" for p in content]
    return {**message, "content": "".join(texts)}
