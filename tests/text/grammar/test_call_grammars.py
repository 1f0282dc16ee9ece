"""Enforced calls: whatever a model writes within a format's grammar is a call."""

from __future__ import annotations

import json

import jsonschema
import pytest

from firn.core.errors import BadRequest
from firn.core.values import Grammar, Tool, ToolChoice, ToolMode
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.reply.formats import ReplyFormat
from tests.text import grammar_walks
from tests.text.grammar_walks import (
    EACH,
    ENFORCEABLE,
    PING,
    SCHEMAS,
    accepts,
    asked,
    check,
    reply_of,
    required,
    start,
    tokenizer,
    walks,
)
from tests.text.replies import NEXT_PART, TO_USER


def test_every_format_but_the_foreign_one_has_a_grammar() -> None:
    assert set(formats()) - set(ENFORCEABLE) == {"whole_call"}


@EACH
def test_the_grammar_accepts_the_formats_example(format: ToolFormat) -> None:
    begun = start(format.name, asked(required()))
    assert accepts(format.name, begun, format.example)


@EACH
def test_a_required_call_is_always_made(format: ToolFormat) -> None:
    replies = walks(format, required())
    for reply in replies:
        check(reply)
    if format.name != "harmony":  # whose calls end the reply
        assert max(len(reply.calls) for reply in replies) > 1


@EACH
def test_without_parallel_calls_there_is_exactly_one(format: ToolFormat) -> None:
    for reply in walks(format, required(parallel=False)):
        check(reply)
        assert len(reply.calls) == 1


@EACH
def test_only_the_named_tool_is_called(format: ToolFormat) -> None:
    for reply in walks(format, ToolChoice(ToolMode.NAMED, name="say")):
        check(reply)
        assert {call.name for call in reply.calls} == {"say"}


@EACH
def test_the_model_may_call_or_answer_in_its_format(format: ToolFormat) -> None:
    """With tools and a format for the answer, the model may do either."""
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
def test_where_a_call_is_required_other_text_is_refused(format: ToolFormat) -> None:
    for text in ("Hello", "", "I shall look.\n" + format.example, format.example[:-9]):
        assert not accepts(format.name, start(format.name, asked(required())), text)
    lost = format.example.replace("get_weather", "get_lost")
    assert not accepts(format.name, start(format.name, asked(required())), lost)
    wrong = format.example.replace("3", "300")
    assert not accepts(format.name, start(format.name, asked(required())), wrong)


# --- free to answer or to call -------------------------------------------------------------

NEVER = ToolChoice(ToolMode.NONE)
WORDS = "Well, {ok} [fine] <b>x</b> <tool_cal: I need no tool.\n\nDone"


def words_of(format: ToolFormat, text: str = WORDS) -> str:
    return TO_USER.get(format.name, "") + text


@EACH
def test_where_calls_are_forbidden_none_can_be_written(format: ToolFormat) -> None:
    def is_allowed(text: str) -> bool:
        return accepts(format.name, start(format.name, asked(NEVER)), text)

    assert is_allowed(words_of(format))
    assert is_allowed(words_of(format, '{"answer": 42}'))
    assert not is_allowed(format.example)
    assert not is_allowed(f"\n{format.example}")
    if not format.starts:
        part = NEXT_PART.get(format.name, "\n")
        assert not is_allowed(words_of(format, f"I look.{part}{format.example}"))
    for reply in walks(format, NEVER, grammar=None):
        assert not reply.calls


@EACH
def test_reasoning_before_text_has_no_calls_either(format: ToolFormat) -> None:
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
def test_only_allowed_tools_are_called(format: ToolFormat) -> None:
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
    for reply in walks(ENFORCEABLE["json_tags"], required(allowed=frozenset({"say"}))):
        check(reply)
        assert {call.name for call in reply.calls} == {"say"}


# --- variants of a format, by the template -------------------------------------------------


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
def test_the_template_tells_the_variant_of_a_format(format: str, template: str, reply: str) -> None:
    class Taught:
        """The format's tokenizer with another template."""

        chat_template = template

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer(format), name)

    grammar = grammar_walks.constraint(
        asked(required()),
        format=ReplyFormat(tool=format),
        tokenizer=Taught(),  # type: ignore[arg-type]
        prompt_tail="",
    ).grammar
    assert grammar is not None
    begun = grammar_walks.compiler(format).compile(grammar).start()
    assert accepts(format, begun, reply)
    assert reply_of(formats()[format], reply).calls


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
def test_a_name_that_a_format_cannot_write_is_a_bad_request(format: str, tool: Tool) -> None:
    with pytest.raises(BadRequest) as caught:
        start(format, asked(required(), tools=(PING, tool)))
    assert caught.value.param == "tools[1]"
