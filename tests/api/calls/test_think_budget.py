"""A thinking budget: thinking ends when it is used up, and the answer follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from firn.api.calls.prepared import ThinkLimit
from firn.api.calls.think_budget import LOOKAHEAD_TOKENS, ThinkBudget, ThinkingEnd
from firn.core.events import ReasoningDelta, TextDelta, Token
from firn.core.values import ToolChoice
from firn.text.calls.parsers.harmony import CONTROL
from firn.text.reply.formats import THINK_TAGS, ReplyFormat
from firn.text.reply.reader import ReplyReader
from tests.api.live import Live
from tests.api.scripted import scripted_server
from tests.fakes import END, START, FakeTokenizer

CLOSING = "\n</think>\n\n"
N_OPEN = len("<think>")
ASK: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "hi"}],
}


def budget(n_tokens: int) -> Any:
    return {"type": "enabled", "budget_tokens": n_tokens}


class InBackground:
    """Runs a call on a thread, so that the test can interfere."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(work()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(60)
        return self._found[0]


def texts(message: Any) -> tuple[str, str]:
    thinking = "".join(b.thinking for b in message.content if b.type == "thinking")
    return thinking, "".join(b.text for b in message.content if b.type == "text")


def ask(live: Live, **options: Any) -> InBackground:
    return InBackground(lambda: live.anthropic().messages.create(**(ASK | options)))


# --- through the server --------------------------------------------------------------------


def test_thinking_ends_when_its_budget_does() -> None:
    with scripted_server("<think>" + "a" * 50) as live:
        live.engine.hold("decode", after=N_OPEN)
        call = ask(live, thinking=budget(10))
        live.engine.wait_for(lambda e: e.forced)
        live.engine.release("decode")
        message = call.result()
        assert texts(message) == ("a" * 10, "a" * 40)
        (order,) = live.engine.forced
        assert order == (0, tuple(CLOSING.encode()), N_OPEN + 10)
        assert message.usage.output_tokens == N_OPEN + 50 + len(CLOSING)


def test_a_chats_budget_ends_the_thinking_of_each_choice() -> None:
    with scripted_server("<think>" + "a" * 50) as live:
        live.engine.hold("decode", after=N_OPEN)
        chat = live.openai().chat.completions
        extra = {"thinking_budget": 10}
        body: Any = {"model": "fake", "messages": ASK["messages"], "n": 2}
        call = InBackground(lambda: chat.create(**body, extra_body=extra))
        live.engine.wait_for(lambda e: len(e.forced) == 2)
        live.engine.release("decode")
        for choice in call.result().choices:
            assert choice.message.model_dump()["reasoning_content"] == "a" * 10
            assert choice.message.content == "a" * 40


def test_a_large_budget_reaches_the_engine_only_when_it_runs_short() -> None:
    n_budget = 10 + LOOKAHEAD_TOKENS
    with scripted_server("<think>" + "a" * (n_budget + 40)) as live:
        live.engine.hold("decode", after=N_OPEN + 9)
        call = ask(live, thinking=budget(n_budget))
        live.engine.wait_for(lambda e: e.n_sent() == N_OPEN + 9)
        assert live.engine.forced == []
        live.engine.hold("decode", after=N_OPEN + 10)
        live.engine.release("prefill")  # nothing is held there, but it wakes the engine
        live.engine.wait_for(lambda e: e.forced)
        live.engine.release("decode")
        assert texts(call.result()) == ("a" * n_budget, "a" * 40)


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    reply = "<think>" + "a" * 5 + "</think>b" + "c" * 40
    with scripted_server(reply) as live:
        live.engine.hold("decode", after=N_OPEN + 5 + len("</think>b"))
        call = ask(live, thinking=budget(25))
        live.engine.wait_for(lambda e: len(e.forced) == 2)
        live.engine.release("decode")
        assert texts(call.result()) == ("a" * 5, "b" + "c" * 40)
        assert [tokens for _, tokens, _ in live.engine.forced] == [tuple(CLOSING.encode()), ()]


class Opening(FakeTokenizer):
    """A tokenizer whose template begins the thinking."""

    def render(self, messages: Any, *, tools: Any, kwargs: Any) -> str:
        return super().render(messages, tools=tools, kwargs=kwargs) + "<think>\n"


def test_a_budget_of_zero_ends_thinking_that_the_prompt_begins() -> None:
    with scripted_server("the answer", tokenizer=Opening()) as live:
        live.engine.hold("queue")
        chat = live.openai().chat.completions
        extra = {"thinking_budget": 0}
        body: Any = {"model": "fake", "messages": ASK["messages"]}
        call = InBackground(lambda: chat.create(**body, extra_body=extra))
        live.engine.wait_for(lambda e: e.forced)
        live.engine.release("queue")
        assert call.result().choices[0].message.content == "the answer"
        assert live.engine.forced == [(0, tuple(CLOSING.encode()), 0)]


def test_a_harmony_reply_continues_in_its_final_channel() -> None:
    tokenizer = FakeTokenizer(special=(END, START, *CONTROL))
    format = ReplyFormat(
        tool="harmony",
        visible=frozenset(tokenizer.encode("".join(CONTROL), add_special=False)),
    )
    reply = "<|channel|>analysis<|message|>" + "a" * 30
    n_head = len(tokenizer.encode(reply, add_special=False)) - 30
    with scripted_server(reply, tokenizer=tokenizer, format=format) as live:
        live.engine.hold("decode", after=n_head)
        call = ask(live, thinking=budget(10))
        live.engine.wait_for(lambda e: e.forced)
        live.engine.release("decode")
        assert texts(call.result()) == ("a" * 10, "a" * 20)


