"""Where pictures stand in prompts: order, placeholders in a caller's own text, odd templates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.core.errors import BadPicture
from firn.core.values import Chat, Message, PicturePart, Prompt, TextPart, Tool, ToolCall
from firn.media.pictures import PictureLimits, Pictures
from firn.models.load import loader
from firn.models.vision.processor import VisionProcessor
from firn.text.prompt.maker import PromptMaker
from firn.text.reply.formats import FALLBACK
from tests.models.vision import gallery
from tests.models.vision.gallery import part, said, user
from tests.zoo.vision import VISION
from tests.zoo.vision_parts import CHATML, TEXT_ONLY


def text_of(name: str, prompt: Prompt) -> str:
    """The prompt with each picture written as {}."""
    pieces, at = [], 0
    for span in prompt.picture_spans:
        pieces += [gallery.tokenizer(name).decode(prompt.ids[at : span.start].tolist()), "{}"]
        at = span.end
    return "".join([*pieces, gallery.tokenizer(name).decode(prompt.ids[at:].tolist())])


WITH_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool.function.name + ': ' + tool.function.description }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{% endif %}"
    + CHATML.replace(
        "{%- endfor %}{% endif %}{{- '<|im_end|>",
        "{%- endfor %}{% endif %}{%- for call in message.tool_calls %}"
        "{{- call.function.name ~ call.function.arguments }}{% endfor %}{{- '<|im_end|>",
    )
)
"""Describes tools and writes calls itself; CHATML does neither."""


def maker_with_template(
    name: str, template: str, folder: Path, **options: Any
) -> tuple[PromptMaker, VisionProcessor]:
    """For this model with another chat template, in a folder of its own."""
    for file in gallery.folder(name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = replace(VISION[name], template=template).chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = loader.load_tokenizer(folder)
    processor = loader.load_processor(folder, tokenizer)
    assert processor is not None
    pictures = Pictures(processor, whole=False, limits=PictureLimits())
    maker = PromptMaker(tokenizer, context_length=4096, pictures=pictures, **options)
    return maker, processor


@pytest.mark.parametrize("name", gallery.FAMILIES)
def test_every_picture_has_its_span(name: str) -> None:
    chat = [user("one ", 1, " two ", 2), said("ok"), user(3, " three")]
    prompt = gallery.prompt_of(name, *chat)
    assert len(prompt.picture_spans) == 3
    for span, picture in zip(prompt.picture_spans, prompt.picture_inputs, strict=True):
        own = prompt.ids[span.start : span.end]
        np.testing.assert_array_equal(own, picture.own_ids)
        assert own[0] == own[-1] == picture.image_token
        assert 12 <= len(own) <= 80
    assert len({m.digest for m in prompt.picture_spans}) == 3
    assert all(
        a.end <= b.start
        for a, b in zip(prompt.picture_spans, prompt.picture_spans[1:], strict=False)
    )


def test_the_order_is_the_callers() -> None:
    name = "qwen2_5_vl"
    got = gallery.prompt_of(name, user("A", 1, "B", 2, 3, "C"), said("D"), user(4))
    assert text_of(name, got) == (
        "<|im_start|>user\nA<|vision_start|>{}<|vision_end|>B<|vision_start|>{}<|vision_end|>"
        "<|vision_start|>{}<|vision_end|>C<|im_end|>\n<|im_start|>assistant\nD<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>{}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_newlines_around_a_picture_are_the_processors() -> None:
    """Gemma's processor puts blank lines there, and they meet the text's own."""
    got = text_of("gemma3", gallery.prompt_of("gemma3", user("look", 1, "now")))
    assert "look\n\n<start_of_image>{}<end_of_image>\n\nnow" in got


def test_a_new_picture_changes_nothing_before_it() -> None:
    for name in gallery.FAMILIES:
        chat = [user("first ", 1), said("yes")]
        one = gallery.prompt_of(name, *chat, user("more"))
        two = gallery.prompt_of(name, *chat, user("more", 2))
        n = one.picture_spans[0].end
        np.testing.assert_array_equal(one.ids[:n], two.ids[:n])
        assert one.picture_spans[0] == two.picture_spans[0]


def test_boundaries_are_outside_pictures() -> None:
    prompt = gallery.prompt_of("qwen3_5", user("one ", 1), said("yes"), user("two ", 2))
    assert len(prompt.boundaries) == 3
    assert not any(m.start < b < m.end for b in prompt.boundaries for m in prompt.picture_spans)


# --- a placeholder that is only text --------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava", "pixtral", "smolvlm"])
def test_a_placeholder_in_a_callers_text_is_text(name: str) -> None:
    mark = gallery.processor(name).placeholder
    chat = [user(f"what is {mark} in ", 1, f"? {mark}{mark}"), said(f"a {mark}"), user("why")]
    prompt = gallery.prompt_of(name, *chat)
    assert len(prompt.picture_spans) == 1
    own = prompt.picture_spans[0]
    around = prompt.ids[own.start - 1 : own.start].tolist()  # Gemma's own markup has it too
    n_more = gallery.tokenizer(name).decode(around).count(mark)
    assert text_of(name, prompt).count(mark) == 4 + n_more
    special = gallery.tokenizer(name).token_id(mark)
    outside = np.ones(len(prompt), dtype=bool)
    outside[prompt.picture_spans[0].start - 2 : prompt.picture_spans[0].end + 2] = False
    assert special not in prompt.ids[outside]


@pytest.mark.parametrize("name", gallery.FAMILIES)
def test_typed_picture_tokens_do_not_take_the_pictures_place(name: str) -> None:
    """Not even exactly as many as the picture has, before it and after it."""
    own = gallery.prompt_of(name, user("see ", 1)).picture_inputs[0]
    forged = gallery.tokenizer(name).decode(own.own_ids.tolist())
    prompt = gallery.prompt_of(name, user(forged, " and ", 1, forged))
    (span,) = prompt.picture_spans
    outside = np.delete(prompt.ids, np.arange(span.start, span.end))
    assert own.image_token not in outside
    np.testing.assert_array_equal(prompt.ids[span.start : span.end], own.own_ids)


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["in words", "by the template"])
def test_a_placeholder_in_tools_and_calls_is_text(template: str, tmp_path: Path) -> None:
    name = "qwen2_5_vl"
    maker, processor = maker_with_template(name, template, tmp_path, tool_format=FALLBACK)
    mark = processor.placeholder
    for described, argument, result in ((mark, "x", "x"), ("x", mark, "x"), ("x", "x", mark)):
        call = ToolCall("c1", "f", {"at": f"2 {argument}"})
        chat = Chat(
            (
                user("see ", 1),
                Message("assistant", (), tool_calls=(call,)),
                Message("tool", (TextPart(f"3 {result}"),), tool_call_id="c1"),
            ),
            tools=(Tool("f", f"1 {described}"),),
        )
        prompt = maker.make(chat)
        (span,) = prompt.picture_spans
        text = text_of(name, prompt)
        assert all(words in text for words in (f"1 {described}", f"2 {argument}", f"3 {result}"))
        outside = np.delete(prompt.ids, np.arange(span.start, span.end))
        assert gallery.tokenizer(name).token_id(mark) not in outside


def test_a_request_without_pictures_is_plain() -> None:
    name = "qwen2_5_vl"
    mark = gallery.processor(name).placeholder
    prompt = gallery.prompt_of(name, user(f"what is {mark}?"))
    assert prompt.picture_spans == prompt.picture_inputs == ()


# --- templates ------------------------------------------------------------------------------


def test_a_template_that_knows_no_pictures(tmp_path: Path) -> None:
    maker, processor = maker_with_template("lfm2_vl", TEXT_ONLY, tmp_path)
    assert processor.inline
    got = maker.make(Chat((user("see ", 1, "<image> is text"),)))
    assert len(got.picture_spans) == 1
    text = gallery.tokenizer("lfm2_vl").decode(got.ids.tolist())
    assert text.startswith("<|im_start|>user\nsee <|image_start|><image><image>")
    assert text.endswith("<|image_end|>\n<image> is text<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_wants_lists_gets_them_for_text_too() -> None:
    got = gallery.prompt_of("llava", user("only words"), said("yes"), user("more"))
    text = gallery.tokenizer("llava").decode(got.ids.tolist())
    assert text == "USER: only words ASSISTANT: yes USER: more ASSISTANT:"


class Forgetful:
    """A tokenizer whose template shows the contents of user messages only."""

    chat_template = "{{ messages }}"
    special: frozenset[int] = frozenset()

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def render(self, messages: Any, *, tools: Any, kwargs: Any) -> str:
        kept = [m if m["role"] == "user" else {**m, "content": "..."} for m in messages]
        return str(self._inner.render(kept, tools=tools, kwargs=kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_place_where_the_template_has_no_pictures() -> None:
    tokenizer: Any = Forgetful(gallery.tokenizer("qwen2_5_vl"))
    maker = PromptMaker(tokenizer, context_length=4096, pictures=gallery.pictures("qwen2_5_vl"))
    message = Message("assistant", (TextPart("I saw "), part(1, "messages[1].content[1]")))
    with pytest.raises(BadPicture, match=r"^messages\[1\]\.content\[1\]: .* no place") as fault:
        maker.make(Chat((user("hello"), message)))
    assert fault.value.status == 400


def test_faults_name_the_part_of_the_message() -> None:
    bad = Message("user", (PicturePart("data:,x", param="messages[4].content[2]"),))
    with pytest.raises(BadPicture, match=r"^messages\[4\]\.content\[2\]: the image is not a PNG"):
        gallery.prompt_of("qwen2_5_vl", bad)


@pytest.mark.parametrize("size", [(1, 1), (2, 300), (300, 2), (1, 1000), (640, 480)])
@pytest.mark.parametrize("name", gallery.FAMILIES)
def test_pictures_of_any_shape(name: str, size: tuple[int, int]) -> None:
    """A prompt, or a 400 with the processor's reason."""
    image = gallery.picture(1).resize(size)
    try:
        prompt = gallery.prompt_of(name, user("see ", image))
    except BadPicture as fault:
        if "processor rejects" not in fault.message:
            raise
        return
    assert len(prompt.picture_spans) == 1
    span = prompt.picture_spans[0]
    np.testing.assert_array_equal(
        prompt.ids[span.start : span.end], prompt.picture_inputs[0].own_ids
    )


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["in words", "by the template"])
def test_tools_and_pictures_together(template: str, tmp_path: Path) -> None:
    name = "qwen2_5_vl"
    maker, _ = maker_with_template(name, template, tmp_path, tool_format=FALLBACK)
    prompt = maker.make(Chat((user("see ", 1, " and ", 2),), tools=(Tool("f", "does f"),)))
    plain = gallery.prompt_of(name, user("see ", 1, " and ", 2))
    n_before = len(prompt) - len(plain)
    np.testing.assert_array_equal(prompt.ids[n_before:], plain.ids)
    moved = [(s.start + n_before, s.end + n_before) for s in plain.picture_spans]
    assert [(s.start, s.end) for s in prompt.picture_spans] == moved
    before = gallery.tokenizer(name).decode(prompt.ids[:n_before].tolist())
    assert ("f: does f" if template is WITH_TOOLS else '"description": "does f"') in before


def test_only_so_many_pictures() -> None:
    name, shown = "qwen2_5_vl", part(1, "messages[0].content[256]")
    maker = PromptMaker(
        gallery.tokenizer(name), context_length=1 << 16, pictures=gallery.pictures(name)
    )
    with pytest.raises(BadPicture, match=r"^messages\[0\]\.content\[256\]: more than 256 images"):
        maker.make(Chat((Message("user", (shown,) * 257),)))
