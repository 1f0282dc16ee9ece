"""Documents of several callers, and of one who sends many: nobody learns of others, time is limited."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from firn.core.values import Chat, DocumentPart, GenerateRequest, Message, Namespace
from firn.media.documents import DocumentLimits, Documents


def asked(*texts: str) -> GenerateRequest:
    parts = tuple(
        DocumentPart(base64.b64encode(t.encode()).decode(), "text/plain", t) for t in texts
    )
    return GenerateRequest("m", Chat((Message("user", parts),)))


def gathered(documents: Documents, request: GenerateRequest, owner: str) -> list[Any]:
    got = asyncio.run(documents.gather(request, Namespace(owner)))
    assert isinstance(got.source, Chat)
    return list(got.source.messages[0].parts)


def test_a_text_is_kept_for_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that reading takes tells nobody what others have sent."""
    documents = Documents()
    read: list[bytes] = []
    text_of = documents._text

    def listening(data: bytes, media_type: str) -> str:
        read.append(data)
        return text_of(data, media_type)

    monkeypatch.setattr(documents, "_text", listening)
    for owner in ("alice", "alice", "bob", "bob"):
        (part,) = gathered(documents, asked("snow"), owner)
        assert part.text == "snow"
    assert read == [b"snow", b"snow"]


def test_a_request_reads_a_limited_number_of_documents() -> None:
    parts = gathered(Documents(DocumentLimits(count=2)), asked("a", "b", "c", "d"), "alice")
    assert [p.text for p in parts] == ["a", "b", None, None]
    assert parts[2].fault == "the document is one too many: a request may have 2."


def test_the_documents_of_a_request_share_one_time_limit() -> None:
    parts = gathered(Documents(DocumentLimits(total_s=-1)), asked("a", "b"), "alice")
    assert [p.text for p in parts] == [None, None]
    assert all("could not be read in time" in p.fault for p in parts)
