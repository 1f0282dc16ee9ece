"""Markdown in a terminal: styled while it arrives, in whatever pieces it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.cli.talk.markdown import CODE, PLAIN, QUIET, STRONG, MarkdownStyler, Styled


def merged(pieces: list[Styled]) -> list[Styled]:
    out: list[Styled] = []
    for text, style in pieces:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        elif text:
            out.append((text, style))
    return out


def styled(text: str, *cuts: int) -> list[Styled]:
    styler, at = MarkdownStyler(), 0
    pieces: list[Styled] = []
    for cut in (*sorted(cuts), len(text)):
        pieces += styler.feed(text[at:cut])
        at = cut
    return merged(pieces + styler.flush())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("plain text", [("plain text", PLAIN)]),
        ("a **bold** word", [("a ", PLAIN), ("bold", STRONG), (" word", PLAIN)]),
        ("call `f(x)` now", [("call ", PLAIN), ("f(x)", CODE), (" now", PLAIN)]),
        ("# Title\ntext", [("Title", STRONG), ("\ntext", PLAIN)]),
        ("- one\n  * two", [("• one\n  • two", PLAIN)]),
        (
            "```py\n# x\n- y **z**\n```\nend",
            [
                ("```py", QUIET), ("\n", PLAIN), ("# x", CODE), ("\n", PLAIN),
                ("- y **z**", CODE), ("\n", PLAIN), ("```", QUIET), ("\nend", PLAIN),
            ],
        ),
        ("2 ** 3 ** 4", [("2 ** 3 ** 4", PLAIN)]),
        ("a ** b\nc ** d", [("a ** b\nc ** d", PLAIN)]),
        ("an open `tick\nand **more", [("an open `tick\nand **more", PLAIN)]),
        ("#hashtag and 5 * 6", [("#hashtag and 5 * 6", PLAIN)]),
        ("---\n*", [("---\n*", PLAIN)]),
    ],
)  # fmt: skip
def test_what_is_styled_and_what_is_not(text: str, pieces: list[Styled]) -> None:
    assert styled(text) == pieces
    for cut in range(len(text)):
        assert styled(text, cut) == pieces


@given(st.text("ab #*`-\n", max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    whole = styled(text)
    assert styled(text, *(min(cut, len(text)) for cut in cuts)) == whole
    letters = [c for c in text if c in "ab"]
    assert [c for piece, _ in whole for c in piece if c in "ab"] == letters


def test_plain_text_is_not_held_back() -> None:
    assert MarkdownStyler().feed("Hello, wor") == [("Hello, wor", PLAIN)]
