"""Files that would keep a decoder busy forever are refused before one sees them."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from firn.media import decode as decoding
from firn.media.decode import decode
from firn.media.headers import Undecodable, check
from tests.media.test_decode import chunk, colours, saved

MIB = 1 << 20


def tiff(*tags: tuple[int, int, int, int], following: int = 0, rest: bytes = b"") -> bytes:
    """A directory of (tag, type, count, value)."""
    body = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + struct.pack("<I", following) + rest


def tiled() -> bytes:
    """`colours(size=(64, 64))` in four tiles, which Pillow reads but does not write."""
    pixels, n_tags = np.asarray(colours(size=(64, 64))), 10
    corners = [(y, x) for y in (0, 32) for x in (0, 32)]
    tiles = [pixels[y : y + 32, x : x + 32].tobytes() for y, x in corners]
    at = 8 + 2 + 12 * n_tags + 4
    starts = [at + 38 + i * len(tiles[0]) for i in range(4)]
    arrays = struct.pack("<4I4I3H", *starts, *map(len, tiles), 8, 8, 8)
    tags = [(256, 4, 1, 64), (257, 4, 1, 64), (258, 3, 3, at + 32), (259, 3, 1, 1), (262, 3, 1, 2),
            (277, 3, 1, 3), (322, 4, 1, 32), (323, 4, 1, 32), (324, 4, 4, at),
            (325, 4, 4, at + 16)]  # fmt: skip
    return tiff(*tags, rest=arrays + b"".join(tiles))


def many_pages(n: int) -> bytes:
    """Directories without tags, one after the other."""
    pages = [struct.pack("<HI", 0, 8 + 6 * (i + 1) if i + 1 < n else 0) for i in range(n)]
    return b"II*\0" + struct.pack("<I", 8) + b"".join(pages)


def overlapping_tags() -> bytes:
    return tiff(*((1000 + i, 7, 4 * MIB, 100) for i in range(1000)), rest=bytes(5 * MIB))


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def jpeg(*segments: bytes, n_scans: int = 1, side: int = 8000) -> bytes:
    frame = segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    scan = segment(0xDA, b"\1\1\0\0\x3f\0") + b"\0"
    return b"\xff\xd8" + b"".join(segments) + frame + scan * n_scans + b"\xff\xd9"


def behind_an_end(*, n_scans: int = 1, n_comments: int = 1) -> bytes:
    """After the first scan come comments with a marker of the end inside; they do not end it."""
    picture, comment = jpeg(n_scans=n_scans), b"\xff\xfe\x00\x04\xff\xd9"
    at = jpeg().index(b"\xff\xd9")
    return picture[:at] + comment * n_comments + picture[at:]


def gif(*blocks: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0, 0, 0) + b"".join(blocks) + b";"


def webp_with_exif(*blobs: bytes) -> bytes:
    chunks = b"".join(b"EXIF" + struct.pack("<I", len(blob)) + blob for blob in blobs)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


PROFILE = zlib.compress(bytes(MIB))
FRAME = b"," + struct.pack("<HHHHB", 0, 0, 4, 4, 0) + b"\2" + b"\2\x8c\x2d\0"
RLE = struct.pack("<2sIII", b"BM", 0, 0, 54) + struct.pack(
    "<IiiHHIIiiII", 40, 9, 9, 1, 8, 1, *[0] * 5
)

BOMBS: dict[str, Callable[[], bytes]] = {
    "a TIFF of 800,000 pages": lambda: many_pages(800_000),
    "tags that overlap": overlapping_tags,
    "a million tags": lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 1 << 20) + bytes(100),
    "a million strips": lambda: tiff((273, 4, MIB, 50), rest=bytes(5 * MIB)),
    "a million tiles": lambda: tiff((324, 4, MIB, 50), rest=bytes(5 * MIB)),
    "one tile of 30,000 x 30,000": lambda: tiff((322, 4, 1, 30_000), (323, 4, 1, 30_000)),
    "such a tile, and another size": lambda: tiff(
        (322, 4, 1, 30_000), (322, 3, 1, 0), (323, 4, 1, 30_000)
    ),
    "a tile whose size is elsewhere": lambda: tiff((322, 16, 1, 8), (323, 4, 1, 16)),
    "a million comments": lambda: gif(*[b"!\xfe\1x\0"] * MIB, FRAME),
    "a long comment": lambda: gif(b"!\xfe" + (b"\xff" + bytes(255)) * 10_000 + b"\0", FRAME),
    "a million frames": lambda: gif(*[FRAME] * MIB),
    "a GIF of zeros": lambda: gif(bytes(MIB)),
    "empty extensions": lambda: gif(b"!\xf9\0" * MIB),
    "tiny blocks": lambda: gif(FRAME[:-4] + b"\1x" * MIB + b"\0"),
    "a million segments": lambda: jpeg(*[segment(0xE5, b"")] * MIB),
    "markers that stand alone": lambda: jpeg(b"\xff\xd0" * MIB),
    "Exif in a thousand pieces": lambda: jpeg(*[segment(0xE1, b"Exif\0\0" + bytes(99))] * 1000),
    "Exif that overlaps": lambda: jpeg(
        segment(0xE1, b"Exif\0\0" + tiff(*((i, 7, 50_000, 9) for i in range(900))) + bytes(50_000))
    ),
    "junk": lambda: b"\xff\xd8\xff\xe0\0\x02" + b"x" * MIB,
    "a thousand scans": lambda: jpeg(n_scans=1000),
    "a thousand scans behind a comment like an end": lambda: behind_an_end(n_scans=1000),
    "a million comments between scans": lambda: behind_an_end(n_comments=1_000_000),
    "a million chunks": lambda: saved(colours())[:33] + chunk(b"tEXt", b"a\0b") * 100_000,
    "two colour profiles": lambda: saved(colours())[:33] + 2 * chunk(b"iCCP", b"a\0\0" + PROFILE),
    "Exif of a PNG": lambda: saved(colours())[:33] + chunk(b"eXIf", overlapping_tags()),
    "Exif of a PNG in a thousand pieces": lambda: (
        saved(colours())[:33] + chunk(b"eXIf", tiff()) * 1000
    ),
    "Exif of a WebP": lambda: webp_with_exif(overlapping_tags()),
    "Exif of a WebP in a thousand pieces": lambda: webp_with_exif(*[tiff()] * 1000),
    "runs of a BMP": lambda: RLE + b"\1\1" * (2 * MIB),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_file_is_refused_before_decoding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(*args: Any, **options: Any) -> None:
        raise AssertionError("a decoder was asked")

    monkeypatch.setattr(decoding.Image, "open", unseen)
    with pytest.raises(Undecodable):
        decode(BOMBS[name](), max_pixels=50_000_000)


# --- what people send ----------------------------------------------------------------------


def with_exif(kind: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "A maker of cameras " * 20
    exif.get_ifd(0x8769)[0x9286] = b"a comment " * 500
    return saved(colours(size=(32, 16)), kind, exif=exif, **options)


USUAL: dict[str, Callable[[], bytes]] = {
    "an Exif JPEG": lambda: with_exif("JPEG"),
    "an Exif PNG": lambda: with_exif("PNG"),
    "an Exif WebP": lambda: with_exif("WEBP"),
    "an Exif TIFF": lambda: with_exif("TIFF"),
    "a progressive JPEG": lambda: saved(colours(size=(640, 480)), "JPEG", progressive=True),
    "a JPEG with an ICC profile": lambda: saved(
        colours(size=(64, 64)), "JPEG", icc_profile=bytes(300_000)
    ),
    "a JPEG with comments": lambda: saved(colours(size=(64, 64)), "JPEG", comment=b"x" * 60_000),
    "a deflated TIFF": lambda: saved(colours(size=(64, 64)), "TIFF", compression="tiff_deflate"),
    "a tiled TIFF": tiled,
    "a big TIFF": lambda: saved(colours(size=(64, 64)), "TIFF", big_tiff=True),
    "a GIF with a comment": lambda: saved(colours(size=(64, 64)), "GIF", comment=b"hello " * 100),
    "a PNG with texts": lambda: _png_with_texts(),
    "a BMP": lambda: saved(colours(size=(64, 64)), "BMP"),
}


def _png_with_texts() -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for i in range(200):
        info.add_text(f"key {i}", "value " * 20, zip=bool(i % 2))
    return saved(colours(size=(64, 64)), pnginfo=info)


@pytest.mark.parametrize("name", USUAL)
def test_usual_files_pass(name: str) -> None:
    data = USUAL[name]()
    check(data)
    assert decode(data, max_pixels=1_000_000).ndim == 3


def test_a_tiled_tiff_has_its_pixels() -> None:
    got = decode(tiled(), max_pixels=1_000_000)
    np.testing.assert_array_equal(got, np.asarray(colours(size=(64, 64))))


@pytest.mark.parametrize("name", USUAL)
def test_a_file_that_was_cut_raises_nothing_else(name: str) -> None:
    data = USUAL[name]()
    for end in range(0, min(len(data), 400), 3):
        with contextlib.suppress(Undecodable):
            check(data[:end])


def test_a_large_picture_may_have_the_usual_number_of_scans() -> None:
    check(jpeg(n_scans=10, side=12_000))
    with pytest.raises(Undecodable, match="17 passes"):
        check(jpeg(n_scans=20, side=12_000))


def test_pages_and_frames_are_told_by_the_structure() -> None:
    for kind in ("TIFF", "GIF"):
        check(saved(colours(), kind))
        with pytest.raises(Undecodable, match="pages"):
            check(saved(colours(), kind, save_all=True, append_images=[colours().rotate(180)]))


def test_garbage_in_place_of_exif_is_ignored() -> None:
    file = io.BytesIO()
    colours(size=(32, 16)).save(file, "JPEG")
    data = file.getvalue()
    broken = data[:2] + segment(0xE1, b"Exif\0\0" + zlib.compress(bytes(99))) + data[2:]
    assert decode(broken, max_pixels=1000).shape == (16, 32, 3)
