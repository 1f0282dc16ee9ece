from __future__ import annotations

import copy

import pytest

from firn.core.values import ImagePart, Message, TextPart, Tool, ToolCall
from firn.text.messages import (
    TemplateStyle,
    normalise,
    short_id,
    strip_changing_lines,
    to_template,
    tools_to_template,
)


def said(role: str, *texts: str, **more: object) -> Message:
    return Message(role, tuple(map(TextPart, texts)), **more)  # type: ignore[arg-type]


def system(*texts: str) -> Message:
    return said("system", *texts)


def user(*texts: str) -> Message:
    return said("user", *texts)


def assistant(*texts: str, **more: object) -> Message:
    return said("assistant", *texts, **more)


CALL = ToolCall("c1", "f", {"a": 1})
CALLS = assistant(tool_calls=(CALL,))
RESULT = said("tool", "42", tool_call_id="c1")
OTHER_RESULT = said("tool", "43", tool_call_id="c2")
PICTURE = ImagePart("data:image/png;base64,AA==")
SHOWS = Message("user", (TextPart("see"), PICTURE))

TABLE = {
    "empty stays empty": ((), ()),
    "nothing to do": ((system("s"), user("u")), (system("s"), user("u"))),
    "system merges": ((system("a"), system("b"), user("u")), (system("a\n\nb"), user("u"))),
    "late system moves to the front": (
        (user("u"), assistant("x"), system("s"), user("v")),
        (system("s"), user("u"), assistant("x"), user("v")),
    ),
    "late system joins the first": (
        (system("a"), user("u"), system("b"), user("v")),
        (system("a\n\nb"), user("u\n\nv")),
    ),
    "users merge": ((user("a"), user("b"), user("c")), (user("a\n\nb\n\nc"),)),
    "an empty user adds no blank line": ((user("a"), user(""), user("c")), (user("a\n\nc"),)),
    "users around an assistant do not": (
        (user("a"), assistant("x"), user("b")),
        (user("a"), assistant("x"), user("b")),
    ),
    "parts of one message stay apart": ((user("a", "b"), user("c")), (user("a", "b\n\nc"),)),
    "a picture stays where it is": (
        (SHOWS, user("what?")),
        (Message("user", (TextPart("see"), PICTURE, TextPart("what?"))),),
    ),
    "text before a picture": (
        (user("look"), SHOWS),
        (Message("user", (TextPart("look\n\nsee"), PICTURE)),),
    ),
    "tool results never merge": (
        (user("u"), CALLS, RESULT, OTHER_RESULT, user("v")),
        (user("u"), CALLS, RESULT, OTHER_RESULT, user("v")),
    ),
    "assistants never merge, calls are kept": (
        (user("u"), assistant("x"), CALLS, RESULT),
        (user("u"), assistant("x"), CALLS, RESULT),
    ),
    "billing line": (
        (system("x-anthropic-billing-header: cc_version=2; cch=1f3a;\nYou are."), user("u")),
        (system("You are."), user("u")),
    ),
    "a system message that was only a billing line": (
        (system("x-anthropic-billing-header: cch=1"), system("Be kind."), user("u")),
        (system("Be kind."), user("u")),
    ),
    "nothing left": ((system("x-anthropic-billing-header: cch=1"), user("u")), (user("u"),)),
    "an empty system message is a wish": ((system(""), user("u")), (system(""), user("u"))),
    "a user may quote the line": (
        (user("x-anthropic-billing-header: cch=1"),),
        (user("x-anthropic-billing-header: cch=1"),),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_normalise(case: str) -> None:
    before, after = TABLE[case]
    kept = copy.deepcopy(before)
    assert normalise(before) == after
    assert before == kept
    assert normalise(after) == after


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\nx-anthropic-billing-header: cch=1\nb", "a\nb"),
        ("X-Anthropic-Billing-Header: cch=1\r\nb", "b"),
        ("x-client-attribution: me\nb", "b"),
        ("see x-anthropic-billing-header: cch=1", "see x-anthropic-billing-header: cch=1"),
        ("x-forwarded-for: me", "x-forwarded-for: me"),
    ],
)
def test_only_whole_changing_lines_go(text: str, left: str) -> None:
    assert strip_changing_lines(text) == left


@pytest.mark.parametrize(
    ("given", "reaches"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("  ", {}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_reach_the_template_as_an_object(given: object, reaches: object) -> None:
    message = assistant(tool_calls=(ToolCall("c", "f", given),))  # type: ignore[arg-type]
    (found,) = normalise((message,))
    assert found.tool_calls[0].arguments == reaches
    (rendered,) = to_template((found,))
    assert rendered["tool_calls"] == [
        {"type": "function", "id": "c", "function": {"name": "f", "arguments": reaches}}
    ]


def test_the_template_sees_plain_dicts() -> None:
    messages = (
        system("s"),
        user("a", "b"),
        assistant("x", reasoning="hm", tool_calls=(CALL,)),
        RESULT,
    )
    assert to_template(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


def test_content_is_a_list_only_with_pictures() -> None:
    assert to_template((SHOWS,)) == [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}
    ]


def test_styles() -> None:
    messages = (assistant(reasoning="hm", tool_calls=(CALL,)), RESULT)
    style = TemplateStyle(
        none_content=True,
        short_ids=True,
        text_arguments=True,
        names_results=True,
        reasoning_key="thinking",
    )
    said, result = to_template(messages, style=style)
    assert said["content"] is None
    assert said["thinking"] == "hm"
    assert said["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] == short_id("c1")
    assert result["name"] == "f"


def test_reasoning_beside_content_is_left_out_where_the_template_takes_one() -> None:
    style = TemplateStyle(reasoning_key="thinking", either_reasoning=True)
    both = assistant("text", reasoning="hm", tool_calls=(CALL,))
    assert "thinking" not in to_template((both,), style=style)[0]
    assert to_template((assistant("text", reasoning="hm"),), style=style)[0]["thinking"] == "hm"


def test_short_ids_are_stable_and_leave_good_ones_alone() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    assert len(short_id("call_0123456789")) == 9
    assert short_id("call_1") == short_id("call_1") != short_id("call_2")
    assert short_id("\ud800").isalnum()


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    (tool,) = tools_to_template((Tool("f"),))
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}


def test_tools_as_openai_writes_them() -> None:
    tool = Tool("f", "does", {"type": "object"})
    assert tools_to_template((tool,)) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "does", "parameters": {"type": "object"}},
        }
    ]
