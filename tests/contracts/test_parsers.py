"""What every tool-call format promises, tested for each file of the folder."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.text.calls.parsers import ToolFormat, formats, names
from firn.text.reply.formats import ReplyFormat, reasoning_parser_names, tool_parser_names
from firn.text.reply.splitter import ThinkTags
from tests.text.replies import NATIVE, NEXT_PART, Reply, read, read_at_every_split

THINK = ThinkTags("<think>", "</think>")
EACH = pytest.mark.parametrize("format", formats().values(), ids=formats())


def reply_format(format: ToolFormat) -> ReplyFormat:
    think = None if format.splitter else THINK
    return ReplyFormat(tool=format.name, think=think, native=NATIVE)


def is_marked(format: ToolFormat) -> bool:
    """Whether it has markers of its own, so that text can come before and after a call."""
    return not format.splitter and (bool(format.opens) or format.name == "whole_call")


def assert_is_the_call(reply: Reply, n: int = 1) -> None:
    assert [c.name for c in reply.calls] == ["get_weather"] * n
    for call in reply.calls:
        assert call.arguments == {"city": "Paris", "days": 3}


@EACH
def test_the_example_is_one_call_at_every_split(format: ToolFormat) -> None:
    reply = read_at_every_split(reply_format(format), format.example)
    assert_is_the_call(reply)
    assert reply.text == reply.reasoning == ""


@EACH
def test_text_around_a_call_is_kept_and_nothing_else(format: ToolFormat) -> None:
    if not is_marked(format):
        pytest.skip("calls are the whole reply")
    closes = format.name not in ("python_tag",)  # it runs to the end of the reply
    text = f"Let me see <b>now</b>.\n\n{format.example}" + ("\nDone {ok}." if closes else "")
    reply = read_at_every_split(reply_format(format), text)
    assert_is_the_call(reply)
    assert reply.text == "Let me see <b>now</b>." + ("Done {ok}." if closes else "")


@EACH
def test_calls_in_a_row(format: ToolFormat) -> None:
    if format.starts == ("[",):
        pytest.skip("one list is the whole reply")
    part = NEXT_PART.get(format.name, "\n")
    reply = read_at_every_split(reply_format(format), format.example + part + format.example)
    assert_is_the_call(reply, 2)
    assert reply.text == ""


@EACH
def test_reasoning_first(format: ToolFormat) -> None:
    if format.splitter:
        pytest.skip("reasoning is a part of the format")
    text = f"<think>\nI must call.\n</think>\n\n{format.example}"
    reply = read_at_every_split(reply_format(format), text)
    assert_is_the_call(reply)
    assert (reply.text, reply.reasoning) == ("", "I must call.")


@EACH
def test_a_call_inside_unclosed_reasoning_counts(format: ToolFormat) -> None:
    if not is_marked(format):
        pytest.skip("no marker to see it by")
    reply = read_at_every_split(reply_format(format), f"hm\n{format.example}", tail="<think>\n")
    assert_is_the_call(reply)
    assert (reply.text, reply.reasoning) == ("", "hm")


@EACH
def test_inside_reasoning_an_unknown_name_is_no_call(format: ToolFormat) -> None:
    if not is_marked(format):
        pytest.skip("no marker to see it by")
    text = format.example.replace("get_weather", "get_lost") + "</think>ok"
    reply = read_at_every_split(reply_format(format), text, tail="<think>\n")
    if format.name != "python_tag":  # it ends only with the reply
        assert reply.calls == []
        assert reply.text == "ok"


@EACH
def test_without_tools_markup_is_text(format: ToolFormat) -> None:
    if format.splitter:
        pytest.skip("the format shapes all of a reply")
    reply = read(reply_format(format), [format.example], tools=())
    assert reply.calls == []
    assert reply.text == format.example


@EACH
def test_cut_anywhere_it_is_a_part_of_the_call_or_text(format: ToolFormat) -> None:
    for n in range(len(format.example)):
        text = format.example[:n]
        reply = read(reply_format(format), [text])
        assert read(reply_format(format), list(text)) == reply
        assert len(reply.calls) <= 1
        if reply.calls:
            assert reply.text == ""
        elif not format.splitter:
            assert reply.text == text


@EACH
def test_calls_that_are_begun_for_ever_cost_little(format: ToolFormat) -> None:
    """A model may repeat itself up to the limit. Reading to the end again from every marker would
    run into the suite's time limit."""
    begun = format.example.partition("Paris")[0] + "x" * 60
    reply = read(reply_format(format), [begun] * 4096)
    assert "x" * 60 in reply.text + "".join(call.text for call in reply.calls)


