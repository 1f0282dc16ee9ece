"""Calls that are enforced: whatever a model held to a format's grammar says, it is a call."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from firn.core.errors import BadRequest
from firn.core.values import Grammar, Tool, ToolChoice, ToolMode
from firn.text.formats import ReplyFormat
from firn.text.parsers import ToolFormat, formats
from firn.text.schema_check import faults
from tests.models.grammar_lab import wander
from tests.text import grammar_walks
from tests.text.grammar_walks import (
    PING,
    SAY,
    THINK,
    TOOLS,
    WEATHER,
    accepts,
    asked,
    grammar_of,
    required,
    start,
    tokenizer,
)
from tests.text.replies import Reply, read

HELD = {name: f for name, f in formats().items() if f.grammar}
EACH = pytest.mark.parametrize("format", HELD.values(), ids=HELD)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
N_WALKS = 12


def reply_of(format: ToolFormat, text: str, tail: str = "") -> Reply:
    think = None if format.splitter else THINK
    return read(ReplyFormat(tool=format.name, think=think), [text], tools=TOOLS, tail=tail)


def walks(format: ToolFormat, choice: ToolChoice, **options: object) -> list[Reply]:
    """Replies that the grammar allows, read back; those that ran on are left out."""
    request = asked(choice, **options)  # type: ignore[arg-type]
    vocabulary = tokenizer(format.name)
    found = []
    for seed in range(N_WALKS):
        begun = start(format.name, request)
        walk = wander(begun, vocabulary.eos, seed=seed, n_most=600)
        if walk is not None:
            found.append(reply_of(format, vocabulary.decode(walk)))
    assert len(found) > N_WALKS // 3
    return found


def check(reply: Reply) -> None:
    assert reply.calls
    assert reply.text == ""
    for call in reply.calls:
        jsonschema.validate(call.arguments, SCHEMAS[call.name])


def test_every_format_but_the_foreign_one_can_be_held() -> None:
    assert set(formats()) - set(HELD) == {"whole_call"}


@EACH
def test_what_the_format_is_known_by_is_in_its_grammar(format: ToolFormat) -> None:
    begun = start(format.name, asked(required()))
    assert accepts(format.name, begun, format.example)


@EACH
def test_a_call_is_required(format: ToolFormat) -> None:
    replies = walks(format, required())
    for reply in replies:
        check(reply)
    if format.name != "harmony":  # whose calls end the reply
        assert max(len(reply.calls) for reply in replies) > 1


@EACH
def test_no_more_than_one_call(format: ToolFormat) -> None:
    for reply in walks(format, required(parallel=False)):
        check(reply)
        assert len(reply.calls) == 1


@EACH
def test_a_call_by_name(format: ToolFormat) -> None:
    for reply in walks(format, ToolChoice(ToolMode.NAMED, name="say")):
        check(reply)
        assert {call.name for call in reply.calls} == {"say"}


@EACH
def test_a_call_or_an_answer(format: ToolFormat) -> None:
    """With tools on offer and a format for the answer, the model has both ways to go."""
    answer = Grammar("json_schema", '{"const": {"answer": 42}}')
    texts, n_calls = set(), 0
    for reply in walks(format, ToolChoice(), grammar=answer):
        if reply.calls:
            check(reply)
            n_calls += 1
        else:
            texts.add(json.dumps(json.loads(reply.text)))
    assert texts == {'{"answer": 42}'}
    assert n_calls


@EACH
def test_other_text_is_refused(format: ToolFormat) -> None:
    for text in ("Hello", "", "I shall look.\n" + format.example, format.example[:-9]):
        assert not accepts(format.name, start(format.name, asked(required())), text)
    lost = format.example.replace("get_weather", "get_lost")
    assert not accepts(format.name, start(format.name, asked(required())), lost)
    wrong = format.example.replace("3", "300")
    assert not accepts(format.name, start(format.name, asked(required())), wrong)


# --- free to answer or to call -------------------------------------------------------------

NEVER = ToolChoice(ToolMode.NONE)
WORDS = "Well, {ok} [fine] <b>x</b> <tool_cal: I need no tool.\n\nDone"
FINAL = "<|channel|>final<|message|>"


def words_of(format: ToolFormat, text: str = WORDS) -> str:
    return f"{FINAL}{text}" if format.splitter else text


@EACH
def test_calls_are_forbidden(format: ToolFormat) -> None:
    def is_allowed(text: str) -> bool:
        return accepts(format.name, start(format.name, asked(NEVER)), text)

    assert is_allowed(words_of(format))
    assert is_allowed(words_of(format, '{"answer": 42}'))
    assert not is_allowed(format.example)
    assert not is_allowed(f"\n{format.example}")
    if not format.starts and not format.splitter:
        assert not is_allowed(f"I look.\n{format.example}")
    for reply in walks(format, NEVER, grammar=None):
        assert not reply.calls


@EACH
def test_the_thought_before_words_is_free_of_calls_too(format: ToolFormat) -> None:
    if format.splitter:
        pytest.skip("its thoughts have a channel of their own")
    request = asked(NEVER, thinks=None)
    assert accepts(format.name, start(format.name, request), f"<think>hm</think>\n\n{WORDS}")
    opened = start(format.name, request, tail="<think>\n")
    assert accepts(format.name, opened, f"hm</think>{WORDS}")
    if format.opens:
        opened = start(format.name, request, tail="<think>\n")
        assert not accepts(format.name, opened, f"hm {format.example}</think>{WORDS}")


@EACH
def test_only_some_tools_are_allowed(format: ToolFormat) -> None:
    choice = ToolChoice(allowed=frozenset({"get_weather", "say"}))

    def is_allowed(text: str) -> bool:
        return accepts(format.name, start(format.name, asked(choice)), text)

    assert is_allowed(words_of(format))
    assert is_allowed(format.example)
    if not format.starts and not format.splitter:
        assert is_allowed(f"I look <tool_cal\n{format.example}")
    others = asked(ToolChoice(allowed=frozenset({"ping"})))
    assert not accepts(format.name, start(format.name, others), format.example)
    for reply in walks(format, choice):
        assert {call.name for call in reply.calls} <= {"get_weather", "say"}
        for call in reply.calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])


def test_one_of_some_tools_must_be_called() -> None:
    for reply in walks(HELD["json_tags"], required(allowed=frozenset({"say"}))):
        check(reply)
        assert {call.name for call in reply.calls} == {"say"}


LIST = 'start: "list:" LF item+\nitem: "- " /[^\\n]{1,6}/ LF\n%import common.LF'
TEXT_IN = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
FREE_FORM = {
    "lark": (Grammar("lark", LIST, "tools[0].format"), r"list:\n(- [^\n]{1,6}\n)+"),
    "regex": (Grammar("regex", '(a"|\\n){1,4}', "tools[0].format"), r'(a"|\n){1,4}'),
}


@pytest.mark.parametrize("kind", FREE_FORM)
@EACH
def test_a_free_form_tool_is_held_to_its_grammar(format: ToolFormat, kind: str) -> None:
    """In a reply that may just as well be words."""
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
    found = grammar_walks.constraint_of("json_tags", request)
    assert found.grammar is not None
    (place,) = found.left_out
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
    found = grammar_walks.constraint_of(format, request)
    assert found.left_out == (f"tools[1]#/properties/a{place}",)
    write = formats()[format].write
    assert write is not None
    for n, is_right in ((7, True), (8, False)):
        assert accepts(format, start(format, request), write("f", {"a": value, "n": n})) is is_right
    assert faults({"a": value, "n": 7}, tool.parameters), "and it is noticed afterwards"
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
    found = grammar_walks.constraint_of("glm", asked(required(), tools=(Tool("f", "", schema),)))
    assert found.left_out == ("tools[0]#/minProperties",)


def test_an_endless_schema_is_let_go() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    found = grammar_walks.constraint_of(
        "json_tags", asked(required(), tools=(PING, Tool("f", "", endless)))
    )
    assert found.left_out == ("tools[1]#",)
    grammar_walks.compiler("json_tags").compile(found.grammar)  # type: ignore[arg-type]


def test_a_name_that_cannot_be_written_is_no_fault_where_nobody_is_strict() -> None:
    tools = (Tool("two words", "", {}), Tool("take", "", TEXT_IN, grammar=FREE_FORM["regex"][0]))
    found = grammar_walks.constraint_of("xml_functions", asked(ToolChoice(), tools=tools))
    assert found.grammar is None
    assert "two words" in found.left_out[0]
    strict = asked(ToolChoice(), tools=(tools[0], replace(tools[1], strict=True)))
    with pytest.raises(BadRequest):
        grammar_walks.constraint_of("xml_functions", strict)


# --- dialects of a format, by the template -------------------------------------------------


@pytest.mark.parametrize(
    ("format", "template", "reply"),
    [
        (
            "json_tags",
            "<TOOLCALL>[...]</TOOLCALL>",
            '<TOOLCALL>[{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}]'
            "</TOOLCALL>",
        ),
        (
            "json_tags",
            "<tool_calls>",
            '<tool_calls>[{"name": "ping", "arguments": {}}]</tool_calls>',
        ),
        (
            "json_tags",
            "<|START_ACTION|>",
            '<|START_ACTION|>\n[{"tool_call_id": "0", "tool_name": "ping", "parameters": {}}]\n'
            "<|END_ACTION|>",
        ),
        (
            "json_tags",
            "<|action_start|><|plugin|>",
            '<|action_start|><|plugin|>\n{"name": "ping", "parameters": {}}\n<|action_end|>',
        ),
        ("mistral", "[TOOL_CALLS] [ARGS]", "[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]ping[ARGS]{}"),
        (
            "deepseek",
            "no fence",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
        ),
        ("glm", "<longcat_tool_call>", "<longcat_tool_call>ping\n</longcat_tool_call>"),
        (
            "xml_functions",
            "<seed:tool_call>",
            "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
        ),
        ("pythonic", "<function_calls>", "<function_calls>[ping(), ping()]</function_calls>"),
        ("python_tag", "", '{"name": "ping", "parameters": {}}'),
    ],
)
def test_the_template_says_which_dialect(format: str, template: str, reply: str) -> None:
    class Taught:
        """The format's tokenizer behind another template."""

        chat_template = template

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer(format), name)

    found = grammar_walks.constraint(
        asked(required()),
        format=ReplyFormat(tool=format),
        tokenizer=Taught(),  # type: ignore[arg-type]
        prompt_tail="",
    ).grammar
    assert found is not None
    begun = grammar_walks.compiler(format).compile(found).start()
    assert accepts(format, begun, reply)
    assert reply_of(formats()[format], reply).calls


