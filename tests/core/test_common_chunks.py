"""Chunks of common shapes: few of them, and nothing is read twice or left out."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firn.core.common_chunks import common_end


@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [
        (0, 20, 16),  # the rest is padded
        (0, 16, 16),
        (0, 8, 8),
        (0, 5, 5),
        (16, 40, 40),
        (5, 13, 13),  # short ones are padded wherever they begin
        (5, 14, 8),  # long ones end at the next multiple first
        (5, 40, 8),
    ],
)
def test_where_chunks_end(start: int, end: int, wanted: int) -> None:
    assert common_end(start, end, multiple=8) == wanted


def test_without_a_multiple_they_end_anywhere() -> None:
    assert common_end(5, 40, multiple=0) == 40


@given(start=st.integers(0, 200), n_left=st.integers(1, 400), largest=st.integers(1, 100))
@example(start=5, n_left=395, largest=32)
def test_a_prompt_is_read_in_common_chunks(start: int, n_left: int, largest: int) -> None:
    n_total, n_chunks = start + n_left, 0
    at = start
    while at < n_total:
        end = common_end(at, min(at + largest, n_total), multiple=8)
        assert at < end <= min(at + largest, n_total)
        assert end - at <= 8 or (at % 8 == 0 and end % 8 == 0)
        at, n_chunks = end, n_chunks + 1
    if largest >= 16 and largest % 8 == 0:
        assert n_chunks <= -(-n_left // largest) + 2, "one to reach a multiple, one for the rest"
