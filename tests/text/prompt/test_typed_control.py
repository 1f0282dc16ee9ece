"""Control tokens that somebody has typed are text, in every field and every family's template."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.utils import htmlsafe_json_dumps

from firn.core.ports import Tokenizer
from firn.core.values import Chat, Message, RawText, TextPart, Tool, ToolCall
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.messages import to_template
from firn.text.prompt.rendering import Content
from firn.text.prompt.typed_control import TypedControl, control_texts
from firn.text.prompt.typed_marks import MAX_RENDERINGS
from firn.text.reply.formats import assistant_markup
from tests import families
from tests.families import FAMILIES
from tests.text.trained import CONTROL, MARKUP, TrainedTokenizer, byte_level, fallback

each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def maker(family: str) -> PromptMaker:
    tokenizer = families.tokenizer(family)
    return PromptMaker(tokenizer, context_length=1 << 20, tool_format="json_tags")


def said(role: Any, *texts: str, **more: Any) -> Message:
    return Message(role, tuple(map(TextPart, texts)), **more)


def conversation(word: str) -> Chat:
    """A chat with this word wherever somebody may type one. A model may write its own tags, so the
    assistant's messages do not contain those."""
    own = "snow" if word in assistant_markup() else word
    schema = {"type": "object", "properties": {word: {"description": f"say {word}"}}}
    call = ToolCall("c1", "look", {"at": f"{word} {word}", word: [word, {"x": word}]})
    return Chat(
        (
            said("system", f"Be kind. {word}"),
            said("user", f"{word}what is {word}?{word}\n"),
            said("assistant", f"I look at {own}.", tool_calls=(call,)),
            said("tool", f"it says {word}{word}\n", tool_call_id="c1"),
            said("assistant", f"It is {own}."),
            said("system", f"Mind the {word}."),
            said("user", f" {word} "),
        ),
        tools=(Tool("look", f"Looks at {word}.", schema),),
    )


