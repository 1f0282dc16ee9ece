"""Calls and thinking, from the model's own markup to what the openai client sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from firn.core.values import Grammar, Job, Namespace
from firn.text.grammar.constraint import Relax, as_they_are
from firn.text.reply.formats import detect_format
from tests.api.live import Live, serve
from tests.fakes import CHAT_TEMPLATE, FakeTokenizer

REPLY = (
    "<think>hm, weather</think>I shall look."
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "How is it outside?"}],
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    template = CHAT_TEMPLATE + "{# <think></think> <tool_call>{{ tool | tojson }}</tool_call> #}"
    tokenizer = FakeTokenizer(chat_template=template)

    def reply(job: Job, choice: int) -> list[int]:
        return tokenizer.encode(REPLY, add_special=False)

    with serve(reply=reply, tokenizer=tokenizer, reply_format=detect_format(tokenizer)) as running:
        yield running


def test_a_whole_reply_has_its_calls(live: Live) -> None:
    reply = live.openai().chat.completions.create(**ASK, tools=TOOLS)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I shall look."
    assert choice.message.model_dump()["reasoning_content"] == "hm, weather"
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"at": "sky"}, {"at": "sea"}]
    assert {call.function.name for call in calls} == {"look"}
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens


def test_a_stream_has_its_calls(live: Live) -> None:
    text = thoughts = ""
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in live.openai().chat.completions.create(**ASK, tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thoughts += choice.delta.model_dump().get("reasoning_content") or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                assert call.function is not None
                calls[call.index] = {"name": call.function.name or "", "arguments": ""}
            assert call.function is not None
            calls[call.index]["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    assert (text, thoughts, reason) == ("I shall look.", "hm, weather", "tool_calls")
    assert [json.loads(call["arguments"]) for call in calls.values()] == [
        {"at": "sky"},
        {"at": "sea"},
    ]
    assert [call["name"] for call in calls.values()] == ["look", "look"]


def test_parallel_tool_calls_false_allows_one_call(live: Live) -> None:
    reply = live.openai().chat.completions.create(**ASK, tools=TOOLS, parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"at": "sky"}  # type: ignore[union-attr]
    assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_without_a_grammar_compiler_constraints_are_refused(
    live: Live, body: dict[str, Any]
) -> None:
    answer = httpx.post(
        f"{live.url}/v1/chat/completions", json={**ASK, "tools": TOOLS, "stream": True, **body}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in body


def test_with_a_grammar_compiler_the_job_has_the_compiled_grammar() -> None:
    class Compiling:
        def compile(self, grammar: Grammar, owner: Namespace) -> object:
            return "compiled", grammar.kind

        def relaxer(self, owner: Namespace) -> Relax:
            return as_they_are

    with serve(grammars=Compiling()) as live:
        live.openai().chat.completions.create(**ASK, response_format={"type": "json_object"})
        assert live.engine.jobs[0].grammar == ("compiled", "json_object")
