"""What firn says of a chat template that drops or moves text as a chat grows."""

from __future__ import annotations

import pytest

from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.text.prompt.template import Template
from firn.text.prompt.template_losses import (
    DATE,
    ENDS_WITH_RULES,
    REASONING_GOES,
    SETS_DATE,
    TEXT_MOVES,
    TOOLS_MOVE,
    TURNS_CHANGE,
    losses,
)
from tests import families

LOSSES = {
    "qwen3": (REASONING_GOES,),
    "qwen35": (TURNS_CHANGE,),
    "glm": (REASONING_GOES,),
    "nemo": (TOOLS_MOVE, TEXT_MOVES),
    "gpt_oss": (REASONING_GOES, TEXT_MOVES),
}


def lost(tokenizer: HfTokenizer, **kwargs: bool) -> tuple[str, ...]:
    return losses(tokenizer, Template.read(tokenizer), kwargs=kwargs)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_a_template_loses_is_told_by_name(family: str) -> None:
    assert lost(families.tokenizer(family)) == LOSSES.get(family, ())


@pytest.mark.parametrize("date", ["strftime_now('%d %B')", "'Tools: ' + functions + datetime"])
def test_a_date_in_the_prompt_is_told(date: str) -> None:
    source = f"{{{{ {date} }}}}" + families.template("llama3")
    assert lost(families.with_template("llama3", source)) == (DATE,)


@pytest.mark.parametrize("variable", ["date_string", "current_date"])
def test_the_variable_that_sets_the_date_is_named(variable: str) -> None:
    now = f"{{{{ {variable} if {variable} is defined else strftime_now('%d %B') }}}}"
    tokenizer = families.with_template("llama3", now + families.template("llama3"))
    assert lost(tokenizer) == (DATE + SETS_DATE.format(variable),)
    rules = Template.read(tokenizer)
    assert losses(tokenizer, rules, kwargs={variable: "26 July"}) == ()


def test_instructions_after_the_newest_message_are_told() -> None:
    source = families.template("llama3") + "Write a call, or an answer in plain text. " * 5
    assert lost(families.with_template("llama3", source)) == (ENDS_WITH_RULES,)


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ messages[-1].content }}", ""])
def test_a_template_that_hardly_works_is_examined_all_the_same(source: str) -> None:
    assert lost(families.with_template("llama3", source)) == ()


@pytest.mark.parametrize(
    ("condition", "variable", "value"),
    [
        ("or (preserve_thinking is defined and preserve_thinking)", "preserve_thinking", True),
        ("or (clear_thinking is defined and not clear_thinking)", "clear_thinking", False),
    ],
)
def test_a_variable_that_keeps_reasoning_is_named(
    condition: str, variable: str, value: bool
) -> None:
    source = families.template("glm").replace(
        "loop.index0 > turns.question", f"(loop.index0 > turns.question {condition})"
    )
    tokenizer = families.with_template("glm", source)
    (phrase,) = lost(tokenizer)
    assert phrase.startswith(REASONING_GOES)
    assert f'{{"{variable}": {str(value).lower()}}}' in phrase
    assert lost(tokenizer, **{variable: value}) == ()
