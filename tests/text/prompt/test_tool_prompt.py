"""Tools in words, for templates that accept none; and what templates are probed for when loaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from firn.core.errors import BadRequest
from firn.core.values import Chat, Message, RawText, TextPart, Tool, ToolCall
from firn.text.calls.parsers import formats
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.template import Template
from firn.text.prompt.tool_prompt import with_tools_as_text
from firn.text.prompt.turn_rules import TurnRules
from firn.text.reply.formats import FALLBACK, detect_format
from tests import families
from tests.text.replies import read

LOOK = Tool("look", "Looks about.", {"type": "object", "properties": {"at": {"type": "string"}}})


def said(role: Any, text: str, **more: Any) -> Message:
    return Message(role, (TextPart(text),), **more)


SKY = ToolCall("c1", "look", {"at": "sky"})
CHAT = Chat(
    (
        said("system", "Be brief."),
        said("user", "How is it outside?"),
        said("assistant", "I look.", tool_calls=(SKY,)),
        said("tool", "blue", tool_call_id="c1"),
    ),
    tools=(LOOK,),
)


def text_of(family: str, chat: Chat, format: str = FALLBACK) -> str:
    tokenizer = families.tokenizer(family)
    made = PromptMaker(tokenizer, context_length=1 << 16, tool_format=format).make(chat)
    return tokenizer.decode(made.ids.tolist())


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_tools_calls_and_results_are_written_in_words(family: str) -> None:
    text = text_of(family, CHAT)
    assert text.index('"name": "look"') < text.index("Be brief.") < text.index("How is it")
    call = formats()[FALLBACK].write("look", {"at": "sky"})  # type: ignore[misc]
    assert f"<start_of_turn>model\nI look.\n{call}<end_of_turn>" in text
    assert '<tool_result name="look">\nblue\n</tool_result><end_of_turn>' in text


def test_a_result_may_name_any_tool() -> None:
    """A client may send a name with a NUL, or with braces."""
    for name in ("a\0b", "{text}", ""):
        result = said("tool", "blue", name=name)
        (turn,) = with_tools_as_text([result], (), formats()[FALLBACK])
        shown = f' name="{name}"' if name else ""
        assert turn.text == f"<tool_result{shown}>\nblue\n</tool_result>"


@pytest.mark.parametrize("format", [f.name for f in formats().values() if f.write])
def test_the_format_that_is_asked_for_is_the_one_that_is_read(format: str) -> None:
    text = text_of("gemma3", CHAT, format)
    write = formats()[format].write
    assert write is not None
    call = write("look", {"at": "sky"})
    assert call in text
    assert write("name_of_the_tool", {"name_of_an_argument": "value"}) in text
    made = detect_format(families.tokenizer("gemma3"), tool_override=format)
    assert read(made, [call], tools=(LOOK,)).calls[0].arguments == {"at": "sky"}


def test_a_template_without_tools_gets_our_format_by_itself() -> None:
    gemma, qwen = families.tokenizer("gemma3"), families.tokenizer("qwen3")
    assert detect_format(gemma).tool is None
    assert detect_format(gemma, takes_tools=False).tool == FALLBACK
    assert detect_format(gemma, takes_tools=False, tool_override="mistral").tool == "mistral"
    assert detect_format(gemma, takes_tools=False, tool_override="none").tool is None
    assert detect_format(qwen, takes_tools=True).tool == "json_tags"


def test_without_any_format_tools_are_refused() -> None:
    made = PromptMaker(families.tokenizer("gemma3"), context_length=4096)
    with pytest.raises(BadRequest, match="does not support tools"):
        made.make(CHAT)


def test_a_template_that_lists_tools_and_loses_calls_gets_those_in_words() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{{ tools | tojson }}<|im_start|>assistant\n"
    )
    tokenizer = families.with_template("qwen3", source)
    made = PromptMaker(tokenizer, context_length=4096, tool_format=FALLBACK).make(CHAT)
    text = tokenizer.decode(made.ids.tolist())
    assert '"arguments": {"at": "sky"}}\n</tool_call>' in text
    assert text.count("Looks about.") == 1


@pytest.mark.parametrize(
    ("asked_for", "written"),
    [
        ("<｜tool▁calls▁begin｜>NAME", '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sky"}'),
        (
            "<｜tool▁calls▁begin｜>```json",
            'function<｜tool▁sep｜>look\n```json\n{"at": "sky"}\n```',
        ),
    ],
)
def test_lost_calls_are_written_as_the_template_asks_for_them(asked_for: str, written: str) -> None:
    source = asked_for + "{{ tools }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    tokenizer = families.with_template("deepseek", source)
    form = detect_format(tokenizer).tool
    made = PromptMaker(tokenizer, context_length=4096, tool_format=form).make(CHAT)
    assert written in tokenizer.decode(made.ids.tolist())


def test_a_call_that_is_only_written_without_content_is_not_put_in_words() -> None:
    """As in DeepSeek R1 and V3, whose templates compare the content with none."""
    source = (
        "{{ tools }}{% for m in messages %}<｜User｜>{% if m.content is none %}"
        "{% for c in m.tool_calls %}[CALL {{ c.function.arguments.at }}]{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = families.with_template("deepseek", source)
    user, call, result = CHAT.messages[1], Message("assistant", tool_calls=(SKY,)), CHAT.messages[3]
    made = PromptMaker(tokenizer, context_length=4096, tool_format=FALLBACK)
    ids = made.make(Chat((user, call, result), tools=(LOOK,))).ids.tolist()
    assert "[CALL sky]" in tokenizer.decode(ids)
    assert "<tool_call>" not in tokenizer.decode(ids)


def test_calls_of_history_are_not_lost_where_no_format_is_known() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = families.with_template("qwen3", source)
    ids = PromptMaker(tokenizer, context_length=4096).make(Chat(CHAT.messages)).ids.tolist()
    assert '{"at": "sky"}' in tokenizer.decode(ids)


SHOWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[CALL {{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
)
ODD = {
    "it loops over tools": "{% for t in tools %}{{ t | tojson }}{% endfor %}" + SHOWN,
    "it wants long ids": "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length < 9 %}{{ raise_exception('ids') }}{% endif %}{% endfor %}{% endfor %}" + SHOWN,
    "it wants ids of nine letters": "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length > 9 %}{{ raise_exception('ids') }}{% endif %}{% endfor %}{% endfor %}" + SHOWN,
    "tools are a part of the system message": SHOWN.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.role == 'system' %}{{ tools }}{% endif %}"
    ),
    "an answer says something": "{{ tools }}{% for m in messages %}{% if m.role == 'assistant' and "
    "not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}{% endfor %}" + SHOWN,
    "calls are shown beside tools": "{{ tools }}" + SHOWN.replace(
        "m.tool_calls or []", "(m.tool_calls or [] if tools else [])"
    ),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("tools", [(LOOK,), ()])
@pytest.mark.parametrize("id", ["c1", "call_0123456789abcdef"])
def test_odd_templates_show_tools_calls_and_results(
    odd: str, tools: tuple[Tool, ...], id: str
) -> None:
    tokenizer = families.with_template("qwen3", ODD[odd])
    call = Message("assistant", tool_calls=(ToolCall(id, "look", {"at": "hazelsky"}),))
    chat = (said("user", "elmask"), call, said("tool", "lindenresult", tool_call_id=id))
    chat = (*chat, said("assistant", ""), said("user", "rowanask"))
    made = PromptMaker(tokenizer, context_length=4096, tool_format=FALLBACK)
    text = tokenizer.decode(made.make(Chat(chat, tools=tools)).ids.tolist())
    places = [text.find(words) for words in ("elmask", "hazelsky", "lindenresult", "rowanask")]
    assert -1 not in places
    assert places == sorted(places)
    assert ("Looks about." in text) == bool(tools)


ANOTHER_BRANCH = "{% if false %}{{ '{' + message.arguments + '}' }}{% endif %}"


@pytest.mark.parametrize("written", ["", " | tojson"])
@pytest.mark.parametrize("before", ["", ANOTHER_BRANCH])
def test_arguments_are_json_whichever_form_the_template_expects(written: str, before: str) -> None:
    source = before + "{{ tools }}" + SHOWN.replace(" | tojson", written)
    tokenizer = families.with_template("qwen3", source)
    text = tokenizer.decode(PromptMaker(tokenizer, context_length=4096).make(CHAT).ids.tolist())
    assert '[CALL {"at": "sky"}]' in text


NEEDS_A_QUESTION = {
    "it looks for one": "{{ tools }}{% if not (messages | selectattr('role', 'equalto', 'user') "
    "| list) %}{{ raise_exception('no question') }}{% endif %}" + SHOWN,
    "it writes the first message with the tools": "{{ tools }}<|im_start|>user\n"
    "{{ messages[0].content }}<|im_end|>\n{% set messages = messages[1:] %}" + SHOWN,
}  # fmt: skip


@pytest.mark.parametrize("odd", NEEDS_A_QUESTION)
def test_a_chat_that_begins_with_a_call_keeps_it(odd: str) -> None:
    tokenizer = families.with_template("qwen3", NEEDS_A_QUESTION[odd])
    call = Message("assistant", tool_calls=(ToolCall("c1", "look", {"at": "hazelsky"}),))
    chat = Chat((call, said("tool", "lindenresult", tool_call_id="c1")), tools=(LOOK,))
    made = PromptMaker(tokenizer, context_length=4096, tool_format=FALLBACK)
    text = tokenizer.decode(made.make(chat).ids.tolist())
    assert 0 < text.find("hazelsky") < text.find("lindenresult")


# --- what templates can do -----------------------------------------------------------------


@cache
def rules(family: str) -> TurnRules:
    return Template.read(families.tokenizer(family)).rules


RULES = {
    "qwen3": TurnRules(notes_in_results=True, no_question=False, system_alone=False),
    "qwen35": TurnRules(
        late_system=False, notes_in_results=True, no_question=False, system_alone=False
    ),
    "llama3": TurnRules(
        several_calls=False,
        text_beside_calls=False,
        assistant_first=False,
        no_question=False,
        system_alone=False,
    ),
    "nemo": TurnRules(
        leading_system=False,
        late_system=False,
        user_runs=False,
        text_beside_calls=False,
        text_before_calls=False,
        user_after_results=False,
        assistant_runs=False,
        assistant_first=False,
        no_question=False,
        unanswered=False,
        orphans=False,
        system_alone=False,
    ),
    "mistral": TurnRules(
        late_system=False,
        user_runs=False,
        user_after_results=False,
        assistant_runs=False,
        assistant_first=False,
        no_question=False,
        unanswered=False,
        orphans=False,
    ),
    "glm": TurnRules(notes_in_results=True),
    "deepseek": TurnRules(late_system=False),
    "gpt_oss": TurnRules(
        late_system=False,
        several_calls=False,
        text_beside_calls=False,
        text_before_calls=False,
        orphans=False,
    ),
}
ALONE = {"tools": False, "tools_alone": False, "calls": False, "calls_alone": False}
ALONE |= {"several_calls": False, "text_beside_calls": False, "text_before_calls": False}
ALONE |= {"user_after_results": False}
ALONE |= {
    "assistant_runs": False,
    "assistant_first": False,
    "no_question": False,
    "system_alone": False,
}
RULES["gemma3"] = TurnRules(late_system=False, user_runs=False, **ALONE)
RULES["gemma2"] = TurnRules(leading_system=False, late_system=False, user_runs=False, **ALONE)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_probing_finds_the_rules_of_every_family(family: str) -> None:
    assert rules(family) == RULES[family]


def test_a_model_without_a_template_is_not_probed() -> None:
    tokenizer = families.with_template("qwen3", None)

    class Unrendered:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def render(self, *args: Any, **options: Any) -> str:
            raise AssertionError("there is no template to render")

    unrendered: Any = Unrendered()
    assert unrendered.chat_template is None
    made = PromptMaker(unrendered, context_length=64).make(RawText("snow"))
    assert tokenizer.decode(made.ids.tolist()) == "snow"
