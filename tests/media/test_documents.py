"""Documents as text: PDF and plain text, within limits, in a process that can be killed."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firn.core.values import (
    Chat,
    DocumentPart,
    GenerateRequest,
    Message,
    PicturePart,
    RawText,
    TextPart,
)
from firn.media import pdf_text
from firn.media.documents import DocumentLimits, Documents


def pdf(*pages: str) -> bytes:
    """A small PDF file, one page for each text."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b""
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources "
            b"<< /Font << /F1 3 0 R >> >> /Contents " + f"{5 + 2 * i} 0 R >>".encode()
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n".encode() + drawn + b"\nendstream")
    out = io.BytesIO()
    out.write(b"%PDF-1.4\n")
    places = []
    for i, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(f"{i} 0 obj\n".encode() + body + b"\nendobj\n")
    start = out.tell()
    out.write(f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode())
    for at in places:
        out.write(f"{at:010} 00000 n \n".encode())
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R >>"
    out.write(f"trailer\n{trailer}\nstartxref\n{start}\n%%EOF\n".encode())
    return out.getvalue()


def document(data: bytes, media_type: str = "application/pdf", **more: Any) -> DocumentPart:
    return DocumentPart(base64.b64encode(data).decode(), media_type, **more)


def read(*parts: Any, limits: DocumentLimits | None = None) -> list[Any]:
    documents = Documents(limits)
    request = GenerateRequest("m", Chat((Message("user", parts),)))
    got = asyncio.run(documents.read(request))
    assert isinstance(got.source, Chat)
    return list(got.source.messages[0].parts)


def test_a_pdf_is_read_page_by_page() -> None:
    (part,) = read(document(pdf("Snow that stays.", "", "Firn."), lead="notes.pdf"))
    assert part.text == "Snow that stays.\n\nFirn."
    assert (part.data, part.lead, part.fault) == ("", "notes.pdf", "")


@pytest.mark.parametrize(
    "before", [b"\xef\xbb\xbf", b"\r\n", b"\x1b%-12345X@PJL ENTER LANGUAGE=PDF\r\n"]
)
def test_a_pdf_may_have_something_before_its_header(before: bytes) -> None:
    assert read(document(before + pdf("Firn.")))[0].text == "Firn."


def test_a_text_about_pdf_files_is_text() -> None:
    assert (
        read(document(b"It begins with %PDF-1.4", "text/plain"))[0].text
        == "It begins with %PDF-1.4"
    )


def test_base64_may_lack_its_padding_and_have_line_breaks() -> None:
    assert read(DocumentPart("RmlybiE", "text/plain"))[0].text == "Firn!"
    assert read(DocumentPart("Rmly\nbiE=\n", "text/plain"))[0].text == "Firn!"


def test_line_breaks_do_not_count_towards_the_limit() -> None:
    sent = base64.encodebytes(b"x" * 6000).replace(b"\n", b"\r\n").decode()
    part = DocumentPart(sent, "text/plain")
    assert read(part, limits=DocumentLimits(nbytes=6000))[0].text == "x" * 6000
    assert "over the limit" in read(part, limits=DocumentLimits(nbytes=5999))[0].fault


def test_plain_text_is_decoded() -> None:
    (part,) = read(document("\ufeffGrüße".encode(), "text/markdown"))
    assert part.text == "Grüße"


def test_other_parts_stay_as_they_are() -> None:
    parts = (TextPart("a"), PicturePart("data:,x"))
    assert read(*parts) == list(parts)
    raw = GenerateRequest("m", RawText("x"))
    assert asyncio.run(Documents().read(raw)) is raw


UNREADABLE = {
    "not a PDF": (document(b"hello"), "is not a PDF file"),
    "scanned": (document(pdf("")), "contains no text, only pictures"),
    "broken": (document(b"%PDF-1.4\n" + b"\x00" * 100), "could not be read"),
    "cut": (document(pdf("x")[:200]), "could not be read"),
    "base64": (DocumentPart("!!!", "application/pdf"), "not valid base64"),
    "kind": (document(b"PK\x03\x04", "application/zip"), "application/zip"),
    "not UTF-8": (document(b"\xff\xfe\xff", "text/plain"), "not UTF-8 text"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_document_says_why(case: str) -> None:
    sent, why = UNREADABLE[case]
    (part,) = read(sent)
    assert part.text is None
    assert why in part.fault
    assert part.fault.startswith("the document ")


def test_documents_are_read_up_to_their_limits() -> None:
    small = DocumentLimits(nbytes=10)
    assert "over the limit" in read(document(b"x" * 20, "text/plain"), limits=small)[0].fault
    pages = DocumentLimits(pages=2)
    (part,) = read(document(pdf("a", "b", "c")), limits=pages)
    assert part.text == "a\n\nb\n\n[Of 3 pages, 2 were read.]"
    chars = DocumentLimits(chars=3)
    cut = "abc\n\n[The document is longer; its text was cut here.]"
    assert read(document(b"abcdef", "text/plain"), limits=chars)[0].text == cut
    assert read(document(b"abc", "text/plain"), limits=chars)[0].text == "abc"
    assert read(document(pdf("abcdef", "g")), limits=chars)[0].text == cut
    assert read(document(pdf("abcdef")), limits=chars)[0].text == cut
    assert read(document(pdf("abc")), limits=chars)[0].text == "abc"


def test_a_file_that_takes_too_long_is_given_up() -> None:
    (part,) = read(document(pdf("x")), limits=DocumentLimits(seconds=0))
    assert "could not be read in 0 seconds" in part.fault


def test_a_text_is_kept_for_the_turns_to_come() -> None:
    documents = Documents()
    part = document(pdf("Once."))
    request = GenerateRequest("m", Chat((Message("user", (part, replace(part, lead="again"))),)))

    async def twice() -> list[str | None]:
        texts = []
        for _ in range(2):
            got = await documents.read(request)
            assert isinstance(got.source, Chat)
            texts += [p.text for p in got.source.messages[0].parts if isinstance(p, DocumentPart)]
            assert await documents.read(got) is got
        return texts

    assert asyncio.run(twice()) == ["Once."] * 4
    assert len(documents._kept) == 1


def test_a_pdf_is_read_in_the_time_that_others_leave() -> None:
    program = "import os, pdf_text; pdf_text._limit(5); print(os.nice(0))"
    folder = Path(pdf_text.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True)
    assert int(done.stdout) >= pdf_text.NICENESS
