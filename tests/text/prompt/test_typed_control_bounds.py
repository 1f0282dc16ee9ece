"""Telling typed control tokens apart takes linear time, however many there are."""

from __future__ import annotations

import pytest

from firn.core.errors import BadRequest
from firn.core.values import Message, TextPart
from firn.text.prompt import typed_marks
from firn.text.prompt.rendering import Content
from firn.text.prompt.typed_control import TypedControl

END, START = "<|im_end|>", "<|im_start|>"
N = 30_000


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def nosy(content: Content) -> str:
    """Like a template that writes something else if it finds tokens in its messages."""
    said = "".join(
        f"{START}{m.text.count(END)} {END in m.text} {m.text}{END}" for m in content.messages
    )
    return f"{said}{START}"


def spelled(content: Content) -> int:
    return sum(m.text.count(END) + m.text.count(START) for m in content.messages)


@pytest.mark.parametrize(
    "content",
    [
        Content((user(f"{END} " * N),)),
        Content((user(END * N),)),
        Content((user(f"{END}{START} x " * N),)),
        Content(tuple(user(f"a{END}b {i}") for i in range(2000))),
    ],
    ids=["one text", "one after the other", "two kinds", "many messages"],
)
def test_thousands_of_typed_tokens_are_all_text(content: Content) -> None:
    rendered = TypedControl([END, START]).render(content, nosy)
    assert rendered.text == nosy(content)
    # All except those that the template itself writes.
    n_own = 2 * len(content.messages) + 1
    assert (
        len(rendered.typed)
        == spelled(content)
        == rendered.text.count(END) + rendered.text.count(START) - n_own
    )


@pytest.mark.parametrize(
    "content",
    [Content((user(END * 101),)), Content(tuple(user(END) for _ in range(101)))],
    ids=["one text", "many messages"],
)
def test_more_of_them_than_any_text_has_are_refused_before_they_are_looked_for(
    content: Content,
) -> None:
    typed = TypedControl([END, START], most=100)
    rendered: list[Content] = []

    def render(content: Content) -> str:
        rendered.append(content)
        return nosy(content)

    with pytest.raises(BadRequest, match="more than 100 of the model's control tokens"):
        typed.render(content, render)
    assert not rendered
    assert typed.render(Content((user(END * 100),)), render).typed


def test_a_slow_template_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_marks, "RENDERINGS_S", 0.0)
    kinds = [f"<|t{i:03}|>" for i in range(64)]
    n_renders = 0

    def render(content: Content) -> str:
        nonlocal n_renders
        n_renders += 1
        text = content.messages[0].text
        return f"{sum(kind in text for kind in kinds)} {text}"

    text = " x ".join(kinds)
    rendered = TypedControl(kinds).render(Content((user(text),)), render)
    assert n_renders <= 3
    assert len(rendered.typed) == len(kinds)