def test_the_thoughts_of_every_choice_are_counted() -> None:
    with scripted_server("<think>" + "a" * 10 + "</think>b") as live:
        body: Any = {"model": "fake", "messages": ASK["messages"]}
        one, three = (live.openai().chat.completions.create(**body, n=n) for n in (1, 3))
    counted = [reply.usage.completion_tokens_details.reasoning_tokens for reply in (one, three)]
    assert counted[0] >= 10
    assert counted[1] == 3 * counted[0]


@pytest.mark.parametrize("format", [ReplyFormat(), ReplyFormat(tool="json_tags")])
def test_a_model_that_does_not_think_has_nothing_to_end(format: ReplyFormat) -> None:
    with scripted_server("plain", format=format) as live:
        assert texts(ask(live, thinking=budget(1)).result()) == ("", "plain")
        assert live.engine.forced == []


def test_thinking_options_reach_the_template() -> None:
    with scripted_server("ok") as live:
        client = live.anthropic()
        client.messages.create(**ASK, thinking=budget(2000))
        client.messages.create(**ASK, thinking={"type": "disabled"})
        client.messages.create(**ASK)
        client.messages.create(**ASK, output_config={"effort": "high"})
        question = ASK["messages"][0]["content"]
        sent = [r for r in live.tokenizer.rendered if r["messages"][-1]["content"] == question]
        seen = [rendered["kwargs"] for rendered in sent[-4:]]
    assert [kwargs.get("enable_thinking") for kwargs in seen] == [True, False, None, None]
    assert seen[3]["reasoning_effort"] == "high"


# --- the budget itself ---------------------------------------------------------------------


@dataclass
class Reader:
    in_reasoning: bool = False
    n_reasoning: int = 0
    n_completion: int = 0


def token(id: int = 1, *, forced: bool = False) -> Token:
    return Token(0, id, forced=forced)


def test_the_engine_is_told_once() -> None:
    limit, reader = ThinkBudget(ThinkLimit(5, (7, 8))), Reader(True, 0, 3)
    assert limit.check(reader) == ThinkingEnd(8, (7, 8))  # type: ignore[arg-type]
    reader.n_reasoning = reader.n_completion = 4
    assert limit.observe(token(), reader) is None  # type: ignore[arg-type]


def test_a_forced_closing_is_not_forced_again() -> None:
    limit, reader = ThinkBudget(ThinkLimit(0, (7, 8, 9))), Reader(True)
    limit.check(reader)  # type: ignore[arg-type]
    for i in range(3):
        reader.in_reasoning = i < 1
        assert limit.observe(token(forced=True), reader) is None  # type: ignore[arg-type]
    reader.in_reasoning = True  # it thinks again
    again = limit.observe(token(), reader)  # type: ignore[arg-type]
    assert again == ThinkingEnd(0, (7, 8, 9))


def test_a_forced_closing_that_is_not_needed_is_withdrawn() -> None:
    limit, reader = ThinkBudget(ThinkLimit(9, (7, 8))), Reader(True)
    limit.check(reader)  # type: ignore[arg-type]
    reader.in_reasoning = False
    assert limit.observe(token(), reader) == ThinkingEnd(0, ())  # type: ignore[arg-type]
    for _ in range(2):  # too late
        assert limit.observe(token(forced=True), reader) is None  # type: ignore[arg-type]
    reader.in_reasoning, reader.n_completion = True, 5
    again = limit.observe(token(), reader)  # type: ignore[arg-type]
    assert again == ThinkingEnd(14, (7, 8))


def thinking_reader() -> tuple[ReplyReader, FakeTokenizer]:
    tokenizer = FakeTokenizer()
    reader = ReplyReader(
        tokenizer,
        choice=0,
        stop=(),
        format=ReplyFormat(think=THINK_TAGS["think"]),
        tools=(),
        tool_choice=ToolChoice(),
        prompt_tail="<think>",
        new_id=str,
        logprobs=False,
    )
    return reader, tokenizer


def read(reader: ReplyReader, tokenizer: FakeTokenizer, text: str, *, forced: bool = False) -> str:
    """The text and the reasoning that the client is shown of this."""
    shown = ""
    for id in tokenizer.encode(text, add_special=False):
        for event in reader.feed(token(id, forced=forced)):
            assert isinstance(event, TextDelta | ReasoningDelta)
            shown += event.text
    return shown


def test_a_forced_closing_that_comes_too_late_is_hidden() -> None:
    reader, tokenizer = thinking_reader()
    assert read(reader, tokenizer, "ab</think>c") == "abc"
    n_before = reader.n_completion
    assert read(reader, tokenizer, "</think>", forced=True) == ""
    assert reader.n_completion > n_before, "the model has seen it"
    assert read(reader, tokenizer, "d") == "d"


def test_a_forced_closing_in_time_is_read() -> None:
    reader, tokenizer = thinking_reader()
    assert read(reader, tokenizer, "ab") == "ab"
    assert read(reader, tokenizer, "</think>c", forced=True) == "c"
    assert not reader.in_reasoning


def test_each_format_closes_thinking_in_its_own_way() -> None:
    assert ReplyFormat(think=THINK_TAGS["magistral"]).closing == "\n[/THINK]\n\n"
    assert ReplyFormat(tool="harmony").closing.endswith("<|channel|>final<|message|>")
    assert ReplyFormat(tool="json_tags").closing == ""
