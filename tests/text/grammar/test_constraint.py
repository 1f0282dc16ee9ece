"""When a reply is constrained at all, and where reasoning may come before it."""

from __future__ import annotations

import pytest

from firn.core.errors import BadRequest
from firn.core.values import Grammar, Tool, ToolChoice, ToolMode
from firn.text.calls.parsers import formats
from firn.text.reply.formats import ReplyFormat
from tests.text import grammar_walks
from tests.text.grammar_walks import (
    THINK,
    TOOLS,
    accepts,
    asked,
    grammar_of,
    required,
    start,
    tokenizer,
)

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
def test_the_grammar_begins_after_the_reasoning(
    tail: str, thinks: bool | None, reply: str, is_right: bool
) -> None:
    begun = start("json_tags", asked(required(), thinks=thinks), tail=tail)
    assert accepts("json_tags", begun, reply) is is_right


def test_an_answer_may_follow_reasoning() -> None:
    answer = Grammar("json_schema", '{"type": "boolean"}')
    request = asked(ToolChoice(), tools=(), grammar=answer, thinks=None)
    for reply in ("true", "<think>perhaps</think>\nfalse"):
        assert accepts("json_tags", start("json_tags", request), reply)
    for reply in ("perhaps", "<think>true", "<think>hm</think>\n\n\n\ntrue", "true</think>"):
        assert not accepts("json_tags", start("json_tags", request), reply)


def test_think_tags_that_are_not_tokens_are_spelled_out() -> None:
    """A token that spells the end of the closing tag and more counts as both."""
    request = asked(required(), thinks=None)
    grammar = grammar_walks.constraint(
        request,
        format=ReplyFormat(tool="json_tags", think=type(THINK)("<thinking>", "</thinking>")),
        tokenizer=tokenizer("json_tags"),
        prompt_tail="<thinking>",
    ).grammar
    assert grammar is not None
    compiled = grammar_walks.compiler("json_tags").compile(grammar)
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


def test_a_format_without_a_grammar_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="whole_call") as caught:
        grammar_of("whole_call", asked(required()))
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequest) as caught:
        grammar_of("whole_call", asked(ToolChoice(), grammar=Grammar("json_object")))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("choice", "tools"),
    [(required(), ()), (ToolChoice(ToolMode.NAMED, name="nobody"), TOOLS)],
)
def test_a_call_needs_a_tool(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of("json_tags", asked(choice, tools=tools))
    assert caught.value.param == "tool_choice"
