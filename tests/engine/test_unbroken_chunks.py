"""Prefill chunks around ranges that must not be split: pictures whose tokens attend to each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firn.engine.scheduler import chunk_end


def cuts(n_total: int, *, start: int = 0, **options: object) -> list[int]:
    ends, at = [], start
    while at < n_total:
        end = chunk_end(at, n_total, **options)  # type: ignore[arg-type]
        assert at < end <= n_total
        ends.append(end)
        at = end
    return ends


def test_a_picture_across_a_boundary_starts_the_next_chunk() -> None:
    # 0     8     16    24
    # |-----|--[====]--|
    assert cuts(30, chunk=8, unbroken=[(10, 20)]) == [8, 10, 20, 24, 30]


def test_a_picture_within_a_chunk_changes_nothing() -> None:
    assert cuts(30, chunk=8, unbroken=[(9, 15)]) == [8, 16, 24, 30]
    assert cuts(30, chunk=8, unbroken=[(8, 16)]) == [8, 16, 24, 30]


def test_a_picture_larger_than_a_chunk_is_read_at_once() -> None:
    assert cuts(40, chunk=8, unbroken=[(8, 33)]) == [8, 33, 40]


def test_adjacent_pictures_are_chunks_of_their_own() -> None:
    assert cuts(40, chunk=8, unbroken=[(3, 12), (12, 30)]) == [3, 12, 30, 32, 40]


def test_a_stop_inside_a_picture_is_ignored() -> None:
    assert cuts(30, chunk=16, stops=[5, 10, 20], unbroken=[(8, 14)]) == [5, 16, 20, 30]


def test_a_stop_at_the_edge_of_a_picture_ends_a_chunk() -> None:
    """A prompt can resume before a picture and after it."""
    assert cuts(30, chunk=16, stops=[8, 14], unbroken=[(8, 14)]) == [8, 14, 16, 30]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    at, ranges = 0, []
    for _ in range(draw(st.integers(0, 5))):
        start = at + draw(st.integers(0, 20))
        at = start + draw(st.integers(1, 40))
        ranges.append((start, at))
    return at + draw(st.integers(1, 30)), draw(st.integers(1, 20)), ranges


@given(layouts())
def test_no_chunk_ends_inside_a_picture(layout: tuple[int, int, list[tuple[int, int]]]) -> None:
    n_total, chunk, unbroken = layout
    ends = cuts(n_total, chunk=chunk, unbroken=unbroken)
    assert not any(start < cut < end for cut in ends for start, end in unbroken)


@given(layouts())
def test_cuts_do_not_depend_on_where_reading_resumed(
    layout: tuple[int, int, list[tuple[int, int]]],
) -> None:
    """From any grid boundary outside pictures, the rest is cut in the same places."""
    n_total, chunk, unbroken = layout
    whole = cuts(n_total, chunk=chunk, unbroken=unbroken)
    for start in range(chunk, n_total, chunk):
        if any(first < start < last for first, last in unbroken):
            continue
        assert start in whole
        rest = cuts(n_total, start=start, chunk=chunk, unbroken=unbroken)
        assert rest == [cut for cut in whole if cut > start]
