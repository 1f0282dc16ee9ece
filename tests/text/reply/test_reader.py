from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.core.events import (
    ChoiceFinished,
    Event,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    Token,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import Tool, ToolChoice, ToolMode
from firn.text.reply.formats import PLAIN, ReplyFormat, detect_format
from firn.text.reply.reader import ReplyReader
from firn.text.reply.splitter import ThinkTags
from tests.text.replies import TOOLS, read
from tests.text.trained import CONTROL, HARD_TEXTS, MARKUP, TrainedTokenizer, byte_level

THINKS = ReplyFormat(think=ThinkTags("<think>", "</think>"))
BOTH = ReplyFormat(tool="json_tags", think=ThinkTags("<think>", "</think>"))
CALL = '<tool_call>{"name": "other", "arguments": {"a": "STOP"}}</tool_call>'


@dataclass
class Seen:
    """A reply as a client would put it together."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finished: ChoiceFinished | None = None
    reader: ReplyReader | None = None


def by_byte(text: str) -> list[int]:
    """One token per byte: the hardest way to cut a text."""
    tokenizer = byte_level()
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [ids[bytes([b])] for b in text.encode()]


def run(
    ids: Sequence[int],
    *,
    format: ReplyFormat = PLAIN,
    stop: tuple[str, ...] = (),
    tools: tuple[Tool, ...] = (),
    tool_choice: ToolChoice = ToolChoice(),  # noqa: B008
    tail: str = "",
    logprobs: bool = False,
    reason: Literal["stop", "length"] = "stop",
    tokenizer: TrainedTokenizer | None = None,
) -> Seen:
    counter = itertools.count()
    reader = ReplyReader(
        tokenizer or byte_level(),
        choice=1,
        stop=stop,
        format=format,
        tools=tools,
        tool_choice=tool_choice,
        prompt_tail=tail,
        new_id=lambda: f"call_{next(counter)}",
        logprobs=logprobs,
    )
    events: list[Event] = []
    for i in ids:
        logprob = TokenLogprob(i, -0.5, ((i, -0.5), (0, -3.0))) if logprobs else None
        events += reader.feed(Token(1, i, logprob))
        if reader.stopped:
            break
    else:
        events += reader.finish(reason)
    return see(events, reader)


def see(events: list[Event], reader: ReplyReader) -> Seen:
    seen = Seen(reader=reader)
    for event in events:
        assert seen.finished is None, "nothing follows ChoiceFinished"
        assert event.choice == 1  # type: ignore[union-attr]
        if isinstance(event, TextDelta):
            assert event.text
            seen.text += event.text
            seen.logprobs += event.logprobs
        elif isinstance(event, ReasoningDelta):
            assert event.text
            seen.reasoning += event.text
        elif isinstance(event, ToolCallStarted):
            assert event.index == len(seen.calls)
            seen.calls[event.index] = [event.id, event.name, ""]
        elif isinstance(event, ToolCallDelta):
            assert event.arguments
            assert event.index == len(seen.calls) - 1
            seen.calls[event.index][2] += event.arguments
        elif isinstance(event, ChoiceFinished):
            seen.finished = event
    assert seen.finished is not None
    return seen


@pytest.mark.parametrize(
    ("format", "text"),
    [
        *((PLAIN, text) for text in HARD_TEXTS),
        *((BOTH, text) for text in HARD_TEXTS if "<think>" not in text),
    ],
)
def test_text_passes_whole(format: ReplyFormat, text: str) -> None:
    seen = run(by_byte(text), format=format, tools=TOOLS)
    assert seen.text == text
    assert seen.finished == ChoiceFinished(1, "stop")
    assert seen.reader is not None
    assert seen.reader.n_completion == len(text.encode())
    assert not seen.reader.stopped


def test_a_reply_cut_by_length_says_so_even_after_a_call() -> None:
    assert run(by_byte("ab"), reason="length").finished == ChoiceFinished(1, "length")
    seen = run(by_byte(CALL), format=BOTH, tools=TOOLS, reason="length")
    assert seen.finished == ChoiceFinished(1, "length")
    assert run(by_byte(CALL), format=BOTH, tools=TOOLS).finished == ChoiceFinished(1, "tool_calls")


def test_an_empty_reply_just_finishes() -> None:
    assert run([]).finished == ChoiceFinished(1, "stop")
    assert run([], format=BOTH, tools=TOOLS, stop=("x",)).finished == ChoiceFinished(1, "stop")


# --- stops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [PLAIN, BOTH], ids=["plain", "with tags"])
def test_a_stop_ends_the_reply(format: ReplyFormat) -> None:
    for stop in ("STOP", "é🙂", "\n\n", " "):
        text = f"abc{stop}def"
        seen = run(by_byte(text), stop=("nope", stop), format=format, tools=TOOLS)
        assert seen.text == "abc"
        assert seen.finished == ChoiceFinished(1, "stop", stop)
        assert seen.reader is not None
        assert seen.reader.stopped
        # Space may belong to a call: with tools, it is only judged once the next token is there.
        late = format is BOTH and stop.isspace()
        assert seen.reader.n_completion == len(f"abc{stop}".encode()) + late


def test_a_stop_in_the_tail_that_flush_delivers() -> None:
    first, second, _ = by_byte("€")
    broken = [*by_byte("a"), second, first]  # broken; the last may begin a character
    seen = run(broken, stop=("\ufffd",))
    assert (seen.text, seen.finished) == ("a", ChoiceFinished(1, "stop", "\ufffd"))


def test_a_stop_that_never_completes_is_text() -> None:
    assert run(by_byte("abc STO"), stop=("STOP",)).text == "abc STO"


def test_stops_are_not_looked_for_in_reasoning_or_calls() -> None:
    text = f"<think>STOP</think>ST{CALL}OP STOP!"
    seen = run(by_byte(text), format=BOTH, tools=TOOLS, stop=("STOP", "ST\n"))
    assert seen.reasoning == "STOP"
    assert json.loads(seen.calls[0][2]) == {"a": "STOP"}
    assert seen.text == "STOP "
    assert seen.finished == ChoiceFinished(1, "stop", "STOP")


# --- calls ----------------------------------------------------------------------------------


def test_calls_have_ids_and_indices() -> None:
    seen = run(by_byte(CALL + CALL), format=BOTH, tools=TOOLS)
    assert [c[:2] for c in seen.calls.values()] == [["call_0", "other"], ["call_1", "other"]]
    assert seen.text == ""


@pytest.mark.parametrize("choice", [ToolChoice(ToolMode.NONE), None])
def test_without_tools_markup_is_text(choice: ToolChoice | None) -> None:
    tools = TOOLS if choice else ()
    seen = run(by_byte(CALL), format=BOTH, tools=tools, tool_choice=choice or ToolChoice())
    assert (seen.text, seen.calls) == (CALL, {})
    assert seen.finished == ChoiceFinished(1, "stop")


def test_one_call_only_where_they_may_not_be_parallel() -> None:
    choice = ToolChoice(parallel=False)
    seen = run(by_byte(CALL + CALL), format=BOTH, tools=TOOLS, tool_choice=choice)
    assert len(seen.calls) == 1
    assert json.loads(seen.calls[0][2]) == {"a": "STOP"}
    assert seen.finished == ChoiceFinished(1, "tool_calls")
    assert seen.reader is not None
    assert seen.reader.stopped


# --- reasoning ------------------------------------------------------------------------------


def test_reasoning_is_counted() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hm hm</think>yes", add_special=False)
    seen = run(ids, format=THINKS, tail="<think>\n")
    assert (seen.reasoning, seen.text) == ("hm hm", "yes")
    close = tokenizer.token_id("</think>")
    assert close is not None
    assert seen.reader is not None
    assert seen.reader.n_reasoning == ids.index(close) + 1
    assert seen.reader.n_completion == len(ids)


def test_markup_that_is_made_of_control_tokens_is_seen() -> None:
    special = (*CONTROL, *MARKUP)
    tokenizer = TrainedTokenizer(byte_level()._tokenizer, byte_level=True, special=special)
    format = detect_format(tokenizer)
    assert {tokenizer.token_id(t) for t in MARKUP} <= format.visible
    ids = tokenizer.encode(f"<think>hm</think>yes{CALL}<|im_end|>", add_special=False)
    seen = run(ids, format=format, tools=TOOLS, tokenizer=tokenizer)
    assert (seen.reasoning, seen.text, len(seen.calls)) == ("hm", "yes", 1)


# --- logprobs -------------------------------------------------------------------------------


def shown(seen: Seen) -> bytes:
    return b"".join(each.raw for each in seen.logprobs)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("stop", [(), ("never seen",), ("e ", "a  ")])
def test_each_token_of_the_text_is_shown_once(text: str, stop: tuple[str, ...]) -> None:
    seen = run(by_byte(text), logprobs=True, stop=stop)
    assert shown(seen) == seen.text.encode()
    assert all(each.logprob == -0.5 and len(each.top) == 2 for each in seen.logprobs)


def test_tokens_of_several_characters_are_shown_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog.", add_special=False)
    seen = run(ids, logprobs=True, stop=("zzz",))
    assert [each.raw for each in seen.logprobs] == [tokenizer.token_bytes(i) for i in ids]


def test_tokens_of_reasoning_calls_and_markup_are_not_shown() -> None:
    text = f"<think>hm</think>\n\nyes {CALL} and <b>no</b>"
    seen = run(by_byte(text), format=BOTH, tools=TOOLS, logprobs=True, stop=("zzz",))
    assert seen.text == "yesand <b>no</b>"
    assert shown(seen) == seen.text.encode()


def test_reasoning_keeps_no_logprobs_however_long_it_is() -> None:
    seen = run(by_byte("<think>" + "hm, " * 500), format=BOTH, logprobs=True, reason="length")
    assert seen.reader is not None
    assert seen.reader.n_held_logprobs <= 3 * len("<think>hm, ")


@pytest.mark.parametrize("text", ["<think>h\u00e9\n\n", "<think>", "a<think>\nb\n", "a <think>b"])
def test_the_first_token_after_reasoning_is_shown_whole(text: str) -> None:
    (brown,) = byte_level().encode(" brown", add_special=False)
    seen = run([*by_byte(text + "</think>"), brown], format=BOTH, logprobs=True)
    assert shown(seen).endswith(b" brown")
    assert shown(seen).strip() == seen.text.encode().strip()


def test_a_call_keeps_its_logprobs_as_long_as_it_could_be_text() -> None:
    call = CALL[: CALL.index("STOP")]
    seen = run(by_byte(call), format=BOTH, tools=TOOLS, logprobs=True, reason="length")
    assert seen.reader is not None
    assert seen.reader.n_held_logprobs == 3 * len(call)


def test_a_token_that_is_text_only_in_part_is_shown() -> None:
    """The space between a call and the text after it is markup, but in the text's first token."""
    ids = byte_level().encode(" brown fox", add_special=False)
    seen = run([*by_byte(CALL), *ids], format=BOTH, tools=TOOLS, logprobs=True)
    assert (seen.text, shown(seen)) == ("brown fox", b" brown fox")


def test_a_rejected_call_is_text_with_its_tokens() -> None:
    text = "<tool_call>oops</tool_call> so"
    seen = run(by_byte(text), format=BOTH, tools=TOOLS, logprobs=True)
    assert seen.text == text
    assert shown(seen) == text.encode()


def test_tokens_after_a_stop_are_not_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick brown fox", add_special=False)
    seen = run(ids, logprobs=True, stop=(" brown",))
    assert (seen.text, shown(seen)) == ("The quick", b"The quick")
    inside = run(ids, logprobs=True, stop=("rown",))
    assert (inside.text, shown(inside)) == ("The quick b", b"The quick brown")


def test_text_after_a_stop_shifts_no_logprobs() -> None:
    """Text that might have been a tag is released as a whole, with tokens after the stop."""
    seen = run(by_byte("ab<thixyz"), format=BOTH, logprobs=True, stop=("t",))
    assert (seen.text, shown(seen)) == ("ab<", b"ab<")


def test_hidden_tokens_are_not_shown() -> None:
    end = byte_level().token_id("<|im_end|>")
    assert end is not None
    seen = run([*by_byte("ab"), end, *by_byte("c")], logprobs=True)
    assert (seen.text, shown(seen)) == ("abc", b"abc")


# --- all of it ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "<tool_", "é🙂", " ", "\n", "text ", "<b>"]),
        max_size=8,
    ),
    whole_tokens=st.booleans(),
)
@example(
    parts=["<think>", "é🙂", "</think>", "\n", "text ", CALL, " ", "text "], whole_tokens=False
)
@example(parts=["<think>", "text ", "</think>", CALL, "\n", CALL, "é🙂"], whole_tokens=True)
@example(parts=["text ", "<tool_", "é🙂", " ", "<think>", "<b>"], whole_tokens=False)
@example(parts=["</think>", "text ", "</think>", " "], whole_tokens=False)
def test_tokens_or_bytes_give_what_the_text_says(parts: list[str], whole_tokens: bool) -> None:
    text = "".join(parts)
    ids = byte_level().encode(text, add_special=False) if whole_tokens else by_byte(text)
    seen = run(ids, format=BOTH, tools=TOOLS, logprobs=True)
    reply = read(BOTH, [text])
    assert (seen.text, seen.reasoning) == (reply.text, reply.reasoning)
    assert [c[2] for c in seen.calls.values()] == [c.text for c in reply.calls]
    if not whole_tokens:
        assert shown(seen) == seen.text.encode()
