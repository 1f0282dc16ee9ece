from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.text.reply.formats import THINK_TAGS, ReplyFormat, make_splitter
from firn.text.reply.splitter import ThinkTags
from tests.text.replies import TOOLS, Reply, read, read_at_every_split

THINK = ThinkTags("<think>", "</think>")
THINKS = ReplyFormat(think=THINK)
BOTH = ReplyFormat(tool="json_tags", think=THINK)
CALL = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'

TABLE: list[tuple[str, str, str, str]] = [
    # the text, the prompt's tail, what is text, what is reasoning
    ("plain", "", "plain", ""),
    ("  plain \n", "", "  plain \n", ""),
    ("<think>hm</think>yes", "", "yes", "hm"),
    ("<think>\nhm\n\n</think>\n\nyes\n", "", "yes\n", "hm"),
    ("<think>one\n\ntwo\n</think>yes", "", "yes", "one\n\ntwo"),
    ("\n<think>hm</think>yes", "", "yes", "hm"),
    ("hm</think>yes", "<think>\n", "yes", "hm"),
    ("hm</think>yes", "user<think>", "yes", "hm"),
    ("yes", "<think>\n\n</think>\n\n", "yes", ""),
    ("<think>hm</think>yes", "<think>\n\n</think>\n\n", "yes", "hm"),
    ("</think>\n\nyes", "", "yes", ""),
    ("a</think>b", "", "a</think>b", ""),
    ("<think>cut", "", "", "cut"),
    ("<think>cut</thi", "", "", "cut</thi"),
    ("a <thi", "", "a <thi", ""),
    ("a < b <t <th>", "", "a < b <t <th>", ""),
    ("<think></think>", "", "", ""),
    ("<<think>hm</think>>", "", "<>", "hm"),
    ("write `<think>` and `</think>` here", "", "write `<think>` and `</think>` here", ""),
    ("<think>hm</think>a = '<think>'", "", "a = '<think>'", "hm"),
    ('re("<think>(.*)</think>")', "", 're("<think>(.*)</think>")', ""),
    ("`a`.<think>hm</think>b", "", "`a`.b", "hm"),
]


@pytest.mark.parametrize(("text", "tail", "said", "reasoning"), TABLE)
@pytest.mark.parametrize("format", [THINKS, BOTH], ids=["think", "think and tools"])
def test_reasoning_is_split_from_text(
    format: ReplyFormat, text: str, tail: str, said: str, reasoning: str
) -> None:
    reply = read_at_every_split(format, text, tail=tail)
    assert (reply.text, reply.reasoning, reply.calls) == (said, reasoning, [])


def test_space_before_reasoning_is_markup_only_where_a_call_could_follow() -> None:
    for format, before in ((THINKS, "a "), (BOTH, "a")):
        reply = read_at_every_split(format, "a <think>b</think> c")
        assert (reply.text, reply.reasoning) == (f"{before} c", "b")
        cut = read_at_every_split(format, "a <think> b", tail="what is <think>?")
        assert (cut.text, cut.reasoning) == (before, " b")


def test_space_around_calls_belongs_to_the_markup() -> None:
    reply = read_at_every_split(BOTH, f"one \n\n{CALL}\n\n{CALL}\n two \n")
    assert reply.text == "onetwo \n"
    assert reply.order == [
        "TextPiece",
        "CallStart",
        "CallArguments",
        "CallStart",
        "CallArguments",
        "TextPiece",
    ]


def test_space_alone_before_a_call_is_nothing() -> None:
    assert read_at_every_split(BOTH, f"\n\n{CALL}\n").order == ["CallStart", "CallArguments"]


def test_space_is_text_where_no_call_follows() -> None:
    assert read_at_every_split(BOTH, "\n\n a \n\n").text == "\n\n a \n\n"


def test_reasoning_between_calls() -> None:
    reply = read_at_every_split(BOTH, f"<think>a</think>{CALL}<think>b</think>{CALL}")
    assert (reply.reasoning, reply.text, len(reply.calls)) == ("ab", "", 2)


def test_after_a_call_in_reasoning_the_reasoning_goes_on() -> None:
    reply = read_at_every_split(BOTH, f"a\n{CALL}\nb</think>c", tail="<think>")
    assert (reply.reasoning, reply.text, len(reply.calls)) == ("ab", "c", 1)


def test_a_call_of_an_unknown_tool_in_reasoning_is_a_quotation() -> None:
    quoted = CALL.replace("other", "nobody")
    reply = read_at_every_split(BOTH, f"a {quoted} b</think>c", tail="<think>")
    assert (reply.reasoning, reply.text, reply.calls) == (f"a {quoted} b", "c", [])
    assert len(read_at_every_split(BOTH, f"a {quoted}").calls) == 1, "in text it is a call"


def test_a_call_without_markers_may_follow_reasoning() -> None:
    format = ReplyFormat(tool="bare_json", think=THINK)
    bare = '{"name": "other", "parameters": {}}'
    for start in ("<think>hm</think>\n\n", "</think>\n", "\n"):
        assert len(read_at_every_split(format, start + bare).calls) == 1
    assert read_at_every_split(format, "so: " + bare).text == "so: " + bare