# --- reasoning first -----------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("tail", "thinks", "reply", "is_right"),
    [
        ("assistant\n", None, CALL, True),
        ("assistant\n", None, f"<think>hm</think>\n\n{CALL}", True),
        ("assistant\n", None, f"<think>{{]<</thin</think>{CALL}", True),
        ("assistant\n", None, f"hm</think>{CALL}", False),
        ("assistant\n", None, "<think>hm", False),
        ("assistant\n", None, "<think>hm</think>ok", False),
        ("assistant\n", False, f"<think>hm</think>{CALL}", False),
        ("assistant\n<think>\n", None, f"hm\n</think>\n\n{CALL}", True),
        ("assistant\n<think>\n", None, f"</think>{CALL}", True),
        ("assistant\n<think>\n", None, CALL, False),
        ("assistant\n<think>\n", None, "I need no tool.</think>", False),
        ("assistant\n<think>\n\n</think>\n\n", None, CALL, True),
        ("assistant\n<think>\n\n</think>\n\n", None, f"<think></think>{CALL}", False),
    ],
)
def test_the_grammar_begins_behind_the_reasoning(
    tail: str, thinks: bool | None, reply: str, is_right: bool
) -> None:
    begun = start("json_tags", asked(required(), thinks=thinks), tail=tail)
    assert accepts("json_tags", begun, reply) is is_right


