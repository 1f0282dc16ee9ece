"""Documents of several callers, and many of one: callers learn nothing of each other, and time is
limited."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from firn.core.values import Chat, DocumentPart, GenerateRequest, Message, Namespace
from firn.media import documents as module
from firn.media.documents import DocumentLimits, Documents


def asked(*texts: str) -> GenerateRequest:
    parts = tuple(
        DocumentPart(base64.b64encode(t.encode()).decode(), "text/plain", t) for t in texts
    )
    return GenerateRequest("m", Chat((Message("user", parts),)))


def only_part(request: GenerateRequest) -> DocumentPart:
    assert isinstance(request.source, Chat)
    (part,) = request.source.messages[0].parts
    assert isinstance(part, DocumentPart)
    return part


def gathered(documents: Documents, request: GenerateRequest, owner: str) -> list[Any]:
    got = asyncio.run(documents.read(request, Namespace(owner)))
    assert isinstance(got.source, Chat)
    return list(got.source.messages[0].parts)


class Listening(Documents):
    """Records what it had to read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def _text(self, data: bytes, media_type: str) -> str:
        self.seen.append(data)
        return super()._text(data, media_type)


def test_a_text_is_kept_for_its_owner() -> None:
    """The time that reading takes reveals nothing about what others have sent."""
    documents = Listening()
    for owner in ("alice", "alice", "bob", "bob"):
        (part,) = gathered(documents, asked("snow"), owner)
        assert part.text == "snow"
    assert documents.seen == [b"snow", b"snow"]


def test_the_texts_that_were_used_least_recently_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_CHARS", 10)
    documents = Listening()
    for text in ("first", "later", "first", "other", "first", "later"):
        gathered(documents, asked(text), "alice")
    assert documents.seen == [b"first", b"later", b"other", b"later"]


def test_the_same_bytes_of_another_type_are_another_document() -> None:
    documents = Documents()
    assert gathered(documents, asked("snow"), "alice")[0].text == "snow"
    zipped = replace(only_part(asked("snow")), media_type="application/zip")
    request = GenerateRequest("m", Chat((Message("user", (zipped,)),)))
    (part,) = gathered(documents, request, "alice")
    assert (part.text, "application/zip" in part.fault) == (None, True)


def test_a_request_reads_a_limited_number_of_documents() -> None:
    parts = gathered(Documents(DocumentLimits(count=2)), asked("a", "b", "c", "d"), "alice")
    assert [p.text for p in parts] == ["a", "b", None, None]
    assert parts[2].fault == "the document exceeds the limit of 2 documents per request."


def test_the_documents_of_a_request_share_one_time_limit() -> None:
    parts = gathered(Documents(DocumentLimits(total_s=-1)), asked("a", "b"), "alice")
    assert [p.text for p in parts] == [None, None]
    assert all("could not be read in time" in p.fault for p in parts)
