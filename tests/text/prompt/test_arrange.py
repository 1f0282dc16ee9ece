from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from firn.core.values import Message, PicturePart, TextPart, Tool, ToolCall
from firn.text.prompt.arrange import BESIDE_CALL, arrange, strip_changing_lines
from firn.text.prompt.messages import (
    TemplateStyle,
    normalize_calls,
    short_id,
    to_template,
    tools_to_template,
)
from firn.text.prompt.turn_rules import TurnRules


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
PICTURE = PicturePart("data:image/png;base64,AA==")
SHOWS = Message("user", (TextPart("see"), PICTURE))

TABLE = {
    "nothing to do": ((system("s"), user("u")), (system("s"), user("u"))),
    "system merges": ((system("a"), system("b"), user("u")), (system("a\n\nb"), user("u"))),
    "late system stays": (
        (system("a"), user("u"), assistant("x"), system("s"), user("v")),
        (system("a"), user("u"), assistant("x"), system("s"), user("v")),
    ),
    "a late system message that says nothing goes": (
        (user("u"), system(" "), system("x-anthropic-billing-header: cch=1"), user("v")),
        (user("u"), user("v")),
    ),
    "users stay apart": ((user("a"), user("b")), (user("a"), user("b"))),
    "users around an assistant do not": (
        (user("a"), assistant("x"), user("b")),
        (user("a"), assistant("x"), user("b")),
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
    "an empty system message is kept": ((system(""), user("u")), (system(""), user("u"))),
    "and so is one without parts": ((system(), user("u")), (system(), user("u"))),
    "a user may quote the line": (
        (user("x-anthropic-billing-header: cch=1"),),
        (user("x-anthropic-billing-header: cch=1"),),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_where_all_turns_are_allowed_only_system_messages_change(case: str) -> None:
    before, after = TABLE[case]
    kept = copy.deepcopy(before)
    assert arrange(before, TurnRules()) == after
    assert before == kept
    assert arrange(after, TurnRules()) == after


ALTERNATING = TurnRules(late_system=False, user_runs=False, user_after_results=False)
NOTE = said("user", "note", aside=True)
TWO_CALLS = assistant("x", tool_calls=(CALL, ToolCall("c2", "g", {})), reasoning="hm")


def late(text: str) -> str:
    return f"<system-message>\n{text}\n</system-message>"


STRICT = {
    "users merge": ((user("a"), user("b"), user("c")), (user("a\n\nb\n\nc"),)),
    "an empty user adds no blank line": ((user("a"), user(""), user("c")), (user("a\n\nc"),)),
    "parts of one message stay apart": ((user("a", "b"), user("c")), (user("a", "b\n\nc"),)),
    "a picture stays where it is": (
        (SHOWS, user("what?")),
        (Message("user", (TextPart("see"), PICTURE, TextPart("what?"))),),
    ),
    "text before a picture": (
        (user("look"), SHOWS),
        (Message("user", (TextPart("look\n\nsee"), PICTURE)),),
    ),
    "late system joins the turn after it": (
        (system("a"), user("u"), assistant("x"), system("s"), user("v")),
        (system("a"), user("u"), assistant("x"), said("user", late("s") + "\n\nv", aside=True)),
    ),
    "or the one before it": (
        (user("u"), assistant("x"), user("v"), system("s")),
        (user("u"), assistant("x"), user("v\n\n" + late("s"))),
    ),
    "or is a turn by itself": (
        (user("u"), assistant("x"), system("s"), assistant("y")),
        (user("u"), assistant("x"), said("user", late("s"), aside=True), assistant("y")),
    ),
    "after results it is a part of the last": (
        (user("u"), CALLS, RESULT, OTHER_RESULT, system("s"), user("v")),
        (user("u"), CALLS, RESULT, said("tool", f"43\n\n{late('s')}\n\nv", tool_call_id="c2")),
    ),
}


@pytest.mark.parametrize("case", STRICT)
def test_what_a_strict_template_gets(case: str) -> None:
    before, after = STRICT[case]
    assert arrange(before, ALTERNATING) == after


NO_RESULT = "(There is no result.)"
EARLIER = "(The conversation began earlier.)"
INTERRUPTED = {
    "an abandoned call gets a result": (
        TurnRules(unanswered=False),
        (user("u"), CALLS, user("v"), CALLS, RESULT, CALLS, assistant("x")),
        (
            *(user("u"), CALLS, said("tool", NO_RESULT, tool_call_id="c1"), user("v")),
            *(CALLS, RESULT, CALLS, said("tool", NO_RESULT, tool_call_id="c1"), assistant("x")),
        ),
    ),
    "so do those beside one that has its own": (
        TurnRules(unanswered=False),
        (user("u"), TWO_CALLS, RESULT, user("v"), TWO_CALLS, OTHER_RESULT, assistant("x")),
        (
            *(user("u"), TWO_CALLS, RESULT, said("tool", NO_RESULT, tool_call_id="c2"), user("v")),
            *(TWO_CALLS, OTHER_RESULT, said("tool", NO_RESULT, tool_call_id="c1"), assistant("x")),
        ),
    ),
    "in turn, where a template takes one call at a time": (
        TurnRules(unanswered=False, several_calls=False),
        (user("u"), TWO_CALLS, OTHER_RESULT, user("v")),
        (
            *(user("u"), assistant("x", tool_calls=(CALL,), reasoning="hm")),
            said("tool", NO_RESULT, tool_call_id="c1"),
            *(assistant(tool_calls=(ToolCall("c2", "g", {}),)), OTHER_RESULT, user("v")),
        ),
    ),
    "results that come late or without an id count": (
        TurnRules(unanswered=False),
        (
            *(user("u"), TWO_CALLS, RESULT, user("v"), OTHER_RESULT, assistant("x")),
            *(user("u"), TWO_CALLS, said("tool", "a"), said("tool", "b"), user("v")),
            *(TWO_CALLS, said("tool", "a"), user("v")),
        ),
        (
            *(user("u"), TWO_CALLS, RESULT, user("v"), OTHER_RESULT, assistant("x")),
            *(user("u"), TWO_CALLS, said("tool", "a"), said("tool", "b"), user("v")),
            *(TWO_CALLS, said("tool", "a"), said("tool", NO_RESULT, tool_call_id="c2"), user("v")),
        ),
    ),
    "some of the last calls may still get theirs": (
        TurnRules(unanswered=False),
        (user("u"), TWO_CALLS, RESULT),
        (user("u"), TWO_CALLS, RESULT),
    ),
    "the last call may still get its own": (
        TurnRules(unanswered=False),
        (user("u"), CALLS),
        (user("u"), CALLS),
    ),
    "a result without a call is a user's text": (
        TurnRules(orphans=False),
        (user("u"), RESULT, CALLS, RESULT, OTHER_RESULT),
        (user("u"), user("42"), CALLS, RESULT, user("43")),
    ),
    "answers in a row become one": (
        TurnRules(assistant_runs=False),
        (user("u"), assistant("x", reasoning="a"), assistant("y", reasoning="b"), CALLS, RESULT),
        (user("u"), assistant("x\n\ny", reasoning="a\n\nb", tool_calls=(CALL,)), RESULT),
    ),
    "an answer at the beginning gets a turn before it": (
        TurnRules(assistant_first=False),
        (system("s"), assistant("x"), user("u")),
        (system("s"), user(EARLIER), assistant("x"), user("u")),
    ),
    "so does a result": (
        TurnRules(assistant_first=False),
        (RESULT, assistant("x")),
        (user(EARLIER), RESULT, assistant("x")),
    ),
    "one who never asks gets a turn, too": (
        TurnRules(no_question=False),
        (assistant("x"), CALLS, RESULT),
        (user(EARLIER), assistant("x"), CALLS, RESULT),
    ),
    "one who asks later does not": (
        TurnRules(no_question=False),
        (assistant("x"), user("u")),
        (assistant("x"), user("u")),
    ),
    "something is left where nothing was said": (
        TurnRules(empty_answers=False),
        (assistant(""),),
        (user(EARLIER),),
    ),
    "an answer that says nothing is left out": (
        TurnRules(empty_answers=False, user_runs=False),
        (user("u"), assistant(" "), user("v"), assistant(reasoning="a"), user("w"), CALLS, RESULT),
        (user("u\n\nv\n\nw"), CALLS, RESULT),
    ),
    "a lone system message becomes a user's": (
        TurnRules(system_alone=False),
        (system("a"), system("b")),
        (user("a\n\nb"),),
    ),
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_what_interrupted_agents_leave_can_be_rendered(case: str) -> None:
    rules, before, after = INTERRUPTED[case]
    assert arrange(before, rules) == after


def test_a_programs_note_joins_the_results_where_a_turn_would_change_the_prefix() -> None:
    chat = (user("u"), CALLS, RESULT, NOTE)
    assert arrange(chat, TurnRules()) == chat
    inside = arrange(chat, TurnRules(notes_in_results=True))
    assert inside == (user("u"), CALLS, said("tool", "42\n\nnote", tool_call_id="c1"))
    asked = (user("u"), CALLS, RESULT, user("and now?"))
    assert arrange(asked, TurnRules(notes_in_results=True)) == asked


def test_calls_made_at_once_become_calls_in_turn() -> None:
    strange = said("tool", "?", tool_call_id="c9")
    chat = (user("u"), TWO_CALLS, OTHER_RESULT, strange, RESULT, user("v"))
    assert arrange(chat, TurnRules(several_calls=False)) == (
        user("u"),
        assistant("x", tool_calls=(CALL,), reasoning="hm"),
        RESULT,
        assistant(tool_calls=(ToolCall("c2", "g", {}),)),
        OTHER_RESULT,
        strange,
        user("v"),
    )


def test_the_text_beside_calls_becomes_a_turn_where_the_template_shows_it_only_there() -> None:
    chat = (user("u"), TWO_CALLS, RESULT, OTHER_RESULT, CALLS, RESULT)
    apart = (assistant("x"), replace(TWO_CALLS, parts=()))
    rules = TurnRules(text_beside_calls=False)
    assert arrange(chat, rules) == (user("u"), *apart, RESULT, OTHER_RESULT, CALLS, RESULT)
    one_by_one = arrange(chat[:4], replace(rules, several_calls=False, assistant_runs=False))
    assert one_by_one == (
        *(user("u"), assistant("x"), assistant(tool_calls=(CALL,), reasoning="hm"), RESULT),
        *(assistant(tool_calls=(ToolCall("c2", "g", {}),)), OTHER_RESULT),
    )


def test_the_text_beside_calls_is_in_a_result_where_the_template_has_no_place_for_it() -> None:
    rules = TurnRules(text_beside_calls=False, text_before_calls=False)
    chat = (user("u"), TWO_CALLS, RESULT, OTHER_RESULT, CALLS, RESULT)
    result = replace(RESULT, parts=(TextPart(f"{BESIDE_CALL.format('x')}\n\n{RESULT.text}"),))
    arranged = (user("u"), replace(TWO_CALLS, parts=()), result, OTHER_RESULT, CALLS, RESULT)
    assert arrange(chat, rules) == arranged
    for n in range(3, len(chat)):
        assert arrange(chat[:n], rules) == arranged[:n]
    one_by_one = arrange(chat[:4], replace(rules, several_calls=False))
    assert [m.text for m in one_by_one] == ["u", "", result.text, "", OTHER_RESULT.text]
    noted = arrange((*chat[:3], user("v")), replace(rules, user_after_results=False))
    assert noted[-1].text == f"{result.text}\n\nv"
    waiting = arrange(chat[:2], rules)
    assert waiting == chat[:2], "nothing carries the text of a call that has no result"
    assert arrange(chat, replace(rules, calls=False)) == chat, "calls are text already"


def test_tools_that_the_template_writes_into_a_system_message_get_one() -> None:
    rules = TurnRules(tools_alone=False)
    assert arrange((user("u"),), rules, with_tools=True) == (system(), user("u"))
    assert arrange((user("u"),), rules) == (user("u"),)
    told = (system("s"), user("u"))
    assert arrange(told, rules, with_tools=True) == told


def test_without_a_system_role_the_system_prompt_opens_the_first_user_turn() -> None:
    mute = TurnRules(leading_system=False)
    assert arrange((system("s"), user("u")), mute) == (user("s\n\nu"),)
    assert arrange((system("s"), assistant("x")), mute) == (user("s"), assistant("x"))
    assert arrange((system(" "), user("u")), mute) == (user("u"),)


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


@pytest.mark.parametrize("text", ["x-" + "billing" * 100_000, " " * 700_000, "x-" + "-" * 700_000])
def test_an_endless_line_takes_linear_time(text: str) -> None:
    """Backtracking would take hours, with Python's lock held."""
    assert strip_changing_lines(text) == text


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
    (normal,) = normalize_calls((message,), TemplateStyle())
    assert normal.tool_calls[0].arguments == reaches
    (rendered,) = to_template((normal,))
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


def test_calls_and_results_follow_the_templates_style() -> None:
    messages = (assistant(reasoning="hm", tool_calls=(CALL,)), RESULT)
    style = TemplateStyle(
        none_content=True,
        short_ids=True,
        text_arguments=True,
        names_results=True,
        reasoning_key="thinking",
    )
    said, result = to_template(normalize_calls(messages, style), style=style)
    assert said["content"] is None
    assert said["thinking"] == "hm"
    assert said["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert said["tool_calls"][0]["id"] == result["tool_call_id"] == short_id("c1")
    assert result["name"] == "f"


def test_reasoning_and_the_text_beside_calls_are_one_where_the_template_takes_one() -> None:
    style = TemplateStyle(reasoning_key="thinking", either_reasoning=True)
    both = assistant("text", reasoning="hm", tool_calls=(CALL,))
    (fields,) = to_template((both,), style=style)
    assert (fields["thinking"], fields["content"]) == ("hm\n\ntext", "")
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
