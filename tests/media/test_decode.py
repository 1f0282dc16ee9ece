"""Every kind of picture file: the right pixels, or one line that says what is wrong."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from firn.media import decode as decoding
from firn.media.decode import decode
from firn.media.headers import Undecodable

MANY = 1_000_000


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(mode: str = "RGB", size: tuple[int, int] = (4, 2)) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, (200, 20, 20))
    image.paste((20, 20, 200), (size[0] // 2, 0, size[0], size[1]))
    return image.convert(mode)


def read(data: bytes) -> np.ndarray[Any, Any]:
    return decode(data, max_pixels=MANY)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_that_keep_every_pixel(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    got = read(saved(colours(), kind, **options))
    assert got.dtype == np.uint8
    assert got.shape == (2, 4, 3)
    np.testing.assert_array_equal(got, np.asarray(colours()))


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_jpegs_decode_within_their_loss(mode: str) -> None:
    image = Image.new("RGB", (16, 16), (180, 60, 60)).convert(mode)
    got = read(saved(image, "JPEG", quality=95))
    want = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(got.astype(int) - want).max() <= 4


def test_palettes_and_single_bits_become_rgb() -> None:
    np.testing.assert_array_equal(read(saved(colours().quantize(4)))[0, 0], [200, 20, 20])
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    np.testing.assert_array_equal(read(saved(bits))[0], [[0, 0, 0], [255, 255, 255]])


def test_transparency_lies_over_white() -> None:
    image = Image.new("RGBA", (3, 1), (200, 20, 20, 255))
    image.putpixel((1, 0), (200, 20, 20, 0))
    image.putpixel((2, 0), (0, 0, 0, 51))
    np.testing.assert_array_equal(
        read(saved(image))[0], [[200, 20, 20], [255, 255, 255], [204, 204, 204]]
    )
    grey = Image.new("LA", (1, 1), (0, 0))
    np.testing.assert_array_equal(read(saved(grey))[0, 0], [255, 255, 255])


def test_a_palette_with_a_see_through_colour() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    got = read(saved(image, transparency=0))
    np.testing.assert_array_equal(got[0], [[255, 255, 255], [40, 50, 60]])


def test_what_is_under_full_transparency_does_not_matter() -> None:
    hidden = [Image.new("RGBA", (2, 2), (*rgb, 0)) for rgb in ((255, 0, 0), (0, 255, 0))]
    one, two = (read(saved(image)) for image in hidden)
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled(kind: str) -> None:
    values = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    got = read(saved(Image.fromarray(values), kind))
    np.testing.assert_array_equal(got[0, :, 0], [0, 1, 128, 255])


def test_a_large_picture_of_sixteen_bits_takes_no_numbers_of_64_bits_for_all_of_it() -> None:
    values = np.arange(4_000_000, dtype=np.uint32).reshape(2000, 2000).astype(np.uint16)
    data = saved(Image.fromarray(values), compress_level=1)
    tracemalloc.start()
    try:
        got = decode(data, max_pixels=values.size)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(got[:, :, 0], (values / 257.0).round())
    assert peak_nbytes < 20 * values.size


MEASURE = """
import sys
from firn.media import decode as decoding
from firn.media.decode import decode
def nbytes():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
data = sys.stdin.buffer.read()
decode(SMALL, max_pixels=1)
before = nbytes()
decode(data, max_pixels=10**8)
print(nbytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_a_large_picture_takes_no_memory_for_the_forms_in_between(mode: str) -> None:
    """4 bytes a pixel in Pillow, and 3 in the result."""
    size = (4000, 4000)
    data = saved(Image.new(mode, size), compress_level=1)
    program = MEASURE.replace("SMALL", repr(saved(Image.new(mode, (1, 1)))))
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10 * size[0] * size[1]


def test_a_picture_of_many_bands_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BAND_PIXELS", 30)
    values = np.arange(11 * 13 * 4, dtype=np.uint16).astype(np.uint8).reshape(13, 11, 4)
    rgba = Image.fromarray(values)
    over_white = Image.alpha_composite(Image.new("RGBA", rgba.size, (255,) * 4), rgba)
    np.testing.assert_array_equal(read(saved(rgba)), np.asarray(over_white.convert("RGB")))
    wide = np.arange(11 * 13, dtype=np.uint16).reshape(13, 11) * 257
    np.testing.assert_array_equal(read(saved(Image.fromarray(wide)))[:, :, 1], wide // 257)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_cameras_picture_is_upright(orientation: int) -> None:
    """All eight ways to hold a camera show the same picture."""
    upright = np.zeros((24, 16, 3), dtype=np.uint8)
    upright[:12, :8] = (255, 0, 0)
    turns = {
        1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
        5: lambda a: np.transpose(a, (1, 0, 2)), 6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(np.transpose(a, (1, 0, 2)), 2), 8: lambda a: np.rot90(a, -1),
    }  # fmt: skip
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = read(saved(stored, "PNG", exif=exif))
    np.testing.assert_array_equal(got, upright)


def test_metadata_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture may have megabytes of it, which Pillow would search and replace at once."""

    def unused(*args: Any, **options: Any) -> str:
        raise AssertionError("metadata was rewritten")

    turned = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'
    data = saved(colours(size=(6, 2)))
    data = data[:33] + chunk(b"iTXt", turned) + data[33:]
    with monkeypatch.context() as patched:
        patched.setattr(re, "sub", unused)
        pixels = read(data)
    assert pixels.shape == (6, 2, 3)


def test_a_camera_with_two_views_shows_the_first() -> None:
    first, second = Image.new("RGB", (16, 16), (250, 0, 0)), Image.new("RGB", (16, 16))
    got = read(saved(first, "MPO", save_all=True, append_images=[second], quality=95))
    assert got[0, 0, 0] > 240


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def huge_png(width: int, height: int) -> bytes:
    """A few bytes that claim many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 64)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


PNG = saved(colours(size=(40, 30)))
FAULTS = {
    "nothing": (b"", "is not a PNG"),
    "a text": (b"hello, this is no picture", "is not a PNG"),
    "a web page": (b"<!doctype html><html></html>", "is not a PNG"),
    "a drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a PNG"),
    "cut off": (PNG[:60], "is damaged"),
    "a flipped byte": (PNG[:50] + bytes([PNG[50] ^ 255]) + PNG[51:], "is damaged"),
    "a bomb": (huge_png(60_000, 60_000), "pixels"),
    "too many pixels": (saved(Image.new("1", (1001, 1000))), "1001 x 1000"),
    "a row without end": (huge_png(100_000, 1), "no side may be over 65535"),
    "rows without end": (huge_png(1, 100_000), "no side may be over 65535"),
    "animated": (
        saved(colours(), "GIF", save_all=True, append_images=[colours().rotate(180)]),
        "animated",
    ),
    "animated too": (
        saved(colours(), "WEBP", save_all=True, append_images=[colours().rotate(180)]),
        "animated",
    ),
    "pages": (saved(colours(), "TIFF", save_all=True, append_images=[colours()]), "pages"),
    "floating point": (saved(Image.new("F", (2, 2), 0.5), "TIFF"), "not supported"),
    "32 bits": (saved(Image.fromarray(np.array([[1 << 20]], dtype=np.int32)), "TIFF"), "16 bits"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named(what: str) -> None:
    data, said = FAULTS[what]
    with pytest.raises(Undecodable, match=said) as fault:
        read(data)
    assert "\n" not in str(fault.value)
    assert "0x" not in str(fault.value)


KINDS = ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"]


def check_damaged(data: bytes) -> None:
    try:
        got = decode(data, max_pixels=10_000)
    except Undecodable:
        return
    assert got.ndim == 3
    assert got.shape[2] == 3


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@given(
    kind=st.sampled_from(KINDS),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4),
    n_cut=st.integers(0, 4000),
)
def test_a_damaged_file_gives_pixels_or_undecodable(
    kind: str, changes: list[tuple[int, int]], n_cut: int
) -> None:
    """Any cut and any change of bytes."""
    file = bytearray(saved(colours(size=(8, 8)), kind))
    for at, value in changes:
        file[at % len(file)] = value
    check_damaged(bytes(file[: len(file) - n_cut % len(file)]))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_one_wrong_byte_gives_pixels_or_undecodable(kind: str) -> None:
    whole = saved(colours(size=(8, 8)), kind)
    for at in range(0, len(whole), max(len(whole) // 100, 1)):
        for value in (0, 255, whole[at] ^ 1):
            check_damaged(whole[:at] + bytes([value]) + whole[at + 1 :])
        check_damaged(whole[:at])