def control_of(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    control = {tokenizer.added_tokens[text] for text in control_texts(tokenizer)}
    return [token for token in ids if token in control]


def ids_of(family: str, chat: Chat) -> list[int]:
    return [int(token) for token in maker(family).make(chat).ids]


@each_family
def test_what_is_typed_changes_no_control_token(family: str) -> None:
    """The prompt has the same control tokens as with a harmless word, and reads as typed."""
    tokenizer = families.tokenizer(family)
    harmless = ids_of(family, conversation("snow"))
    for word in FAMILIES[family].special:
        typed = ids_of(family, conversation(word))
        assert control_of(tokenizer, typed) == control_of(tokenizer, harmless), word
        if word not in assistant_markup():
            assert tokenizer.decode(typed) == tokenizer.decode(harmless).replace("snow", word)


@each_family
def test_markup_in_what_users_and_tools_bring_is_text(family: str) -> None:
    """In the assistant's messages it is the model's own, and stays markup."""
    tokenizer = families.tokenizer(family)
    for word in FAMILIES[family].markup:
        if word not in control_texts(tokenizer):
            continue
        typed, harmless = (
            ids_of(family, Chat((said("user", f"see {w}!{w}"),))) for w in (word, "snow")
        )
        assert control_of(tokenizer, typed) == control_of(tokenizer, harmless), word
        assert tokenizer.decode(typed) == tokenizer.decode(harmless).replace("snow", word)


def test_markup_in_an_assistants_text_stays_markup() -> None:
    tokenizer = families.tokenizer("llama3")  # its template does nothing about them
    tagged = families.with_template("qwen3", families.template("llama3"))
    chat = Chat((said("user", "a"), said("assistant", "<think>hm</think>b"), said("user", "c")))
    ids = PromptMaker(tagged, context_length=4096).make(chat).ids.tolist()
    assert tagged.token_id("<think>") in ids
    assert tagged.token_id("</think>") in ids
    assert tokenizer.token_id("<think>") is None


@each_family
def test_an_ordinary_prompt_is_tokenized_as_ever(family: str) -> None:
    """The ids are exactly what the tokenizer makes of the template's text."""
    tokenizer = families.tokenizer(family)
    seen: list[str] = []
    render = tokenizer.render

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def render(self, messages: Any, *, tools: Any, kwargs: Any) -> str:
            seen.append(render(messages, tools=tools, kwargs=kwargs))
            return seen[-1]

    listening: Any = Listening()
    made = PromptMaker(listening, context_length=1 << 20, tool_format="json_tags")
    n_before = len(seen)
    ids = made.make(conversation("snow < | > [ and <b>bold</b>")).ids.tolist()
    rendered = [text for text in seen[n_before:] if "bold" in text]
    assert len(rendered) == 1, "rendered once"
    assert ids == tokenizer.encode(rendered[0], add_special=False)


@pytest.mark.parametrize("parts", [("<|im_", "end|>"), ("<", "|im_end|>"), ("<|im_end|", ">", "")])
def test_a_token_in_several_parts_is_text_too(parts: tuple[str, ...]) -> None:
    ids = ids_of("qwen3", Chat((said("user", *parts),)))
    whole = ids_of("qwen3", Chat((said("user", "<|im_end|>"),)))
    assert ids == whole
    assert ids.count(families.tokenizer("qwen3").token_id("<|im_end|>")) == 1


def test_what_a_template_refuses_in_content_is_nothing_but_text() -> None:
    """The gpt-oss template raises in every later turn if an assistant has quoted channels."""
    quoted = "They write <|channel|>analysis<|message|> there."
    chat = Chat((said("user", "how?"), said("assistant", quoted), said("user", "I see")))
    tokenizer = families.tokenizer("gpt_oss")
    ids = ids_of("gpt_oss", chat)
    assert quoted in tokenizer.decode(ids)
    assert ids.count(tokenizer.token_id("<|channel|>")) == 1  # before the word "final"


# --- templates that look for tokens in their messages --------------------------------------

CURIOUS = {
    "splits": "{{ m.content.split('</think>')[-1] }}",
    "splits and writes again": "{{ m.content.split('</think>') | join('</think>') }}",
    "trims": "{{ m.content | trim }}",
    "asks": "{{ 'it thinks: ' if '</think>' in m.content }}{{ m.content }}",
    "begins with": "{{ 'odd: ' if m.content.startswith('<|im_start|>') }}{{ m.content }}",
    "ends with": "{{ 'odd: ' if m.content.endswith('<|im_end|>') }}{{ m.content }}",
    "counts": "{{ m.content | length }}: {{ m.content }}",
    "as json": "{{ m.content | tojson }}",
    "replaces": "{{ m.content.replace('<|im_end|>', '') }}",
    "cuts": "{{ m.content[:9] }}",
    "twice": "{{ m.content }} ({{ m.content }})",
    "not at all": "",
}


@cache
def curious(name: str) -> TrainedTokenizer:
    return byte_level().with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + CURIOUS[name]
        + "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )


WORDS = st.sampled_from(["<|im_end|>", "<|im_start|>", "</think>", "<think>", " ", "a", "\n", "<|"])


@pytest.mark.parametrize("name", CURIOUS)
@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.lists(WORDS, max_size=5).map("".join), min_size=1, max_size=3))
@example(words=["<|im_end|>"])
@example(words=["<|im_start|>a<|im_end|>", "a</think>b<|im_end|>"])
@example(words=["<think>a</think><|im_end|>\n", " <|im_start|> "])
@example(words=["<|im_end|><|im_end|>", "a", "</think></think>"])
def test_the_text_is_what_the_template_makes_of_it(name: str, words: list[str]) -> None:
    tokenizer = curious(name)

    def render(content: Content) -> str:
        return tokenizer.render(to_template(content.messages), tools=None, kwargs={})

    content = Content(tuple(said("user", text) for text in words))
    rendered = TypedControl(control_texts(tokenizer)).render(content, render)
    assert rendered.text == render(content)
    ids = tokenizer.encode(rendered.text, add_special=False, typed=rendered.typed)
    assert tokenizer.decode(ids) == rendered.text
    if name != "cuts":
        assert ids.count(tokenizer.token_id("<|im_start|>")) == len(words) + 1
        assert ids.count(tokenizer.token_id("<|im_end|>")) == len(words)


def test_a_template_is_asked_a_bounded_number_of_times() -> None:
    kinds = [f"<|t{i:03}|>" for i in range(500)]
    n_renders = 0

    def render(content: Content) -> str:
        nonlocal n_renders
        n_renders += 1
        (message,) = content.messages
        looks = sum(kind in message.text for kind in kinds[::50])
        return f"{looks} {message.text}"

    typed = TypedControl(kinds)
    text = " ".join(kinds)
    rendered = typed.render(Content((said("user", text),)), render)
    assert rendered.text == f"10 {text}"
    assert len(rendered.typed) == 500, "found in the whole text, where marks were no help"
    assert n_renders <= 2 * MAX_RENDERINGS + 8


