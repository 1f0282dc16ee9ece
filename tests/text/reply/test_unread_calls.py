"""A call in a format that the parser does not read is noticed, and nothing but calls is."""

from __future__ import annotations

import pytest

from firn.core.events import ChoiceFinished, TextDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.reply.unread_calls import UnreadCalls, mark_of_call

TOOLS = (Tool("get_weather"), Tool("a+b"))


@pytest.mark.parametrize(
    "form", [f for f in formats().values() if f.name != "whole_call"], ids=lambda form: form.name
)
def test_a_call_in_any_format_is_noticed(form: ToolFormat) -> None:
    assert mark_of_call(form.example, TOOLS)
    if form.opens:
        assert mark_of_call(f"Sure. {form.example}", TOOLS)
        assert mark_of_call(f"I write {form.opens[0]} for get_weather.", TOOLS) is None
        cut = form.example[: form.example.index("get_weather") + 6]
        assert mark_of_call(f"Sure. {cut}", TOOLS) is None
        assert mark_of_call(form.example, (Tool("another"),)) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "arguments": {}}',
        '```json\n{"function":"get_weather", "parameters": {"a": {"b": 1}}}\n```',
        'I call [{"tool" : "a+b", "args": {}}]',
    ],
)
def test_json_that_names_a_tool_is_a_call(text: str) -> None:
    assert mark_of_call(text, TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "get_weather is a tool",
        '{"name": "Ada"}',
        "<b>[1, 2]</b> {}",
        '{"name": "aab", "arguments": {}}',
        'there is {"name": "get_weather"} among them',
        '{"name": "get_weather", "arguments": {"city": "Pa',
        "<tool_call> begins a call of get_weather, </tool_call> ends it",
        f"gpt-oss would write <|channel|> before a call of get_weather{', and so on' * 100}",
        f'<tool_call>{{"name": "get_weather", "arguments": {{"a": {"[" * 100_000}',
        f'<tool_call>{{"name": "get_weather", "arguments": {"[" * 99_999}{"]" * 99_999}}}</tool_call>',
    ],
)
def test_text_about_calls_is_not_a_call(text: str) -> None:
    assert mark_of_call(text, TOOLS) is None


def test_a_call_is_noticed_across_deltas_and_reported_at_the_end() -> None:
    watch = UnreadCalls(TOOLS)
    assert watch.observe([TextDelta(0, "<tool_")]) is None
    assert watch.observe([TextDelta(0, 'call>{"name": "get_weather", ')]) is None
    assert watch.observe([TextDelta(0, '"arguments": {}}</tool_call>')]) is None
    text = watch.observe([ChoiceFinished(0, "stop")])
    assert text == '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert watch.mark(text) == "<tool_call>"


def test_a_reply_that_names_no_tool_is_not_looked_at() -> None:
    watch = UnreadCalls(TOOLS)
    assert watch.observe([TextDelta(0, "<tool_call>{}"), ChoiceFinished(0, "stop")]) is None


def test_a_reply_that_was_cut_short_is_not_reported() -> None:
    watch = UnreadCalls(TOOLS)
    said = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert watch.observe([TextDelta(0, said), ChoiceFinished(0, "length")]) is None


def test_a_reply_with_a_call_that_was_read_is_not_reported() -> None:
    watch = UnreadCalls(TOOLS)
    events = [TextDelta(0, "<tool_call>"), ToolCallStarted(0, 0, "a", "get_weather")]
    assert watch.observe(events) is None
    assert watch.observe([ChoiceFinished(0, "tool_calls")]) is None
