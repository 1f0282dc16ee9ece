"""Documents of messages, read as text: PDF and everything that is plain text.

Owner: the asyncio thread. Files are decoded on separate threads, PDFs in a separate process
(see `pdf_text`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from firn.core.fair_cache import FairCache
from firn.core.fair_pool import FairPool
from firn.core.units import MIB
from firn.core.values import Chat, DocumentPart, GenerateRequest, MessagePart, Namespace
from firn.media import base64_text, pdf_text

PDF = "application/pdf"
PDF_HEAD, PDF_HEAD_NBYTES = b"%PDF-", 1024
"""Some programs write a byte order mark or their own header before it; PDF readers accept that."""
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml")
N_THREADS = 3
"""One of them is always left to other owners."""
MAX_KEPT_CHARS = 16 * MIB


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Limits per document; count and total_s apply to all documents of one request together."""

    nbytes: int = 32 * MIB
    pages: int = 1000
    chars: int = 4 * MIB
    seconds: int = 15
    count: int = 64
    total_s: float = 60.0


class UnreadableDocument(Exception):
    """Why a document cannot be read, as the end of a sentence that begins with "the document"."""


class Documents:
    """Fills in the text of a request's documents. Caches recent ones: later turns resend them."""

    def __init__(self, limits: DocumentLimits | None = None) -> None:
        self._limits = limits or DocumentLimits()
        self._pool = FairPool(N_THREADS, name="firn-documents")
        self._kept: FairCache[bytes, str] = FairCache(MAX_KEPT_CHARS)

    @asynccontextmanager
    async def gather(
        self, request: GenerateRequest, owner: Namespace
    ) -> AsyncIterator[GenerateRequest]:
        yield await self.read(request, owner)

    async def read(
        self, request: GenerateRequest, owner: Namespace | None = None
    ) -> GenerateRequest:
        """The request with the text of each document, or with the reason why there is none.

        Texts are cached per owner, so that response times do not reveal what others have sent.
        """
        source = request.source
        if not isinstance(source, Chat) or not any(map(_is_unread, _parts(source))):
            return request
        documents = [p for p in _parts(source) if isinstance(p, DocumentPart) and _is_unread(p)]
        deadline = asyncio.get_running_loop().time() + self._limits.total_s
        filled = [self._fill(p, owner, i, deadline) for i, p in enumerate(documents)]
        read = dict(zip(map(id, documents), await asyncio.gather(*filled), strict=True))
        messages = tuple(
            replace(m, parts=tuple(read.get(id(p), p) for p in m.parts)) for m in source.messages
        )
        return replace(request, source=replace(source, messages=messages))

    async def _fill(
        self, part: DocumentPart, owner: Namespace | None, number: int, deadline: float
    ) -> DocumentPart:
        loop, name = asyncio.get_running_loop(), owner or ""
        pool = self._pool.of(name)
        try:
            if number >= self._limits.count:
                raise UnreadableDocument(
                    f"exceeds the limit of {self._limits.count} documents per request"
                )
            digest, data = await loop.run_in_executor(pool, self._bytes, part)
            text = self._kept.get(name, digest)
            if text is None:
                if loop.time() > deadline:
                    raise UnreadableDocument(
                        "could not be read in time after the others; send fewer"
                    )
                text = await loop.run_in_executor(pool, self._text, data, part.media_type)
                self._kept.put(name, digest, text, len(text))
            return replace(part, data="", text=text)
        except UnreadableDocument as e:
            return replace(part, data="", fault=f"the document {e}.")

    # --- on the pool's threads --------------------------------------------------------------------

    def _bytes(self, part: DocumentPart) -> tuple[bytes, bytes]:
        limit = self._limits.nbytes
        too_large = UnreadableDocument(f"is over the limit of {limit / MIB:g} MiB")
        if len(part.data) > base64_text.max_chars(limit):
            raise too_large
        try:
            data = base64_text.decode(part.data)
        except ValueError:
            raise UnreadableDocument("is not valid base64") from None
        if len(data) > limit:
            raise too_large
        kind = part.media_type.encode("utf-8", "replace")
        return hashlib.blake2b(data, person=b"firn-document", key=kind[:64]).digest(), data

    def _text(self, data: bytes, media_type: str) -> str:
        if data[:PDF_HEAD_NBYTES].lstrip().startswith(PDF_HEAD):
            return self._pdf(data)
        if media_type.lower() == PDF:
            if PDF_HEAD in data[:PDF_HEAD_NBYTES]:
                return self._pdf(data)
            raise UnreadableDocument("is not a PDF file")
        if not media_type.lower().startswith(TEXT_TYPES):
            raise UnreadableDocument(
                f"has the media type {media_type[:64]!r}; only PDF and text are read"
            )
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UnreadableDocument("is not UTF-8 text") from None
        limit = self._limits.chars
        return text if len(text) <= limit else f"{text[:limit]}\n\n{pdf_text.CUT}"

    def _pdf(self, data: bytes) -> str:
        limits = self._limits
        numbers = (limits.pages, limits.chars, limits.seconds)
        command = [sys.executable, "-I", str(Path(pdf_text.__file__)), *map(str, numbers)]
        try:
            done = subprocess.run(
                command, input=data, capture_output=True, timeout=limits.seconds, check=True
            )
            answer = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise UnreadableDocument(f"could not be read in {limits.seconds} seconds") from None
        except (subprocess.CalledProcessError, OSError, ValueError):
            raise UnreadableDocument("could not be read") from None
        if "text" not in answer:
            raise UnreadableDocument(f"could not be read: {answer.get('fault')}")
        return str(answer["text"])


def _parts(chat: Chat) -> list[MessagePart]:
    return [p for m in chat.messages for p in m.parts]


def _is_unread(part: MessagePart) -> bool:
    return isinstance(part, DocumentPart) and part.text is None and not part.fault
