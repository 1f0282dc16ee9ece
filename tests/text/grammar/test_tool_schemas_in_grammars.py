"""What a tool's schema or grammar demands of a call is enforced, or named as unenforceable."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from firn.core.errors import BadRequest
from firn.core.values import Grammar, Tool, ToolChoice
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.grammar.call_grammar import parameters
from firn.text.reply.formats import ReplyFormat
from tests.models.grammar.grammar_lab import wander
from tests.text import grammar_walks
from tests.text.grammar_walks import (
    EACH,
    PING,
    SAY,
    THINK,
    WEATHER,
    accepts,
    asked,
    required,
    start,
    tokenizer,
)
from tests.text.replies import read

LIST = 'start: "list:" LF item+\nitem: "- " /[^\\n]{1,6}/ LF\n%import common.LF'
TEXT_IN = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
FREE_FORM = {
    "lark": (Grammar("lark", LIST, "tools[0].format"), r"list:\n(- [^\n]{1,6}\n)+"),
    "regex": (Grammar("regex", '(a"|\\n){1,4}', "tools[0].format"), r'(a"|\n){1,4}'),
}


@pytest.mark.parametrize("kind", FREE_FORM)
@EACH
def test_a_free_form_tool_is_held_to_its_grammar(format: ToolFormat, kind: str) -> None:
    """Also in a reply that may be plain text instead."""
    grammar, pattern = FREE_FORM[kind]
    tool = Tool("take", "", TEXT_IN, grammar=grammar)
    vocabulary = tokenizer(format.name)
    think = None if format.splitter else THINK
    n_calls = 0
    for choice in (ToolChoice(), required(parallel=False)):
        request = asked(choice, tools=(tool, PING))
        for seed in range(8):
            walk = wander(start(format.name, request), vocabulary.eos, seed=seed, n_most=400)
            if walk is None:
                continue
            text = vocabulary.decode(walk)
            reply = read(ReplyFormat(tool=format.name, think=think), [text], tools=(tool, PING))
            for call in reply.calls:
                if call.name == "take":
                    assert re.fullmatch(pattern, call.arguments["input"]), call.text
                    n_calls += 1
    assert n_calls


def test_a_grammar_that_json_cannot_hold_is_left_out_and_named() -> None:
    odd = Grammar("lark", "start: /a/ & ~/b/", "tools[0].format")
    request = asked(ToolChoice(), tools=(Tool("take", "", TEXT_IN, grammar=odd),))
    constraint = grammar_walks.constraint_of("json_tags", request)
    assert constraint.grammar is not None
    (place,) = constraint.left_out
    assert place.startswith("tools[0].format: ")
    raw = grammar_walks.constraint_of("xml_functions", request)
    assert raw.left_out == ()


ODD: list[tuple[str, dict[str, Any], str, Any]] = [
    ("json_tags", {"type": "string", "pattern": "^(?!x)a+$"}, "/pattern", "b"),
    ("json_tags", {"type": "string", "not": {"const": "x"}}, "/not", "x"),
    ("json_tags", {"type": "array", "contains": {"const": 1}}, "/contains", [2]),
    ("json_tags", {"oneOf": [{"const": 1}, {"type": "integer"}]}, "/oneOf", 1),
    ("xml_functions", {"type": "string", "pattern": "^(?!x)a+$"}, "/pattern", "b"),
    ("xml_functions", {"type": "string", "allOf": [{"maxLength": 2}]}, "/allOf", "long"),
    ("xml_functions", {"type": "array", "uniqueItems": True}, "/uniqueItems", [1, 1]),
    ("gemma4", {"type": "array", "prefixItems": [{"const": "x"}]}, "/prefixItems", ["y"]),
    (
        "gemma4",
        {"type": "object", "properties": {"b": {"type": "object", "minProperties": 1}}},
        "/properties/b/minProperties",
        {"b": {}},
    ),
]


@pytest.mark.parametrize(("format", "part", "place", "value"), ODD)
def test_what_cannot_be_enforced_is_named_and_the_rest_is(
    format: str, part: dict[str, Any], place: str, value: Any
) -> None:
    parts = {"a": part, "n": {"const": 7}}
    tool = Tool("f", "", {"type": "object", "properties": parts, "required": ["a", "n"]})
    request = asked(required(), tools=(PING, tool))
    constraint = grammar_walks.constraint_of(format, request)
    assert constraint.left_out == (f"tools[1]#/properties/a{place}",)
    write = formats()[format].write
    assert write is not None
    for n, is_right in ((7, True), (8, False)):
        assert accepts(format, start(format, request), write("f", {"a": value, "n": n})) is is_right
    with pytest.raises(BadRequest) as caught:
        start(format, asked(required(), tools=(PING, replace(tool, strict=True))))
    assert caught.value.param == "tools[1]"
    assert place.rpartition("/")[2] in caught.value.message


def test_dependent_members_are_named_in_formats_of_tags() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "minProperties": 1,
    }
    constraint = grammar_walks.constraint_of(
        "glm", asked(required(), tools=(Tool("f", "", schema),))
    )
    assert constraint.left_out == ("tools[0]#/minProperties",)


def test_a_schema_that_never_ends_is_not_enforced() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    constraint = grammar_walks.constraint_of(
        "json_tags", asked(required(), tools=(PING, Tool("f", "", endless)))
    )
    assert constraint.left_out == ("tools[1]#",)
    grammar_walks.compiler("json_tags").compile(constraint.grammar)  # type: ignore[arg-type]


def test_a_name_that_cannot_be_written_is_left_out_unless_a_tool_is_strict() -> None:
    tools = (Tool("two words", "", {}), Tool("take", "", TEXT_IN, grammar=FREE_FORM["regex"][0]))
    constraint = grammar_walks.constraint_of("xml_functions", asked(ToolChoice(), tools=tools))
    assert constraint.grammar is None
    assert "two words" in constraint.left_out[0]
    strict = asked(ToolChoice(), tools=(tools[0], replace(tools[1], strict=True)))
    with pytest.raises(BadRequest):
        grammar_walks.constraint_of("xml_functions", strict)


def test_a_strict_tool_is_enforced_in_full_or_refused() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert accepts(
        "json_tags",
        start("json_tags", asked(required(), tools=(Tool("f", "", odd),))),
        '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>',
    )
    with pytest.raises(BadRequest, match="uniqueItems") as caught:
        start("json_tags", asked(required(), tools=(SAY, Tool("f", "", odd, strict=True))))
    assert caught.value.param == "tools[1]"
    assert "#/properties/a" in caught.value.message


@EACH
def test_a_tool_that_takes_anything_gets_an_object(format: ToolFormat) -> None:
    free = Tool("free", "", {})
    if format.name.startswith(("pythonic", "llama4_pythonic", "minimax_m3")):
        pytest.skip("parameters need names")
    request = asked(required(parallel=False), tools=(free,))
    vocabulary = tokenizer(format.name)
    walks = [
        wander(start(format.name, request), vocabulary.eos, seed=seed, n_most=300)
        for seed in range(4)
    ]
    replies = [vocabulary.decode(walk) for walk in walks if walk is not None]
    example = format.example.replace("get_weather", "free")
    if format.name != "dsml":  # its example tags 3 as no string, but here every argument is one
        assert accepts(format.name, start(format.name, request), example)
        replies.append(example)
    assert replies
    think = None if format.splitter else THINK
    for text in replies:
        (call,) = read(ReplyFormat(tool=format.name, think=think), [text], tools=(free,)).calls
        assert call.name == "free"
        assert isinstance(call.arguments, dict)


def test_required_names_that_are_not_names_are_ignored() -> None:
    schema = {"properties": {"a": {}, "b": {}}, "required": [0, ["a"], None, "b", "c"]}
    declared = parameters(Tool("f", "", schema))
    assert declared is not None
    assert [(p.name, p.required) for p in declared] == [("a", False), ("b", True), ("c", True)]


@EACH
def test_a_parameter_with_a_malformed_schema_takes_anything(format: ToolFormat) -> None:
    schema = {"type": "boolean", "properties": {"city": 2, "days": [], "more": None}}
    tool = Tool("get_weather", "", schema)
    constraint = grammar_walks.constraint_of(format.name, asked(required(), tools=(tool,)))
    assert constraint.grammar is not None
    grammar_walks.compiler(format.name).compile(constraint.grammar)


def test_arguments_have_no_members_but_the_declared() -> None:
    request = asked(required(), tools=(WEATHER,))
    for more, is_right in (("", True), (', "more": 1', False)):
        call = f'{{"name": "get_weather", "arguments": {{"city": "x", "days": 1{more}}}}}'
        text = f"<tool_call>\n{call}\n</tool_call>"
        assert accepts("json_tags", start("json_tags", request), text) is is_right
