"""Reads the parts of messages: prepares pictures, and puts a short text in place of what cannot be read.

A picture that a tool once returned is sent again with every turn, so refusing it would end the session.
Only parts of the newest message are refused: the user can do something about those.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from firn.core.errors import BadDocument, BadPart, BadPicture, ContextTooLong
from firn.core.ports import Pictures
from firn.core.values import DocumentPart, Message, MessagePart, OtherPart, PicturePart, TextPart
from firn.text.prompt.joined_parts import JoinedParts
from firn.text.prompt.picture_spans import ReadyPicture

MAX_PICTURES = 256
"""In one prompt: each is decoded before the prompt's length is known."""
PICTURES_S = 120.0
"""CPU time of this thread for the parts of one prompt, after which no other picture is prepared."""
PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True)
class ReadableMessages:
    """Messages of text and prepared pictures. notes: what was left out of them, for the log."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...] = ()


class PartReader:
    """Immutable. pictures: None for a model that accepts none.

    in_results: the template has a place for pictures in a tool's result. max_tokens: of a prompt's
    pictures together; None: no limit.
    """

    def __init__(
        self,
        pictures: Pictures | None = None,
        *,
        in_results: bool = True,
        max_tokens: int | None = None,
        pictures_s: float = PICTURES_S,
    ) -> None:
        self._pictures = pictures
        self._pictures_s = pictures_s
        self._in_results = in_results
        self._max_tokens = max_tokens

    def read(self, messages: Sequence[Message], *, newest: int) -> ReadableMessages:
        """newest: the message whose parts are refused if they cannot be read. Raises BadPart, and
        ContextTooLong for pictures that do not fit, before the rest of them takes memory."""
        if all(isinstance(p, TextPart) for m in messages for p in m.parts):
            return ReadableMessages(tuple(messages))
        readable: list[Message] = []
        notes: list[str] = []
        n_pictures, n_tokens, until = 0, 0, time.thread_time() + self._pictures_s
        for i, message in enumerate(messages):
            parts: list[MessagePart] = []
            for part in message.parts:
                if isinstance(part, PicturePart) and time.thread_time() > until:
                    # Not replaced by a text: the same prompt may be faster next time.
                    raise BadPicture(
                        part.param,
                        "the images before it took too long; send fewer or smaller ones.",
                    )
                try:
                    n_pictures += isinstance(part, PicturePart)
                    parts.append(self._read(part, message, n_pictures))
                    n_tokens += _picture_tokens(parts[-1])
                except BadPart as fault:
                    if i == newest:
                        raise
                    parts.append(
                        TextPart(_stand_in(part, sees_pictures=self._pictures is not None))
                    )
                    notes.append(f"{fault.message} It was replaced by a short text.")
                if self._max_tokens is not None and n_tokens > self._max_tokens:
                    n_all = sum(isinstance(p, PicturePart) for m in messages for p in m.parts)
                    n_expected = n_tokens * n_all // n_pictures
                    raise ContextTooLong(n_expected, self._max_tokens, estimated=True)
            readable.append(replace(message, parts=_join_texts(message.parts, parts)))
        return ReadableMessages(tuple(readable), tuple(notes))

    def _read(self, part: MessagePart, message: Message, n_pictures: int) -> MessagePart:
        match part:
            case TextPart():
                return part
            case PicturePart():
                return self._picture(part, message, n_pictures)
            case DocumentPart():
                return self._document(part)
            case OtherPart():
                raise BadPart(part.param, f"{part.kind[:64]!r} is not supported here.")

    def _picture(self, part: PicturePart, message: Message, n_pictures: int) -> MessagePart:
        if self._pictures is None:
            raise BadPicture(part.param, "this model does not accept images.")
        if n_pictures > MAX_PICTURES:
            raise BadPicture(
                part.param, f"more than {MAX_PICTURES} images in a prompt; send fewer."
            )
        if message.role == "tool" and not self._in_results:
            raise BadPicture(
                part.param,
                "this model does not accept images in tool results; send them in a user message.",
            )
        prepared = self._pictures.prepare(part)
        return ReadyPicture(
            part.url, part.param, part.data, owner=part.owner, fault=part.fault, prepared=prepared
        )

    def _document(self, part: DocumentPart) -> MessagePart:
        if part.text is None:
            raise BadDocument(part.param, part.fault or "this server does not read documents.")
        return TextPart(PARAGRAPH.join(filter(None, (part.lead, part.text))))


def _picture_tokens(part: MessagePart) -> int:
    return len(part.prepared.ids) if isinstance(part, ReadyPicture) and part.prepared else 0


def _stand_in(part: MessagePart, *, sees_pictures: bool) -> str:
    """One text whatever the reason, so that prompts keep their prefix."""
    match part:
        case PicturePart() if sees_pictures:
            return "[An image was here. It could not be shown.]"
        case PicturePart():
            return "[An image was here. This model cannot see images.]"
        case DocumentPart():
            lead = f"{part.lead}{PARAGRAPH}" if part.lead else ""
            return f"{lead}[A document was here. It could not be read as text.]"
        case OtherPart():
            return f"[{part.kind[:64]} was here. This model cannot take it.]"
        case TextPart():
            return part.text


def _join_texts(
    sent: Sequence[MessagePart], parts: Sequence[MessagePart]
) -> tuple[MessagePart, ...]:
    """Joins texts; that of a document, or one that replaces a part, is its own paragraph."""
    joined = JoinedParts()
    was_new, is_blank = False, True  # is_blank: the text being joined has no words yet
    for before, part in zip(sent, parts, strict=True):
        is_new = not isinstance(before, TextPart)
        if not (is_new or was_new):
            joined.end_text()
            is_blank = True
        has_words = isinstance(part, TextPart) and bool(part.text.strip())
        joined.add(part, between=PARAGRAPH if has_words and not is_blank else "")
        is_blank = not isinstance(part, TextPart) or (is_blank and not has_words)
        was_new = is_new
    return joined.result()