@EACH
def test_arguments_come_while_they_are_written(format: ToolFormat) -> None:
    if format.name in ("pythonic", "pythonic_bare", "llama4_pythonic", "whole_call"):
        pytest.skip("needs the whole call")
    long = format.example.replace("Paris", "Paris " * 50)
    assert read(reply_format(format), list(long)).n_pieces > 100


@EACH
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_of_its_parts_at_any_split(format: ToolFormat, data: st.DataObject) -> None:
    """No text raises, and no result depends on how the text is split."""
    example = format.example
    cuts = sorted(data.draw(st.lists(st.integers(0, len(example)), max_size=4)))
    parts = [example[a:b] for a, b in zip([0, *cuts], [*cuts, len(example)], strict=True)]
    scraps = [
        *parts, *format.opens, *format.tokens, *format.starts, example,
        "<think>", "</think>", '{"', '": ', "}", "]", ", ", "\n", "text", '"', "\\", "get_weather", "7",
    ]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=8)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = read(reply_format(format), [text])
    assert read(reply_format(format), chunks) == whole
    assert read(reply_format(format), list(text)) == whole
    if format.name not in ("harmony", "deepseek", "deepseek_v3", "kimi_k2", "solar", "mistral"):
        for call in read(reply_format(format), [text], was_cut=False).calls:
            assert isinstance(call.arguments, dict)  # the others may take code, or a list


@EACH
@settings(max_examples=40, deadline=None)
@given(value=st.text(max_size=30))
def test_any_string_in_the_json_formats(format: ToolFormat, value: str) -> None:
    if '"Paris"' not in format.example or format.name.startswith("pythonic"):
        pytest.skip("not JSON")
    text = format.example.replace('"Paris"', json.dumps(value))
    reply = read(reply_format(format), list(text))
    assert reply.calls[0].arguments == {"city": value, "days": 3}


VLLM = """
    apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45
    functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3
    internlm jamba kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo
    minicpm5 minimax_m2 minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json poolside_v1
    pythonic qwen3_coder qwen3_xml seed_oss step3p5 xlam
"""
"""Its names of parsers for the formats that firn reads."""


def test_vllms_names_are_known() -> None:
    assert set(VLLM.split()) <= set(names())


def test_names_are_unique_and_listed() -> None:
    every = [n for f in formats().values() for n in (f.name, *f.aliases)]
    assert len(every) == len(set(every))
    assert set(names()) == set(every)
    assert set(every) < set(tool_parser_names())
    assert {"auto", "none", "think", "qwen3", "harmony"} <= set(reasoning_parser_names())


# --- writing -------------------------------------------------------------------------------

WRITING = {name: f for name, f in formats().items() if f.write}
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(st.characters(codec="utf-8", exclude_characters="<>|｜[]\r"), max_size=9),
        "days": st.integers(-9, 9),
        "exact": st.booleans(),
        "tags": st.lists(st.sampled_from(["a", "b c", 'd"e']), max_size=2),
        "where": st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 9), max_size=2),
    },
)


def test_what_shapes_a_whole_reply_or_is_foreign_is_not_written_here() -> None:
    assert set(formats()) - set(WRITING) == {"harmony", "whole_call"}


@pytest.mark.parametrize("format", WRITING.values(), ids=WRITING)
@settings(max_examples=40, deadline=None)
@given(arguments=ARGUMENTS)
def test_what_is_written_is_read_again(format: ToolFormat, arguments: dict[str, object]) -> None:
    assert format.write is not None
    arguments = {k: v for k, v in arguments.items() if not isinstance(v, str) or v == v.strip()}
    text = format.write("get_weather", arguments)
    reply = read(reply_format(format), [text])
    assert [call.name for call in reply.calls] == ["get_weather"]
    assert reply.calls[0].arguments == arguments
    assert reply.text == ""
