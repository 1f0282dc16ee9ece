from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from firn.core.errors import BadRequest, ContextTooLong
from firn.core.values import (
    Chat,
    Message,
    PicturePart,
    Prompt,
    RawText,
    RawTokens,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.messages import to_template
from firn.text.prompt.template import Template, read_style
from tests import families
from tests.text.trained import CHATML, TrainedTokenizer, byte_level, fallback

LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|odd_close|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = (
    "<bos>{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
MISTRAL = (
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ first if loop.first }}{{ m.content }}"
    "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
NEMO = (
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{{ first if loop.last }}{{ m.content }}"
    "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
UNKNOWN = (
    "{% for m in messages %}<|odd_open|>{{ m.role }}: {{ m.content }}<|odd_close|>\n{% endfor %}"
    "<|odd_open|>assistant: "
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "nemo": NEMO,
    "no system": NO_SYSTEM,
    "unknown": UNKNOWN,
}


def said(role: str, text: str, **more: object) -> Message:
    return Message(role, (TextPart(text),), **more)  # type: ignore[arg-type]


SYSTEM = said("system", "You are a helpful fox. Be brief, and never bark at the dog.")
TURNS = [said("user", "Who are you?"), said("assistant", "A fox."), said("user", "Sure?")]


def maker(template: str | None = CHATML, *, context_length: int = 4096) -> PromptMaker:
    return PromptMaker(byte_level().with_template(template), context_length=context_length)


def chat(*messages: Message, **more: object) -> Chat:
    return Chat(messages, **more)  # type: ignore[arg-type]


def shared(a: Prompt, b: Prompt) -> int:
    """How many tokens two prompts have in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a.ids[:n] != b.ids[:n])
    return int(differ[0]) if len(differ) else n


def test_ids_and_boundaries_of_a_chat() -> None:
    tokenizer = byte_level()
    prompt = maker().make(chat(SYSTEM, *TURNS))
    assert prompt.ids.dtype == np.int64
    text = tokenizer.decode(prompt.ids.tolist())
    assert text.count("<|im_start|>") == 5
    assert text.endswith("<|im_start|>assistant\n")
    start = tokenizer.token_id("<|im_start|>")
    *ends, last = prompt.boundaries
    assert [prompt.ids[p] for p in ends] == [start] * 3
    assert last == len(prompt) - 1
    assert list(prompt.boundaries) == sorted(set(prompt.boundaries))


@pytest.mark.parametrize(
    ("template", "kwargs", "kept"),
    [
        pytest.param(CHATML, {}, True, id="a header like any other"),
        pytest.param(CHATML, {"enable_thinking": False}, True, id="no thought, this time"),
        pytest.param(CHATML, {"enable_thinking": True}, False, id="it opens a thought"),
        pytest.param(MISTRAL, {}, True, id="there is none"),
    ],
)
def test_the_last_boundary_is_where_the_next_turn_departs(
    template: str, kwargs: dict[str, Any], kept: bool
) -> None:
    tokenizer = byte_level()
    make = maker(template).make
    now = make(replace(chat(*TURNS), template_kwargs=kwargs))
    end = now.boundaries[-1]
    assert (end == len(now) - 1) == kept
    if not kept:
        assert now.ids[end] == tokenizer.token_id("<|im_start|>")
    going_on = (said("assistant", "Yes."), said("user", "Good."))
    later = make(replace(chat(*TURNS, *going_on), template_kwargs=kwargs))
    assert end <= shared(now, later)


def test_a_reply_that_is_continued_has_no_header() -> None:
    prompt = maker().make(replace(chat(*TURNS, said("assistant", "Yes, and")), continues=True))
    assert prompt.ids[prompt.boundaries[-1]] == byte_level().token_id("<|im_start|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_next_turn_resumes_before_the_generation_prompt(name: str) -> None:
    """The last boundary is within what the next prompt shares, and less than a header is lost."""
    make = maker(TEMPLATES[name]).make
    now = make(chat(SYSTEM, *TURNS))
    later = make(chat(SYSTEM, *TURNS, said("assistant", "Yes."), said("user", "Good.")))
    common = shared(now, later)
    assert now.boundaries[-1] <= common
    assert len(now) - now.boundaries[-1] < 12


@pytest.mark.parametrize("name", TEMPLATES)
def test_another_chat_shares_the_system_prompt(name: str) -> None:
    """There is a boundary at the end of the system prompt, give or take a separator."""
    make = maker(TEMPLATES[name]).make
    one = make(chat(SYSTEM, said("user", "Who are you?")))
    two = make(chat(SYSTEM, said("user", "Bark, please. And then sit down for a while.")))
    common = shared(one, two)
    best = max((p for p in one.boundaries if p <= common), default=0)
    assert best > 0
    assert common - best < 8
    assert best in two.boundaries


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_system_prompt_is_shared_by_all_turns(name: str) -> None:
    make = maker(TEMPLATES[name]).make
    turns = (*TURNS, said("assistant", "Yes."), said("user", "Good."))
    first, *later = (make(chat(SYSTEM, *turns[:n])) for n in (1, 3, 5))
    bytes_before = len(byte_level().decode(first.ids.tolist()).partition("Who are you?")[0])
    for prompt in later:
        text = byte_level().decode(prompt.ids[: shared(first, prompt)].tolist())
        assert len(text) >= bytes_before


def test_a_system_prompt_inside_the_first_user_turn_has_a_boundary_with_byte_fallback() -> None:
    tokenizer = fallback(strips=True).with_template(GEMMA)
    prompt = PromptMaker(tokenizer, context_length=4096).make(chat(SYSTEM, TURNS[0]))
    shown = [tokenizer.decode(prompt.ids[:p].tolist()) for p in prompt.boundaries]
    assert any(text.endswith(SYSTEM.text) for text in shown)


class Lowering(TrainedTokenizer):
    """Decodes to lower case."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).lower()


def test_a_tokenizer_that_changes_the_text_gives_no_boundary_inside_a_turn() -> None:
    plain = byte_level().with_template(GEMMA)
    lowering = Lowering(plain._tokenizer, byte_level=True, chat_template=GEMMA)
    source = chat(SYSTEM, TURNS[0])
    exact, changed = (
        PromptMaker(tokenizer, context_length=4096).make(source).boundaries
        for tokenizer in (plain, lowering)
    )
    assert set(changed) < set(exact)


def test_a_template_without_control_tokens_has_no_message_boundaries() -> None:
    prompt = maker(PLAIN).make(chat(TURNS[0]))
    assert prompt.boundaries == ()


def test_boundaries_of_a_long_chat_are_one_a_message() -> None:
    messages = [said(("user", "assistant")[i % 2], f"message {i}") for i in range(299)]
    prompt = maker(context_length=100_000).make(chat(*messages))
    assert len(prompt.boundaries) == 299


def test_thinking_only_changes_the_tail() -> None:
    plain = maker().make(chat(*TURNS))
    thinking = maker().make(chat(*TURNS), reasoning=Reasoning(enabled=True))
    assert shared(plain, thinking) == len(plain)
    assert maker().tail(thinking).endswith("<|im_start|>assistant\n<think>\n")
    override = chat(*TURNS, template_kwargs={"enable_thinking": False})
    assert len(maker().make(override, reasoning=Reasoning(enabled=True))) == len(plain)


def test_tools_and_calls_are_rendered() -> None:
    call = Message("assistant", (), tool_calls=(ToolCall("c1", "bark", '{"times": 2}'),))
    source = chat(TURNS[0], call, tools=(Tool("bark"),))
    text = byte_level().decode(maker().make(source).ids.tolist())
    assert "Tools:" in text
    assert '"times": 2' in text


def test_a_choice_changes_nothing_of_the_prompt() -> None:
    source = chat(TURNS[0], tools=(Tool("bark"),))
    for mode in ToolMode:
        chosen = replace(source, tool_choice=ToolChoice(mode, name="bark"))
        np.testing.assert_array_equal(maker().make(chosen).ids, maker().make(source).ids)


def test_raw_texts_and_raw_tokens_are_taken_as_they_are() -> None:
    tokenizer = byte_level()
    prompt = maker().make(RawText("The quick brown"))
    assert prompt.ids.tolist() == tokenizer.encode("The quick brown", add_special=True)
    assert maker().make(RawTokens((5, 6, 7))).ids.tolist() == [5, 6, 7]
    assert prompt.boundaries == ()


def test_half_a_surrogate_pair_becomes_a_character() -> None:
    prompt = maker().make(chat(said("user", "a\ud83db")))
    assert "a\ufffdb" in byte_level().decode(prompt.ids.tolist())


def test_room_for_one_token_must_remain() -> None:
    maker(context_length=4).make(RawTokens((1, 2, 3)))
    with pytest.raises(ContextTooLong) as e:
        maker(context_length=3).make(RawTokens((1, 2, 3)))
    assert (e.value.n_prompt, e.value.limit) == (3, 3)


PICTURE = Message("user", (TextPart("see"), PicturePart("x", "messages.0.content.1")))
BAD = {
    "no text": (CHATML, RawText(""), "prompt"),
    "no ids": (CHATML, RawTokens(()), "prompt"),
    "ids too large": (CHATML, RawTokens((2**70,)), "prompt"),
    "no messages": (CHATML, chat(), "messages"),
    "no template": (None, chat(*TURNS), "messages"),
    "no tools in the template": (LLAMA, chat(*TURNS, tools=(Tool("f"),)), "tools"),
    "pictures": (CHATML, chat(PICTURE), "messages.0.content.1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_name_what_is_wrong(case: str) -> None:
    template, source, param = BAD[case]
    with pytest.raises(BadRequest) as e:
        maker(template).make(source)
    assert e.value.param == param


STYLES = [
    ("{{ message['content'] is none }}", "none_content"),
    ("{% if message.content is not none %}", "none_content"),
    ("{% if tool_call.id|length != 9 %}", "short_ids"),
    ("{{ '<sep>' + tool['function']['arguments'] + '<end>' }}", "text_arguments"),
    ("{{ 'json\n' + call.function.arguments }}", "text_arguments"),
    ("{{ message.name }}", "names_results"),
    ("raise('Cannot pass both content and thinking')", "either_reasoning"),
]


@pytest.mark.parametrize(("source", "trait"), STYLES)
def test_the_style_is_read_from_the_templates_source(source: str, trait: str) -> None:
    assert getattr(read_style(source), trait) is True
    assert getattr(read_style(CHATML), trait) is False


SAYS = "{% for m in messages %}[{{ m.role }}]FIELD{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'thinking' %}<{{ p.thinking }}>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
THOUGHTS = {
    "reasoning_content": (SAYS.replace("FIELD", "{{ m.reasoning_content }}"), "hmyes"),
    "reasoning": (SAYS.replace("FIELD", "{{ m.get('reasoning', '') }}"), "hmyes"),
    "thinking": (SAYS.replace("FIELD", "{{ m['thinking'] }}"), "hmyes"),
    "either of two": (SAYS.replace("FIELD", "{{ m.thinking or m.reasoning_content }}"), "hmyes"),
    "only beside calls": (
        SAYS.replace("FIELD", "{% if m.tool_calls or loop.last %}{{ m.reasoning }}{% endif %}"),
        "hmyes",
    ),
    "a part of the content": (PARTS, "<hm>yes"),
    "nowhere": (SAYS.replace("FIELD", ""), "yes"),
}


@pytest.mark.parametrize("field", THOUGHTS)
def test_reasoning_is_where_the_template_looks_for_it(field: str) -> None:
    source, shown = THOUGHTS[field]
    tokenizer = families.with_template("llama3", source)
    style = Template.read(tokenizer).style
    asked = Message("user", (TextPart("why"),))
    chat = (asked, Message("assistant", (TextPart("yes"),), reasoning="hm"))
    text = tokenizer.render(to_template(chat, style=style), tools=None, kwargs={})
    assert text == f"[user]why[assistant]{shown}"


def test_the_styles_of_families_are_read_from_their_sources() -> None:
    assert read_style(families.template("mistral")).short_ids


# --- continuing a reply --------------------------------------------------------------------


@pytest.mark.parametrize(
    "last",
    [
        said("user", "Who?"),
        said("assistant", "  "),
        Message("assistant", (), tool_calls=(ToolCall("1", "look", {}),)),
    ],
    ids=["user", "empty", "call"],
)
def test_only_an_assistants_text_can_be_continued(last: Message) -> None:
    with pytest.raises(BadRequest, match="continued"):
        maker().make(chat(SYSTEM, *TURNS, last, continues=True))
