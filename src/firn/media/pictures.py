"""Prepares a message's picture for the prompt: reads, decodes, digests and preprocesses it.

The digest covers the decoded pixels with their size, the processor's settings and the owner: what the
model sees and who sent it, not the file format.

Called on several threads of the tokenize pool.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from firn.core.errors import BadPicture
from firn.core.fair_cache import FairCache
from firn.core.units import MIB
from firn.core.values import PicturePart, PreparedPicture, TokenArray
from firn.media import base64_text
from firn.media.decode import Pixels, decode
from firn.media.headers import Undecodable, one_line

UNQUOTED_CHARS = 1 << 14
_DATA_URL = re.compile(r"data:(?P<kind>[^,]*?)(?P<base64>;\s*base64)?\s*,", re.IGNORECASE)


class Processed(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def ids(self) -> TokenArray: ...

    @property
    def inputs(self) -> Any: ...

    @property
    def nbytes(self) -> int: ...


class Processor(Protocol):
    """The model's part of the work; `firn.models.vision.processor.VisionProcessor` implements it."""

    placeholder: str
    inline: bool
    settings: bytes

    def process(self, pixels: Pixels) -> Processed:
        """May raise any exception for a picture that it cannot process."""
        ...


@dataclass(frozen=True, slots=True)
class PictureLimits:
    nbytes: int = 20 * MIB
    pixels: int = 50_000_000


class Pictures:
    """Implements core.ports.Pictures. Caches recent pictures: later turns send them again."""

    def __init__(
        self,
        processor: Processor,
        *,
        whole: bool,
        limits: PictureLimits,
        keep_nbytes: int = 128 * MIB,
    ) -> None:
        self.placeholder = processor.placeholder
        self.inline = processor.inline
        self.whole = whole
        self._processor = processor
        self._limits = limits
        self._kept: FairCache[bytes, PreparedPicture] = FairCache(keep_nbytes)

    def prepare(self, part: PicturePart) -> PreparedPicture:
        data = read(part, max_nbytes=self._limits.nbytes)
        key = hashlib.blake2b(data, digest_size=32).digest()
        known = self._kept.get(part.owner, key)
        if known is not None:
            return known
        try:
            pixels = decode(data, max_pixels=self._limits.pixels)
        except Undecodable as e:
            raise BadPicture(part.param, f"the image {e}.") from e
        try:
            processed = self._processor.process(pixels)
        except Exception as e:  # any processor of mlx-vlm or transformers may run here
            why = f"the model's processor rejects the image: {one_line(e)}"
            raise BadPicture(part.param, why) from e
        digest = digest_of(pixels, self._processor.settings, owner=part.owner)
        prepared = PreparedPicture(digest, processed.text, processed.ids, processed.inputs)
        self._kept.put(part.owner, key, prepared, processed.nbytes)
        return prepared


def digest_of(pixels: Pixels, settings: bytes, *, owner: str = "") -> bytes:
    """The picture's identity. Each field is preceded by its length: fields cannot run together.

    The vision tower's features are cached by this digest: owners share none, even for the same
    picture.
    """
    height, width, _ = pixels.shape
    digest = hashlib.blake2b(digest_size=32, person=b"firn-image")
    owner_field = (owner.encode(),) if owner else ()
    content = np.ascontiguousarray(pixels).data.cast("B")  # not a copy of a large picture
    for field in (settings, b"RGB", f"{width}x{height}".encode(), content, *owner_field):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def read(part: PicturePart, *, max_nbytes: int) -> bytes:
    """The file's bytes. Raises BadPicture."""
    if part.fault:
        raise BadPicture(part.param, part.fault)
    if part.data is not None:
        data = part.data
    elif part.url[:5].lower() == "data:":
        data = _from_data_url(part, max_nbytes)
    elif part.url[:8].lower().startswith(("http://", "https://")):
        raise BadPicture(
            part.param,
            "this server does not fetch images; send a data URL (see --allow-image-urls).",
        )
    else:
        raise BadPicture(part.param, "the image is neither a data URL nor an https address.")
    if len(data) > max_nbytes:
        raise _too_large(part, max_nbytes)
    if not data:
        raise BadPicture(part.param, "the image is empty.")
    return data


def _from_data_url(part: PicturePart, max_nbytes: int) -> bytes:
    head = _DATA_URL.match(part.url[:256])
    if head is None:
        raise BadPicture(part.param, "the data URL is malformed.")
    if len(part.url) - head.end() > base64_text.max_chars(max_nbytes):
        raise _too_large(part, max_nbytes)
    body = part.url[head.end() :]
    if "%" in body:
        body = _unquote(body)
    if not head["base64"]:
        return body.encode("latin-1", "replace")
    try:
        return base64_text.decode(body)
    except ValueError as e:
        raise BadPicture(part.param, "the data URL is not valid base64.") from e


def _unquote(text: str) -> str:
    """The text with its escapes decoded, each byte as a character.

    In slices, because `unquote_to_bytes` makes an object of every escape: for a data URL of 27 MiB
    these take 2 GiB.
    """
    data = bytearray()
    start = 0
    while start < len(text):
        end = start + UNQUOTED_CHARS
        if end < len(text):
            cut = text.rfind("%", end - 2, end)  # an escape that the slice would cut
            end = cut if cut >= 0 else end
        data += urllib.parse.unquote_to_bytes(text[start:end])
        start = end
    return data.decode("latin-1")


def _too_large(part: PicturePart, max_nbytes: int) -> BadPicture:
    return BadPicture(part.param, f"the image is over the limit of {max_nbytes / MIB:g} MiB.")
