"""Checks a picture file's structure before it is decoded: in linear time, with limits. Pure.

A file of a few megabytes can have a million pages, tags that each claim the whole file, a thousand
passes over every pixel, or ten thousand colour profiles, and a decoder would process all of it.
Files that no camera or program would write are refused here. Damaged files are left to the decoder,
whose message is more specific.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator

from firn.core.units import MIB

SEVERAL_PICTURES = "is animated or has several pages; send one of them"
MAX_CHARS = 200


MAX_TAGS = 1024
MAX_STRIPS = 100_000
MAX_TILE_PIXELS = 1 << 24
"""A decoder has memory for a whole tile, however small the picture is."""
MAX_SEGMENTS = 4096
MAX_EXIF_SEGMENTS = 8
MAX_JUNK_NBYTES = 4096
MAX_CHUNKS = 50_000
MAX_BLOCKS = 400_000
MAX_COMMENT_NBYTES = MIB
MAX_RUNS_NBYTES = 2 * MIB
MAX_SCANNED_PIXELS = 1_000_000_000
MIN_SCANS = 16
TAG_NBYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4,
              16: 8, 17: 8, 18: 8}  # fmt: skip
STRIP_OFFSETS, TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS = 273, 322, 323, 324
INTEGERS = {3: "H", 4: "I"}
"""The types in which programs write a tile's sides. A decoder would take others, too."""
TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"MM*\0", b"II\0*")
EXIF = b"Exif\0\0"
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd8]")
"""A JPEG marker in or after a scan, but not a restart."""
TOO_MANY_BLOCKS = "has too many blocks for a picture"
TOO_MANY_EXIF = "has Exif data in too many pieces for a picture"


class Undecodable(Exception):
    """What is wrong with the picture, as the end of a sentence that begins with "the image"."""


def one_line(error: BaseException) -> str:
    """The error's message on one line; the name of its class if it has no message."""
    return " ".join(str(error).split())[:MAX_CHARS] or type(error).__name__


