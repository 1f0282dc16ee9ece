"""From a part of a message to a prepared picture: sources, limits, digests, what is kept."""

from __future__ import annotations

import base64
import io
import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from firn.core.errors import BadPicture
from firn.core.values import PicturePart
from firn.media.decode import Pixels
from firn.media.pictures import PictureLimits, Pictures, digest_of, read


@dataclass
class Shown:
    text: str = "<image>"
    ids: Any = field(default_factory=lambda: np.array([7]))
    inputs: Any = None
    nbytes: int = 100


class FakeProcessor:
    placeholder, inline, settings = "<image>", False, b"settings"

    def __init__(self) -> None:
        self.seen: list[Pixels] = []

    def process(self, pixels: Pixels) -> Shown:
        self.seen.append(pixels)
        if pixels.shape[0] == 1:
            raise ValueError("too\nflat")
        return Shown(inputs=pixels.shape, nbytes=100 * pixels.shape[1] // 4)


def png(size: tuple[int, int] = (4, 3), colour: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def as_url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def make_pictures(**options: Any) -> tuple[Pictures, FakeProcessor]:
    processor = FakeProcessor()
    options = {"limits": PictureLimits(nbytes=10_000, pixels=1000), **options}
    return Pictures(processor, whole=False, **options), processor


@pytest.mark.parametrize(
    "url",
    [
        as_url(png()),
        as_url(png(), "DATA:image/png;BASE64,"),
        as_url(png(), "data:;base64,"),
        as_url(png(), "data:image/png;charset=utf-8;base64,"),
        as_url(png()).rstrip("="),
        as_url(png())[:40] + "\n" + as_url(png())[40:] + "\n",
        "data:image/png;base64," + quote(base64.b64encode(png()).decode()),
        "data:image/png," + quote(png()),
    ],
    ids=range(8),
)
def test_every_form_of_a_data_url_is_read(url: str) -> None:
    assert read(PicturePart(url), max_nbytes=10_000) == png()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/etc/passwd", "neither a data URL"),
        ("file:///etc/passwd", "neither a data URL"),
        ("~/.ssh/id_rsa", "neither a data URL"),
        ("ftp://x/y", "neither a data URL"),
        ("https://example.com/a.png", "does not fetch images"),
        ("HTTP://example.com/a.png", "does not fetch images"),
        ("data:image/png;base64", "malformed"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        (as_url(b"x" * 20_000), "over the limit of"),
        (as_url(b"hello"), "is not a PNG"),
        (as_url(png((1001, 1))), "1001 x 1"),
        (as_url(png((9, 1))), "processor rejects the image: too flat"),
    ],
)
def test_faults_name_the_part(url: str, said: str) -> None:
    with pytest.raises(BadPicture, match=said) as fault:
        make_pictures()[0].prepare(PicturePart(url, param="messages[3].content[0]"))
    assert fault.value.param == "messages[3].content[0]"
    assert fault.value.message.startswith("messages[3].content[0]: ")
    assert "\n" not in fault.value.message


@pytest.mark.parametrize("line_break", ["\r\n", "%0D%0A"])
def test_line_breaks_do_not_count_towards_the_limit(line_break: str) -> None:
    lines = base64.encodebytes(b"x" * 6000).decode().replace("\n", line_break)
    part = PicturePart(f"data:image/png;base64,{lines}")
    assert read(part, max_nbytes=6000) == b"x" * 6000
    with pytest.raises(BadPicture, match="over the limit"):
        read(part, max_nbytes=5999)


@pytest.mark.parametrize("head", ["data:image/png,", "data:image/png;base64,"])
def test_escapes_take_little_more_memory_than_the_text(head: str) -> None:
    part = PicturePart(head + "%41" * 400_000)
    tracemalloc.start()
    try:
        read(part, max_nbytes=1_000_000)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 3 * len(part.url)


@given(st.text("%4aG\xe9", max_size=40))
def test_escapes_are_read_wherever_the_text_is_cut(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firn.media.pictures.UNQUOTED_CHARS", 3)
        got = read(PicturePart(f"data:,%21{text}"), max_nbytes=1000)
    assert got == b"!" + unquote_to_bytes(text)


def test_fetched_bytes_have_the_same_limit() -> None:
    part = PicturePart("https://example.com/", data=b"x" * 10_001)
    with pytest.raises(BadPicture, match="over the limit"):
        read(part, max_nbytes=10_000)


def test_a_picture_sent_again_is_not_processed_again() -> None:
    pictures, processor = make_pictures()
    first = pictures.prepare(PicturePart(as_url(png())))
    second = pictures.prepare(PicturePart(as_url(png()), param="elsewhere"))
    assert first is second
    assert len(processor.seen) == 1


def test_the_oldest_pictures_are_dropped() -> None:
    pictures, processor = make_pictures(keep_nbytes=250)
    for colour in (1, 2, 3, 1):
        pictures.prepare(PicturePart(as_url(png(colour=(colour, 0, 0)))))
    assert len(processor.seen) == 4
    pictures.prepare(PicturePart(as_url(png(colour=(3, 0, 0)))))
    assert len(processor.seen) == 4


def test_a_picture_too_large_to_keep_drops_no_other() -> None:
    pictures, processor = make_pictures(keep_nbytes=250)
    small, large = PicturePart(as_url(png())), PicturePart(as_url(png((40, 3))))
    for part in (small, large, small, large):
        pictures.prepare(part)
    assert len(processor.seen) == 3


def test_a_digest_is_of_the_pixels_not_of_the_file() -> None:
    """The same pixels in another file format, or fetched, are the same picture."""
    pictures, _ = make_pictures()
    one = pictures.prepare(PicturePart(as_url(png())))
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (1, 2, 3)).save(file, "BMP")
    assert pictures.prepare(PicturePart("https://x/", data=file.getvalue())).digest == one.digest


def test_digests_differ_in_pixels_size_and_settings() -> None:
    pixels = np.arange(36, dtype=np.uint8).reshape(4, 3, 3)
    shapes = [pixels, pixels.reshape(3, 4, 3), pixels.reshape(2, 6, 3), pixels[::-1]]
    shapes.append(pixels.transpose(1, 0, 2))
    digests = [digest_of(np.ascontiguousarray(s), b"a") for s in shapes]
    digests.append(digest_of(pixels, b"b"))
    assert len(set(digests)) == len(digests)
    assert digest_of(pixels.copy(), b"a") == digests[0]


def test_a_picture_is_kept_for_its_owner() -> None:
    """The time it takes shows whether it was sent before, so only its owner may reuse it."""
    kept, processor = make_pictures()
    nobodys = PicturePart(as_url(png()))
    mine, other = replace(nobodys, owner="alice"), replace(nobodys, owner="bob")
    first = kept.prepare(mine)
    assert kept.prepare(mine) is first
    assert len(processor.seen) == 1
    theirs = kept.prepare(other)
    assert len(processor.seen) == 2
    assert len({first.digest, theirs.digest, kept.prepare(nobodys).digest}) == 3, "features too"
