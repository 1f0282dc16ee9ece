from __future__ import annotations

import re
from pathlib import Path

import pytest

from firn.core.errors import SetupError
from firn.text.calls.call_parser import NativeParser
from firn.text.calls.parsers import formats
from firn.text.reply.formats import (
    THINK_TAGS,
    ReplyFormat,
    detect_format,
    opens_in_reasoning,
    reasoning_parser_names,
    tool_parser_names,
)

THINK = THINK_TAGS["think"]
NATIVE = NativeParser("odd", "<|odd|>", "<|/odd|>", lambda text, tools: {})


class Vocabulary:
    """The parts of a tokenizer that detection looks at."""

    def __init__(self, template: str | None, tokens: tuple[str, ...] = ()) -> None:
        self.chat_template = template
        self._ids = {text: i for i, text in enumerate(tokens)}
        self.special = frozenset(self._ids.values())

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)


def detected(template: str | None, *tokens: str, **more: str | NativeParser | None) -> ReplyFormat:
    return detect_format(Vocabulary(template, tokens), **more)  # type: ignore[arg-type]


HERMES = (
    'return a json object <tool_call>\n{"name": <function-name>, "arguments": ...}\n</tool_call>'
)
TEMPLATES: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    # a few words of each template, control tokens, the format
    "hermes": (HERMES, (), "json_tags"),
    "qwen3 coder": (
        "<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>",
        (),
        "xml_functions",
    ),
    "qwen3 coder, escaped": (r"'<tool_call>\n<function=' ~ '<parameter='", (), "xml_functions"),
    "glm": ("<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value>", (), "glm"),
    "longcat": ("<longcat_tool_call>f<longcat_arg_key>", (), "glm"),
    "minimax": ("<minimax:tool_call><invoke name=", (), "minimax"),
    "minicpm": ('<function name="f"><param name="p">', (), "named_functions"),
    "mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS]", (), "mistral"),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", (), "deepseek"),
    "deepseek v3": ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>x\n```json", (), "deepseek_v3"),
    "deepseek v3.2": ("", ("｜DSML｜",), "dsml"),
    "kimi": ("<|tool_calls_section_begin|><|tool_call_begin|>", (), "kimi_k2"),
    "gemma 4": ('<|tool_call>call:f{<|"|>}<tool_call|>', (), "gemma4"),
    "function gemma": ("<start_function_call>call:", (), "function_gemma"),
    "lfm": ("<|tool_call_start|>[", (), "pythonic"),
    "lfm by its tokens": (
        "{{ messages }}",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "pythonic",
    ),
    "olmo": ("<function_calls>\nf(x=1)\n</function_calls>", (), "pythonic"),
    "llama 3.1": ("Environment: ipython tool_calls <|python_tag|>", (), "python_tag"),
    "llama 3.2": (
        'ipython tool_calls {"name": function name, "parameters": ...}',
        ("<|python_tag|>",),
        "python_tag",
    ),
    "llama without the tag": ('{"name": function name, "parameters": ...}', (), "bare_json"),
    "nemotron": ('<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>', (), "json_tags"),
    "cohere": ("<|START_ACTION|>[", (), "json_tags"),
    "harmony": ("<|start|>assistant<|channel|>final<|message|>", (), "harmony"),
    "harmony by its tokens": ("", ("<|channel|>", "<|message|>", "<|call|>"), "harmony"),
    "apertus": ("'<|tools_prefix|>' + '['", (), "apertus"),
    "solar": ("<|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{}", (), "solar"),
    "minimax m3": ("ns_token = ']<]minimax[>[' '<tool_call>' <mm:think>", (), "minimax_m3"),
    "hy3": ("'<tool_calls{}>' '<tool_call{}>' '<tool_sep{}>' '<arg_key{}>'", (), "hy_v3"),
    "minicpm names every tag it drops": (
        '<tool_sep> <function name="f"><param name="p">',
        (),
        "named_functions",
    ),
    "muse": (
        '"name": "parameters": {} <atem:function_calls>\n<atem:invoke name="f"> <|start|> <|message|>',
        (),
        "muse",
    ),
    "granite 20b": ('{"name": "f", "parameters": ...} <function_call> {"name"', (), "json_tags"),
    "gigachat 3": ('{"name": "parameters": role_sep="<|role_sep|>"', (), "json_marks"),
    "gigachat 3.1": ('{"name": "parameters": function_call="<|function_call|>"', (), "json_marks"),
    "phi 4 mini": ('functools[{"name": [function name]}]', (), "json_marks"),
    "functionary 3.1": (
        "ipython tool_calls <|python_tag|> <{start_tag}={name}>{parameters}{end_tag} `<function`",
        (),
        "json_functions",
    ),
    "functionary 3.2": (">>>${recipient}\n${content}", (), "functionary"),
    "llama 4, another spelling": ("[func_name1(param1=value1)]", (), "pythonic_bare"),
    "llama 4 and its tokens": (
        "[func_name1(param1=value1)]",
        ("<|python_start|>", "<|python_end|>"),
        "llama4_pythonic",
    ),
    "no tools": ("{% for m in messages %}{{ m.content }}{% endfor %}", (), None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_format_is_detected(case: str) -> None:
    template, tokens, name = TEMPLATES[case]
    assert detected(template, *tokens).tool == name


def test_a_model_without_a_template_has_no_format() -> None:
    assert detected(None) == ReplyFormat()


@pytest.mark.parametrize("name", [name for name, tags in THINK_TAGS.items() if tags.clues])
def test_think_tags_are_detected_in_the_template(name: str) -> None:
    tags = THINK_TAGS[name]
    assert detected(" reasoning ".join(tags.clues)).think == tags


OWN_TAGS = [name for name, tags in THINK_TAGS.items() if tags.clues and name != "thinking"]


@pytest.mark.parametrize("name", OWN_TAGS)
def test_a_template_that_also_strips_the_commonest_tags_keeps_its_own(name: str) -> None:
    tags = THINK_TAGS[name]
    source = f"{{{{ content.split('</think>')[-1] }}}}{' reasoning '.join(tags.clues)}"
    assert detected(source).think == tags


def test_think_tags_are_detected_in_the_vocabulary() -> None:
    assert detected("", "<think>", "</think>").think == THINK
    assert detected("", "<think>").think is None
    assert detected("", "<|open|>", "<|close|>", "<|sep|>").think == THINK_TAGS["kimi_k3"]


def test_harmony_has_no_think_tags() -> None:
    format = detected("<|channel|><|message|> <think></think>")
    assert (format.tool, format.think) == ("harmony", None)
    assert format.closing


def test_only_control_tokens_need_to_be_made_visible() -> None:
    class Plain(Vocabulary):
        special = frozenset({1})

        def __init__(self) -> None:
            super().__init__(HERMES, ("<tool_call>", "</tool_call>"))
            self.special = frozenset({1})

    assert detect_format(Plain()).visible == {1}  # type: ignore[arg-type]


def test_an_override_wins_over_detection() -> None:
    assert detected(HERMES, tool_override="none").tool is None
    assert detected(HERMES, tool_override="auto").tool == "json_tags"
    assert detected(None, tool_override="qwen3_coder").tool == "xml_functions"
    assert detected("<think></think>", reasoning_override="none").think is None
    assert detected(None, reasoning_override="qwen3").think == THINK_TAGS["think"]
    assert detected(None, reasoning_override="deepseek_r1").think == THINK_TAGS["deepseek_r1"]
    assert detected("<think></think>", reasoning_override="auto").think == THINK
    assert detected(None, reasoning_override="mistral").think == THINK_TAGS["magistral"]


def test_unknown_overrides_name_the_known() -> None:
    with pytest.raises(SetupError, match=r"'nope'.*hermes"):
        detected(None, tool_override="nope")
    with pytest.raises(SetupError, match=r"'nope'.*think"):
        detected(None, reasoning_override="nope")


def test_every_name_in_the_help_texts_is_known() -> None:
    assert tool_parser_names()[:2] == reasoning_parser_names()[:2] == ("auto", "none")
    for name in tool_parser_names():
        detected(None, tool_override=name)
    for name in reasoning_parser_names():
        detected(None, reasoning_override=name)


def test_the_tokenizers_own_parser_reads_what_no_file_knows() -> None:
    format = detected("<|odd|>", "<|odd|>", "<|/odd|>", native=NATIVE)
    assert (format.tool, format.native) == ("whole_call", NATIVE)
    assert format.visible == {0, 1}
    assert detected(HERMES, native=NATIVE).tool == "json_tags"
    weak = '{"name": function name, "parameters": ...}'
    assert detected(weak).tool == "bare_json"
    assert detected(weak, native=NATIVE).tool == "whole_call"
    assert detected(HERMES, native=NATIVE, tool_override="native").tool == "whole_call"


@pytest.mark.parametrize(
    ("tail", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("assistant<think>", True),
        ("<think>\n\n", True),
        ("<|im_start|>assistant\n", False),
        ("<think>\n\n</think>\n\n", False),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_may_end_inside_reasoning(tail: str, opens: bool) -> None:
    assert opens_in_reasoning(tail, THINK) is opens
    assert opens_in_reasoning(tail, None) is False


def test_the_documents_name_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("## Which calls are read")[2].partition("\n## ")[0]
    assert set(formats()) == set(re.findall(r"`(\w+)`(?=[^|]*\| )", table)) - {"tools"}


def test_every_file_of_the_folder_is_loaded() -> None:
    assert {"json_tags", "harmony", "whole_call"} < set(formats())
    assert len(formats()) >= 17