def test_markup_to_drop_is_dropped() -> None:
    format = ReplyFormat(think=ThinkTags("<T>", "</T>", drop=("<R>", "</R>")))
    assert read_at_every_split(format, "<T>hm</T><R>yes</R>") == Reply(
        "yes", "hm", [], ["ReasoningPiece", "TextPiece"]
    )


@pytest.mark.parametrize(
    ("text", "tail", "said", "reasoning"),
    [
        ("hm</think>yes", "<|Assistant|>", "yes", "hm"),
        ("<think>\nhm\n</think>\n\nyes", "<|Assistant|>", "yes", "hm"),
        ("<think>hm</think>yes", "<|Assistant|><think>\n", "yes", "hm"),
        ("never closed", "<|Assistant|>", "", "never closed"),
        ("yes", "<|Assistant|><think>\n\n</think>\n\n", "yes", ""),
    ],
)
def test_reasoning_that_no_tag_opens(text: str, tail: str, said: str, reasoning: str) -> None:
    format = ReplyFormat(think=THINK_TAGS["deepseek_r1"])
    reply = read_at_every_split(format, text, tail=tail)
    assert (reply.text, reply.reasoning) == (said, reasoning)


def test_a_tag_that_repeats_the_prompts_is_not_reasoning() -> None:
    for text in ("<think>hm</think>yes", "\n<think>\nhm</think>yes", "<think><think>hm</think>yes"):
        reply = read_at_every_split(BOTH, text, tail="<think>\n")
        assert (reply.text, reply.reasoning) == ("yes", "hm")
    for tail in ("<think>", ""):
        reply = read_at_every_split(BOTH, "<think>hm <think> again</think>yes", tail=tail)
        assert (reply.text, reply.reasoning) == ("yes", "hm <think> again")


@pytest.mark.parametrize(
    ("text", "said", "reasoning"),
    [
        ("<think>\nhm\n</think>\n<TAG>\nyes\n</TAG>", "yes", "hm"),
        ("<TAG>yes</TAG>\n", "yes", ""),
        ("<think>hm</think>\n<TAG>cut\n</TAG", "cut\n</TAG", "hm"),
        ("write <TAG>x</TAG>", "write <TAG>x</TAG>", ""),
        ("<TAG>write <TAG> here</TAG> and go", "write <TAG> here and go", ""),
        ("yes</TAG>", "yes</TAG>", ""),
    ],
)
@pytest.mark.parametrize(("model", "tag"), [("hunyuan", "answer"), ("ernie45", "response")])
def test_tags_around_the_answer_are_markup(
    model: str, tag: str, text: str, said: str, reasoning: str
) -> None:
    text, said = (t.replace("TAG", tag) for t in (text, said))
    for tool in (None, "json_tags"):
        format = ReplyFormat(tool=tool, think=THINK_TAGS[model])
        reply = read_at_every_split(format, text)
        assert (reply.text.strip(), reply.reasoning) == (said, reasoning)


def test_prose_around_reasoning() -> None:
    format = ReplyFormat(tool="json_tags", think=THINK_TAGS["apriel"])
    prompt = "<|begin_assistant|>\nHere are my reasoning steps:\n"
    call = '<tool_calls>[{"name": "other", "arguments": {}}]</tool_calls>'
    reply = read_at_every_split(format, f"hm\n[BEGIN FINAL RESPONSE]\n{call}", tail=prompt)
    assert (reply.text, reply.reasoning, len(reply.calls)) == ("", "hm", 1)
    reply = read_at_every_split(
        format, "hm\n[BEGIN FINAL RESPONSE]\nyes\n[END FINAL RESPONSE]", tail=prompt
    )
    assert (reply.text, reply.reasoning) == ("yes", "hm")


def test_a_reply_with_nothing_to_look_for_needs_no_splitter() -> None:
    assert make_splitter(ReplyFormat(), TOOLS, "") is None
    assert make_splitter(ReplyFormat(tool="json_tags"), (), "") is None


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["<think>", "</think>", CALL, "<", "think>", "a", " ", "\n", "<tool_call>"]
        ),
        max_size=10,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@example(parts=["<", "think>", "a", "</think>", "\n", CALL, " ", CALL, "a"], cuts=[3, 12, 40, 80])
@example(parts=["a", " ", "\n", CALL, "\n", "<tool_call>", "a", "<"], cuts=[2, 3, 5])
@example(parts=["<think>", CALL, "\n", "a", "</think>", " ", "a"], cuts=[4, 9])
@example(parts=["a", " ", "<", "think", "\n", "<"], cuts=[3])
def test_no_split_matters_and_plain_text_is_whole(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    ends = sorted(min(cut, len(text)) for cut in cuts)
    chunks = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = read(BOTH, [text])
    assert read(BOTH, chunks) == read(BOTH, list(text)) == whole
    if not {"<think>", "</think>", CALL} & set(parts) and "<think>" not in text:
        assert whole.text == text


@given(st.text(alphabet="<think/>tool_call{}ab \n", max_size=40))
@example("a <tool_call>{} \n")
@example("<thin <think </think> <tool_call"[:20])
@example(" \n<tool_call>\n{a}</tool_call>\n ")
def test_text_that_holds_no_whole_tag_passes_unchanged(text: str) -> None:
    if not any(tag in text for tag in ("<think>", "</think>")):
        assert read(BOTH, list(text)).text == text