def test_an_answer_behind_reasoning() -> None:
    answer = Grammar("json_schema", '{"type": "boolean"}')
    request = asked(ToolChoice(), tools=(), grammar=answer, thinks=None)
    for reply in ("true", "<think>perhaps</think>\nfalse"):
        assert accepts("json_tags", start("json_tags", request), reply)
    for reply in ("perhaps", "<think>true", "<think>hm</think>\n\n\n\ntrue", "true</think>"):
        assert not accepts("json_tags", start("json_tags", request), reply)


def test_tags_that_are_no_tokens() -> None:
    """The closing tag is spelled out; a token that spells its end and more counts as both."""
    request = asked(required(), thinks=None)
    found = grammar_walks.constraint(
        request,
        format=ReplyFormat(tool="json_tags", think=type(THINK)("<thinking>", "</thinking>")),
        tokenizer=tokenizer("json_tags"),
        prompt_tail="<thinking>",
    ).grammar
    assert found is not None
    compiled = grammar_walks.compiler("json_tags").compile(found)
    assert accepts("json_tags", compiled.start(), f"well </thinkin </thinking>\n{CALL}")
    assert not accepts("json_tags", compiled.start(), f"well </thinking>so {CALL}")


def test_harmony_thinks_on_its_own_channel() -> None:
    call = formats()["harmony"].example
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    request = asked(required(), thinks=None)
    assert accepts("harmony", start("harmony", request), thought + call)
    assert accepts("harmony", start("harmony", request), thought + thought + call)
    assert not accepts("harmony", start("harmony", request), thought)
    final = "<|channel|>final<|message|>"
    answer = asked(ToolChoice(), tools=(), grammar=Grammar("json_object"))
    assert accepts("harmony", start("harmony", answer), f"{thought}{final}{{}}")
    assert not accepts("harmony", start("harmony", answer), f"{final}Hello")
    assert not accepts("harmony", start("harmony", answer), "{}")


