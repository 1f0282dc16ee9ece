"""Parts that a model does not accept become text, unless a user has just sent them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from firn.core.errors import BadDocument, BadPart, BadPicture, ContextTooLong
from firn.core.values import (
    Chat,
    DocumentPart,
    Message,
    OtherPart,
    PicturePart,
    PreparedPicture,
    TextPart,
)
from firn.text.prompt.message_parts import MAX_PICTURES, PartReader
from firn.text.prompt.picture_spans import ReadyPicture

SEEN, BROKEN = PicturePart("data:ok", "messages[0]"), PicturePart("data:broken", "messages[0]")
SOUND = OtherPart("input_audio", "messages[0].content[0].type")
PAPER = DocumentPart("", "application/pdf", "notes.pdf", "messages[0]", text="Firn is old snow.")
SEALED = DocumentPart("", "application/pdf", "", "messages[0]", fault="the document is encrypted.")
NO_VISION, UNSHOWN = (
    "[An image was here. This model cannot see images.]",
    "[An image was here. It could not be shown.]",
)


class FakePictures:
    placeholder, inline, whole = "<image>", False, False

    def prepare(self, part: PicturePart) -> PreparedPicture:
        if "broken" in part.url:
            raise BadPicture(part.param, "the image is broken.")
        return PreparedPicture(b"", "<image>", np.array([1]), None)


def message(*parts: Any, role: Any = "tool") -> Message:
    return Message(role, parts)


def only(reader: PartReader, *parts: Any, **more: Any) -> tuple[Any, ...]:
    return reader.read([message(*parts, **more)], newest=-1).messages[0].parts


def test_a_model_without_vision_gets_a_text_in_place_of_a_picture() -> None:
    read = PartReader().read([message(TextPart("see"), SEEN, TextPart("that"))], newest=-1)
    (part,) = read.messages[0].parts
    assert part == TextPart(f"see\n\n{NO_VISION}\n\nthat")
    note = "messages[0]: this model does not accept images. It was replaced by a short text."
    assert read.notes == (note,)


def test_pictures_are_prepared_or_replaced_by_a_text() -> None:
    reader = PartReader(FakePictures())
    (ready,) = only(reader, SEEN)
    assert isinstance(ready, ReadyPicture)
    assert only(reader, BROKEN) == (TextPart(UNSHOWN),)
    assert only(PartReader(FakePictures(), in_results=False), SEEN) == (TextPart(UNSHOWN),)
    assert isinstance(
        only(PartReader(FakePictures(), in_results=False), SEEN, role="user")[0], ReadyPicture
    )
    many = only(reader, *[SEEN] * (MAX_PICTURES + 2))
    assert [isinstance(p, ReadyPicture) for p in many] == [True] * MAX_PICTURES + [False]


def test_documents_become_text_and_other_parts_a_note() -> None:
    assert only(PartReader(), SOUND) == (
        TextPart("[input_audio was here. This model cannot take it.]"),
    )
    assert only(PartReader(), PAPER) == (TextPart("notes.pdf\n\nFirn is old snow."),)
    assert only(PartReader(), SEALED) == (
        TextPart("[A document was here. It could not be read as text.]"),
    )


def test_texts_are_left_alone() -> None:
    parts = (TextPart("a"), TextPart("b"))
    assert only(PartReader(), *parts) == parts
    assert only(PartReader(FakePictures()), *parts, SEEN, *parts)[:2] == parts


@pytest.mark.parametrize(
    ("part", "kind"), [(SEEN, BadPicture), (SOUND, BadPart), (SEALED, BadDocument)]
)
def test_what_a_user_has_just_sent_is_refused(part: Any, kind: type[BadPart]) -> None:
    with pytest.raises(kind) as caught:
        PartReader().read([message(part, role="user")], newest=0)
    assert caught.value.param == part.param
    assert caught.value.status == 400


def chat_of(*roles: str) -> Chat:
    made = [Message(r.removesuffix("+"), aside=r.endswith("+")) for r in roles]  # type: ignore[arg-type]
    return Chat(tuple(made))


@pytest.mark.parametrize(
    ("roles", "newest"),
    [
        (("user",), 0),
        (("system", "user"), 1),
        (("user", "assistant", "user", "system"), 2),
        (("user", "user"), 1),
        (("user", "assistant"), -1),
        (("user", "assistant", "tool"), -1),
        (("user", "assistant", "tool", "user"), -1),
        (("user", "assistant", "tool", "user+"), -1),
        (("user", "assistant", "user", "user+"), 2),
        ((), -1),
    ],
)
def test_which_message_is_a_users_newest(roles: tuple[str, ...], newest: int) -> None:
    """A message sent along with a tool's result comes from an agent, not from a user."""
    assert chat_of(*roles).newest == newest


@pytest.mark.parametrize("newest", [0, 1])
def test_pictures_that_take_too_long_are_refused_wherever_they_are(newest: int) -> None:
    """As a text in their place, they would make another prompt of the same chat."""
    messages = [Message("user", (SEEN,)), Message("user", (TextPart("And now?"),))]
    with pytest.raises(BadPicture, match="took too long"):
        PartReader(FakePictures(), pictures_s=-1.0).read(messages, newest=newest)
    PartReader(FakePictures(), pictures_s=-1.0).read(messages[1:], newest=0)


def test_pictures_that_do_not_fit_are_refused_before_the_rest_is_prepared() -> None:
    class Counted(FakePictures):
        n = 0

        def prepare(self, part: PicturePart) -> PreparedPicture:
            self.n += 1
            return super().prepare(part)

    pictures = Counted()
    with pytest.raises(ContextTooLong) as fault:
        PartReader(pictures, max_tokens=10).read([message(*[SEEN] * 100)], newest=0)
    assert pictures.n == 11
    assert (fault.value.n_prompt, fault.value.limit) == (100, 10)
    assert len(only(PartReader(pictures, max_tokens=10), *[SEEN] * 10)) == 10
