"""Tools in words, for templates that accept none; and what templates are probed for when loaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from firn.core.errors import BadRequest
from firn.core.values import Chat, Message, RawText, TextPart, Tool, ToolCall
from firn.text.formats import FALLBACK, detect_format
from firn.text.parsers import formats
from firn.text.prompt import PromptMaker
from firn.text.template import Template
from firn.text.tool_prompt import with_tools_as_text
from firn.text.turn_rules import TurnRules
from tests import families
from tests.text.replies import read

LOOK = Tool("look", "Looks about.", {"type": "object", "properties": {"at": {"type": "string"}}})


def said(role: Any, text: str, **more: Any) -> Message:
    return Message(role, (TextPart(text),), **more)


CHAT = Chat(
    (
        said("system", "Be brief."),
        said("user", "How is it outside?"),
        said("assistant", "I look.", tool_calls=(ToolCall("c1", "look", {"at": "sky"}),)),
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


# --- what templates can do -----------------------------------------------------------------


@cache
def rules(family: str) -> TurnRules:
    return Template.read(families.tokenizer(family)).rules


RULES = {
    "qwen3": TurnRules(notes_in_results=True, system_alone=False),
    "qwen35": TurnRules(late_system=False, notes_in_results=True, system_alone=False),
    "llama3": TurnRules(several_calls=False, assistant_first=False, system_alone=False),
    "mistral": TurnRules(
        late_system=False,
        user_runs=False,
        user_after_results=False,
        assistant_runs=False,
        assistant_first=False,
        unanswered=False,
        orphans=False,
    ),
    "glm": TurnRules(notes_in_results=True),
    "deepseek": TurnRules(late_system=False),
    "gpt_oss": TurnRules(late_system=False, several_calls=False, orphans=False),
}
ALONE = {"tools": False, "calls": False, "several_calls": False, "user_after_results": False}
ALONE |= {"assistant_runs": False, "assistant_first": False, "system_alone": False}
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
