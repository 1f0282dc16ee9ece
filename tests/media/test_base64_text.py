"""Base64 with line breaks and without padding is decoded; anything else is refused."""

from __future__ import annotations

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.media.base64_text import decode, max_chars


@given(st.binary(), st.integers(16, 80), st.sampled_from(["", "\n", "\r\n", " \t"]), st.booleans())
def test_line_breaks_and_padding_may_be_anything(
    data: bytes, width: int, between: str, padded: bool
) -> None:
    text = base64.b64encode(data).decode()
    text = text if padded else text.rstrip("=")
    lines = [text[i : i + width] for i in range(0, len(text), width)]
    sent = "".join(line + between for line in lines)
    assert decode(sent) == data
    assert len(sent) <= max_chars(len(data))


@pytest.mark.parametrize("text", ["!!!!", "QQ==QQ==", "A", "\u00fcAAA", "\ud800AAA", "QUJD\u2028"])
def test_anything_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|ascii|data after padding"):
        decode(text)


def test_short_lines_take_no_more_memory_than_long_ones() -> None:
    text = "AA\n" * 100_000
    tracemalloc.start()
    try:
        decode(text)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 4 * len(text)