# --- when there is none --------------------------------------------------------------------


def test_no_constraint_without_need() -> None:
    assert grammar_of("json_tags", asked(ToolChoice())) is None
    assert grammar_of("json_tags", asked(ToolChoice(ToolMode.NONE), tools=())) is None


def test_an_answer_alone_stays_as_it_is() -> None:
    answer = Grammar("regex", "[ab]")
    for choice, tools in ((ToolChoice(), ()), (ToolChoice(ToolMode.NONE), TOOLS)):
        assert grammar_of("json_tags", asked(choice, tools=tools, grammar=answer)) is answer


def test_a_format_without_a_grammar_is_refused_in_words() -> None:
    with pytest.raises(BadRequest, match="whole_call") as caught:
        grammar_of("whole_call", asked(required()))
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequest) as caught:
        grammar_of("whole_call", asked(ToolChoice(), grammar=Grammar("json_object")))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("format", "tool"),
    [
        ("pythonic", Tool("get-weather", "", {"properties": {}})),
        ("pythonic", Tool("free", "", {})),
        ("pythonic", Tool("f", "", {"properties": {"class": {}}})),
        ("xml_functions", Tool("two words", "", {})),
        ("glm", Tool("f", "", {"properties": {"<key>": {}}})),
    ],
)
def test_a_name_that_a_format_cannot_write(format: str, tool: Tool) -> None:
    with pytest.raises(BadRequest) as caught:
        start(format, asked(required(), tools=(PING, tool)))
    assert caught.value.param == "tools[1]"


def test_a_strict_tool_is_taken_at_its_word_and_others_as_far_as_it_goes() -> None:
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
def test_a_tool_that_takes_anything(format: ToolFormat) -> None:
    free = Tool("free", "", {})
    if format.name.startswith("pythonic"):
        pytest.skip("parameters need names")
    vocabulary = tokenizer(format.name)
    for seed in range(4):
        begun = start(format.name, asked(required(parallel=False), tools=(free,)))
        walk = wander(begun, vocabulary.eos, seed=seed, n_most=300)
        if walk is not None:
            think = None if format.splitter else THINK
            reply = read(
                ReplyFormat(tool=format.name, think=think), [vocabulary.decode(walk)], tools=(free,)
            )
            assert [call.name for call in reply.calls] == ["free"]
            assert isinstance(reply.calls[0].arguments, dict)


def test_arguments_have_no_members_but_the_declared() -> None:
    request = asked(required(), tools=(WEATHER,))
    for more, is_right in (("", True), (', "more": 1', False)):
        call = f'{{"name": "get_weather", "arguments": {{"city": "x", "days": 1{more}}}}}'
        text = f"<tool_call>\n{call}\n</tool_call>"
        assert accepts("json_tags", start("json_tags", request), text) is is_right


@pytest.mark.parametrize(
    ("choice", "tools"),
    [(required(), ()), (ToolChoice(ToolMode.NAMED, name="nobody"), TOOLS)],
)
def test_a_call_needs_a_tool(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of("json_tags", asked(choice, tools=tools))
    assert caught.value.param == "tool_choice"