def check(data: bytes) -> None:
    """Raises Undecodable for a file that must not reach a decoder."""
    with contextlib.suppress(struct.error, IndexError):  # truncated: the decoder will report it
        if data[:4] in TIFF_HEADS:
            if _check_tags(data):
                raise Undecodable(SEVERAL_PICTURES)
        elif data[:3] == b"\xff\xd8\xff":
            _check_jpeg(data)
        elif data[:6] in (b"GIF87a", b"GIF89a"):
            _check_gif(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            _check_chunks(_png_chunks(data))
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            _check_chunks(_riff_chunks(data))
        elif data[:2] == b"BM":
            _check_bmp(data)


def _check_tags(data: bytes) -> int:
    """Checks the first directory of a TIFF file or Exif data. Returns the next one's offset."""
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in (data[2], data[3])
    if big:
        (at,) = struct.unpack_from(f"{order}Q", data, 8)
        (n_tags,) = struct.unpack_from(f"{order}Q", data, at)
        head, entry, link = 8, struct.Struct(f"{order}HHQ8s"), f"{order}Q"
    else:
        (at,) = struct.unpack_from(f"{order}I", data, 4)
        (n_tags,) = struct.unpack_from(f"{order}H", data, at)
        head, entry, link = 2, struct.Struct(f"{order}HHI4s"), f"{order}I"
    if n_tags > MAX_TAGS:
        raise Undecodable("has too many tags for a picture")
    nbytes, sides = 0, {TILE_WIDTH: 0, TILE_HEIGHT: 0}
    for i in range(n_tags):
        tag, kind, count, value = entry.unpack_from(data, at + head + i * entry.size)
        nbytes += count * TAG_NBYTES.get(kind, 0)
        if tag in sides:
            if kind not in INTEGERS:
                raise Undecodable("has tiles without a proper size")
            (side,) = struct.unpack_from(f"{order}{INTEGERS[kind]}", value)
            sides[tag] = max(sides[tag], side)  # a tag may occur twice
        if tag in (STRIP_OFFSETS, TILE_OFFSETS) and count > MAX_STRIPS:
            raise Undecodable("is divided into too many strips or tiles")
    if sides[TILE_WIDTH] * sides[TILE_HEIGHT] > MAX_TILE_PIXELS:
        raise Undecodable("is divided into tiles that are too large")
    if nbytes > 2 * len(data):
        raise Undecodable("has tags larger than the file itself")
    (following,) = struct.unpack_from(link, data, at + head + n_tags * entry.size)
    return int(following)


def _check_exif(blob: bytes) -> None:
    blob = blob.removeprefix(EXIF)
    with contextlib.suppress(struct.error, IndexError):  # truncated: it is never read
        if blob[:4] in TIFF_HEADS:
            _check_tags(blob)


def _check_jpeg(data: bytes) -> None:
    at, n_junk, n_exif, n_pixels = 2, 0, 0, 0
    for _ in range(MAX_SEGMENTS):
        while data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at += 1
            n_junk += 1
            if n_junk > MAX_JUNK_NBYTES:
                raise Undecodable("is damaged: there is no JPEG marker where one should be")
        marker = data[at + 1]
        if marker == 0xDA:
            _check_scans(data, at, n_pixels)
            return
        if marker == 0x01 or 0xD0 <= marker <= 0xD9:  # markers without a length
            at += 2
            continue
        (n,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xE1 and data[at + 4 : at + 10] == EXIF:
            n_exif += 1
            _check_exif(data[at + 4 : at + 2 + n])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            n_pixels = height * width
        if n_exif > MAX_EXIF_SEGMENTS:
            raise Undecodable(TOO_MANY_EXIF)
        at += 2 + max(n, 2)
    raise Undecodable("has too many segments for a picture")


def _check_scans(data: bytes, first: int, n_pixels: int) -> None:
    """Limits the scans of a progressive picture: each is a pass over all of its pixels.

    Follows the segments, as a decoder does: a comment may contain what looks like the end.
    """
    at, n_scans = first, 0
    for _ in range(MAX_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[0] == b"\xff\xd9":
            return
        if marker[0] == b"\xff\xda":
            n_scans += 1
            if n_scans > MIN_SCANS and n_scans * n_pixels > MAX_SCANNED_PIXELS:
                raise Undecodable(
                    f"is written in at least {n_scans} passes over its pixels; save it without them"
                )
        at = marker.end()
        if marker[0] != b"\xff\x01":  # the only one that has no length
            (n,) = struct.unpack_from(">H", data, at)
            at += max(n, 2)
    raise Undecodable("has too many segments for a picture")


def _check_gif(data: bytes) -> None:
    at = 13 + _palette_nbytes(data[10])
    n_blocks = n_comment = n_images = 0
    while at < len(data) and data[at] != 0x3B:
        kind = data[at]
        n_blocks += 1
        if n_blocks > MAX_BLOCKS:
            raise Undecodable(TOO_MANY_BLOCKS)
        if kind == 0x2C:
            n_images += 1
            if n_images > 1:
                raise Undecodable(SEVERAL_PICTURES)
            at += 11 + _palette_nbytes(data[at + 9])
        elif kind == 0x21:
            at += 2
        else:
            at += 1
            continue
        is_comment = kind == 0x21 and data[at - 1] == 0xFE
        while data[at]:
            n_comment += data[at] if is_comment else 0
            n_blocks += 1
            at += 1 + data[at]
            if n_blocks > MAX_BLOCKS or n_comment > MAX_COMMENT_NBYTES:
                raise Undecodable(TOO_MANY_BLOCKS)
        at += 1


def _check_bmp(data: bytes) -> None:
    """Limits run-length encoding: Pillow decodes the runs one by one, in Python."""
    (n_head,) = struct.unpack_from("<I", data, 14)
    (compression,) = struct.unpack_from("<I", data, 30)
    if n_head >= 40 and compression in (1, 2) and len(data) > MAX_RUNS_NBYTES:
        raise Undecodable("is a large BMP with run-length encoding; send it as PNG")


def _palette_nbytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _check_chunks(chunks: Iterator[tuple[bytes, bytes]]) -> None:
    n_exif = n_profiles = 0
    for i, (kind, blob) in enumerate(chunks):
        if i > MAX_CHUNKS:
            raise Undecodable("has too many chunks for a picture")
        n_profiles += kind == b"iCCP"
        if n_profiles > 1:  # a decoder would inflate each of them
            raise Undecodable("has several colour profiles")
        if kind in (b"eXIf", b"EXIF"):
            n_exif += 1
            _check_exif(blob)
        if n_exif > MAX_EXIF_SEGMENTS:
            raise Undecodable(TOO_MANY_EXIF)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 8 <= len(data):
        n, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at + 8 : at + 8 + n] if kind == b"eXIf" else b""
        at += 12 + n


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12
    while at + 8 <= len(data):
        kind, n = struct.unpack_from("<4sI", data, at)
        yield kind, data[at + 8 : at + 8 + n] if kind == b"EXIF" else b""
        at += 8 + n + n % 2
