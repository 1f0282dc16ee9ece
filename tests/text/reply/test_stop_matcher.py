from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.text.reply.reader import StopMatcher
from firn.text.reply.stream_finder import StreamFinder


def read(stops: tuple[str, ...], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    given = ""
    for chunk in chunks:
        text, stop = matcher.feed(chunk)
        given += text
        if stop is not None:
            return given, stop
    return given + matcher.flush(), None


def expected(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The definition: the stop that ends first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if s and text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


TABLE = [
    (("STOP",), "hello STOP world", ("hello ", "STOP")),
    (("STOP",), "hello STO", ("hello STO", None)),
    (("STOP",), "STOP", ("", "STOP")),
    (("\n\n",), "a\nb\n\nc", ("a\nb", "\n\n")),
    (("aab",), "aaab", ("a", "aab")),
    (("abcd", "bc"), "xabcd", ("xa", "bc")),
    (("bc", "abc"), "xabc", ("x", "abc")),
    (("abc", "bc"), "xabc", ("x", "abc")),
    (("é",), "cafés", ("caf", "é")),
    (("abab", "babc"), "ababc", ("", "abab")),
    ((), "anything", ("anything", None)),
    (("",), "anything", ("anything", None)),
]


@pytest.mark.parametrize(("stops", "text", "result"), TABLE)
def test_a_stop_is_found_at_every_split(
    stops: tuple[str, ...], text: str, result: tuple[str, str | None]
) -> None:
    assert expected(stops, text) == result
    assert read(stops, list(text)) == result
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert read(stops, [text[:i], text[i:j], text[j:]]) == result


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple),
    chunks=st.lists(st.text("abc", max_size=6), max_size=10),
)
@example(stops=("abab", "bab"), chunks=["a", "ba", "bc"])
@example(stops=("aab", "ab"), chunks=["aa", "aab"])
@example(stops=("ababb",), chunks=["abab", "abb"])
@example(stops=("b", "ab"), chunks=["a", "b"])
def test_any_stops_match_as_defined(stops: tuple[str, ...], chunks: list[str]) -> None:
    assert read(stops, chunks) == expected(stops, "".join(chunks))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    chunks=st.lists(st.text("abc", max_size=6), max_size=10),
)
@example(stops=("abb", "ba"), chunks=["ca", "c", "ab", "c"])
@example(stops=("aab",), chunks=["aaa", "a"])
def test_no_more_is_held_back_than_may_begin_a_stop(
    stops: tuple[str, ...], chunks: list[str]
) -> None:
    finder = StreamFinder(stops)
    for chunk in chunks:
        if finder.feed(chunk).needle:
            return
        assert finder.pending == "" or any(s.startswith(finder.pending) for s in stops)


def test_it_starts_afresh_after_a_needle() -> None:
    finder = StreamFinder(("ab",))
    assert finder.feed("xaby") == ("x", "ab", "y")
    assert finder.feed("yb") == ("yb", "", "")
    assert finder.feed("a") == ("", "", "")
    assert finder.feed("b!") == ("", "ab", "!")


def test_it_starts_afresh_after_a_flush() -> None:
    finder = StreamFinder(("aab",))
    assert finder.feed("xaa") == ("x", "", "")
    assert finder.flush() == "aa"
    assert finder.feed("ab") == ("ab", "", "")


def test_a_long_self_similar_stop_costs_time_linear_in_the_text() -> None:
    # Quadratic work would take minutes here, and exceed the suite's time limit.
    assert read(("a" * 20_000 + "b",), ["a"] * 60_000) == ("a" * 60_000, None)