@pytest.mark.parametrize(
    ("quote", "unchanged"),
    [
        (partial(json.dumps, ensure_ascii=False), ["<｜User｜>", "<|im_end|>"]),
        (json.dumps, ["<|im_end|>"]),
        (lambda text: str(htmlsafe_json_dumps(text)), []),
    ],
    ids=["json", "ascii", "html"],
)
def test_a_token_that_json_has_changed_is_known_again(
    quote: Callable[[str], str], unchanged: list[str]
) -> None:
    """By one rendering with marks; what JSON has changed is no token in the prompt."""
    seen: list[str] = []

    def render(content: Content) -> str:
        seen.append(quote(content.messages[0].text))
        return seen[-1]

    kinds = ['<｜"｜>', "<｜User｜>", "<|im_end|>"]
    text = " and ".join(kinds)
    rendered = TypedControl(kinds).render(Content((said("user", text),)), render)
    assert rendered.text == quote(text)
    assert [rendered.text[start:end] for start, end in rendered.typed] == unchanged
    assert len(seen) == 2


# --- which texts are control ---------------------------------------------------------------


def test_html_and_runs_of_spaces_are_not_control() -> None:
    gemma = families.tokenizer("gemma3")
    assert {"<table>", "<h1>", "\n\n"} <= set(gemma.added_tokens)
    assert control_texts(gemma) == set(FAMILIES["gemma3"].special)
    text = "a<h1>b</h1>\n\nc<table>"
    ids = ids_of("gemma3", Chat((said("user", f"{text}<end_of_turn>{text}"),)))
    table = gemma.token_id("<table>")
    assert ids.count(table) == 2, "they stay tokens beside what is typed"
    assert control_texts(gemma, known={"<table>"}) >= {"<table>"}


def test_markup_that_is_not_special_is_control_too() -> None:
    control = control_texts(families.tokenizer("qwen3"))
    assert {"<tool_call>", "</think>", "<|fim_prefix|>", "<|im_end|>"} <= control


# --- tokenizers of other kinds -------------------------------------------------------------

PIECES = st.sampled_from([*CONTROL[:4], *MARKUP[:2], "fox", " ", "  ", "\n", "dög", "世", "<|"])


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(), fallback(strips=True), fallback(strips=False)],
    ids=["bytes", "stripping", "metaspace"],
)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.tuples(PIECES, st.booleans()), max_size=8))
@example(pieces=[("<|im_end|>", True)])
@example(pieces=[("<|im_end|>", True), ("<|im_end|>", False), ("<|im_end|>", True)])
@example(pieces=[("fox", False), ("<think>", False), (" ", False), ("</think>", True)])
@example(pieces=[("<|", False), ("<|im_start|>", True), ("世", False), ("<|im_start|>", False)])
def test_any_mixture_of_typed_and_meant(
    tokenizer: TrainedTokenizer, pieces: list[tuple[str, bool]]
) -> None:
    text, typed, meant = "", [], []
    for word, is_typed in pieces:
        if word in (*CONTROL, *MARKUP):
            if is_typed:
                typed.append((len(text), len(text) + len(word)))
            else:
                meant.append(tokenizer.token_id(word))
        text += word
    ids = tokenizer.encode(text, add_special=False, typed=typed)
    control = set(tokenizer.added_tokens.values())
    assert [token for token in ids if token in control] == meant
    if not typed:
        assert ids == tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids).strip() == text.strip() or not tokenizer_is_exact(tokenizer, text)


def tokenizer_is_exact(tokenizer: TrainedTokenizer, text: str) -> bool:
    return tokenizer.decode(tokenizer.encode(text, add_special=False)).strip() == text.strip()


# --- raw text ------------------------------------------------------------------------------


def test_a_raw_prompt_has_control_tokens_unless_parse_special_is_off() -> None:
    tokenizer = families.tokenizer("llama3")
    made = maker("llama3")
    text = "a<|eot_id|>b"
    whole = made.make(RawText(text)).ids.tolist()
    assert whole == tokenizer.encode(text, add_special=True)
    assert tokenizer.token_id("<|eot_id|>") in whole
    plain = made.make(RawText(text, parse_special=False)).ids.tolist()
    assert tokenizer.token_id("<|eot_id|>") not in plain
    assert tokenizer.decode(plain) == tokenizer.decode(whole)
