"""Where the pictures of a prompt are: from placeholders in a rendered text to spans of tokens. Pure.

    rendered   user: look at <image> and <image>
    expanded   user: look at <image><image><image> and <image><image>
    tokens     |---- text ---|--- span 0: its digest --|- text -|-- span 1 --|

The template writes one placeholder for each picture. In a caller's own text, the same characters are
text, and so are those of a picture's tokens: `typed_control` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firn.core.errors import BadPicture
from firn.core.ports import Pictures, Tokenizer
from firn.core.values import Message, PicturePart, PictureSpan, PreparedPicture, TokenArray
from firn.text.prompt.rendering import Rendered, Span


@dataclass(frozen=True, slots=True)
class ReadyPicture(PicturePart):
    """A picture of a message, decoded and preprocessed."""

    prepared: PreparedPicture | None = None


def pictures_of(messages: Sequence[Message]) -> list[ReadyPicture]:
    return [p for m in messages for p in m.parts if isinstance(p, ReadyPicture)]


class PromptPictures:
    """The pictures of one prompt. Owner: the call that makes the prompt."""

    def __init__(self, messages: Sequence[Message], pictures: Pictures) -> None:
        self._parts = pictures_of(messages)
        self._placeholder = pictures.placeholder
        self._inline = pictures.inline
        self.prepared = [p.prepared for p in self._parts if p.prepared is not None]

    def tokens(self, tokenizer: Tokenizer) -> set[str]:
        """The texts that a picture begins with: its placeholder, and the first of its tokens."""
        firsts = {tokenizer.decode([int(picture.ids[0])]) for picture in self.prepared}
        return {self._placeholder, *firsts} - {""}

    def written_out(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Writes placeholders into the text, for a template that does not support pictures."""
        return (
            [_written_out(m, self._placeholder) for m in messages] if self._inline else [*messages]
        )

    def expand(self, rendered: Rendered) -> Rendered:
        """Replaces the template's placeholders with the pictures' texts. Raises BadPicture."""
        places = list(self._placeholders(rendered))
        if len(places) != len(self._parts):
            param = self._parts[0].param
            raise BadPicture(
                param,
                "the model's chat template has no place for images here; try a user message.",
            )
        text, pieces, at = rendered.text, [], 0
        grown: list[tuple[int, int]] = []  # (position in the old text, characters added up to it)
        n_more = 0
        for start, picture in zip(places, self.prepared, strict=True):
            end = start + len(self._placeholder)
            pieces += [text[at:start], picture.text]
            n_more += len(picture.text) - len(self._placeholder)
            grown.append((end, n_more))
            at = end
        return Rendered("".join([*pieces, text[at:]]), _move(rendered.typed, grown))

    def _placeholders(self, rendered: Rendered) -> Iterator[int]:
        typed = {start for start, _ in rendered.typed}
        at = rendered.text.find(self._placeholder)
        while at >= 0:
            if at not in typed:
                yield at
            at = rendered.text.find(self._placeholder, at + len(self._placeholder))

    def spans(self, ids: TokenArray) -> tuple[PictureSpan, ...]:
        """The span of each picture's tokens. Raises BadPicture."""
        spans: list[PictureSpan] = []
        at = 0
        for part, picture in zip(self._parts, self.prepared, strict=True):
            start = _find(ids, picture.ids, at)
            if start < 0:
                raise BadPicture(
                    part.param, "the model's tokenizer splits the image's placeholder tokens."
                )
            at = start + len(picture.ids)
            spans.append(PictureSpan(start, at, picture.digest))
        return tuple(spans)


def _move(spans: Sequence[Span], grown: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    moved: list[Span] = []
    i, n_more = 0, 0
    for start, end in spans:
        while i < len(grown) and grown[i][0] <= start:
            n_more = grown[i][1]
            i += 1
        moved.append((start + n_more, end + n_more))
    return tuple(moved)


def _find(ids: TokenArray, wanted: TokenArray, start: int) -> int:
    """The first position of `wanted` from `start` on; -1 if there is none."""
    last = len(ids) - len(wanted)
    for at in np.flatnonzero(ids[start : last + 1] == wanted[0]) + start:
        if np.array_equal(ids[at : at + len(wanted)], wanted):
            return int(at)
    return -1


def _written_out(message: Mapping[str, Any], placeholder: str) -> Mapping[str, Any]:
    """The message with each picture as a line of its text."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [p["text"] if p["type"] == "text" else f"{placeholder}\n" for p in content]
    return {**message, "content": "".join(texts)}
