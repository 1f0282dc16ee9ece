"""What the two OpenAI dialects make of a body, and of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firn.api.dialects import ReplyHead
from firn.api.dialects.openai_chat import ChatCall, OpenAIChat
from firn.api.dialects.openai_completions import CompletionCall, OpenAICompletions
from firn.core.errors import ContextTooLong, InvalidValue
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import (
    CacheControl,
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    PicturePart,
    RawText,
    RawTokens,
    Reasoning,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Usage,
)

NAMESPACE = Namespace("test")
HEAD = ReplyHead(id="1", model="fake", created=7)
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**body: Any) -> ChatCall:
    return OpenAIChat().decode({"messages": [HI]} | body, namespace=NAMESPACE)


def chat_source(**body: Any) -> Chat:
    source = chat(**body).requests[0].source
    assert isinstance(source, Chat)
    return source


def completion(**body: Any) -> CompletionCall:
    return OpenAICompletions().decode({"prompt": "hi"} | body, namespace=NAMESPACE)


# --- decoding ------------------------------------------------------------------------------


def test_an_empty_chat_body_is_all_defaults() -> None:
    message = Message("user", (TextPart("hi"),))
    assert chat().requests == (GenerateRequest(model="", source=Chat((message,))),)
    assert not chat().stream


EVERYTHING = {
    "model": "m",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"0": -100, "17": 3.5},
    "max_tokens": 5,
    "stop": ["a", "b", "a"],
    "n": 3,
    "ignore_eos": True,
    "cache": {"read": False, "write": False, "ttl": 60},
}


def test_every_parameter_reaches_the_normal_form() -> None:
    expected = GenerateRequest(
        model="m",
        source=RawText("hi"),
        sampling=Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=7,
            repetition_penalty=1.1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (17, 3.5)),
        ),
        max_tokens=5,
        stop=("a", "b"),
        n=3,
        top_logprobs=4,
        ignore_eos=True,
        cache=CacheControl(read=False, write=False, ttl_s=60.0),
    )
    assert completion(**EVERYTHING, logprobs=4).requests == (expected,)
    request = chat(**EVERYTHING, logprobs=True, top_logprobs=4).requests[0]
    assert request.sampling == expected.sampling
    assert request.cache == expected.cache
    assert (request.stop, request.n, request.top_logprobs) == (("a", "b"), 3, 4)


def test_null_means_default() -> None:
    nulls = dict.fromkeys(EVERYTHING) | {"stream": None, "stream_options": None}
    assert chat(**nulls).requests == chat().requests
    assert completion(**nulls).requests == completion().requests


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-300}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"seed": -1}, "seed", 2**64 - 1),
    ],
)
def test_sampling_is_normalised(body: dict[str, Any], field: str, value: object) -> None:
    assert getattr(chat(**body).requests[0].sampling, field) == value


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).requests[0].max_tokens == 9
    assert chat(max_tokens=5).requests[0].max_tokens == 5


def test_logprobs_may_be_asked_for_without_alternatives() -> None:
    assert chat(logprobs=True).requests[0].top_logprobs == 0
    assert chat(logprobs=False).requests[0].top_logprobs is None


def test_unknown_fields_are_named_and_known_ones_are_not() -> None:
    assert chat(foo=1, user="me", metadata={}, bar=2).ignored == ("foo", "bar")


def test_roles_and_contents_are_decoded() -> None:
    url = "data:image/png;base64,AAAA"
    source = chat_source(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "name": "ann", "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                {"type": "input_image", "image_url": url},
            ]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "look", "arguments": '{"at": "sky"}'}},
                {"id": "c2", "type": "function", "function": {"name": "nap", "arguments": ""}},
                {"id": "c3", "type": "function", "function": {"name": "bad", "arguments": "{"}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        ]
    )  # fmt: skip
    assert source.messages == (
        Message("system", (TextPart("rules"),)),
        Message(
            "user",
            (
                TextPart("see"),
                PicturePart(url, "messages[1].content[1]"),
                PicturePart(url, "messages[1].content[2]"),
            ),
            name="ann",
        ),
        Message(
            "assistant",
            tool_calls=(
                ToolCall("c1", "look", {"at": "sky"}),
                ToolCall("c2", "nap", {}),
                ToolCall("c3", "bad", "{"),
            ),
            reasoning="hm",
        ),
        Message("tool", (TextPart("blue"),), tool_call_id="c1"),
    )


def test_tools_and_tool_choice_are_decoded() -> None:
    assert chat_source(tools=[TOOL]).tools == (
        Tool("look", parameters={"type": "object"}, param="tools[0]"),
    )
    named = {"type": "function", "function": {"name": "look"}}
    assert chat_source(tools=[TOOL], tool_choice=named).tool_choice == ToolChoice(
        ToolMode.NAMED, name="look"
    )
    none = chat_source(tools=[TOOL], tool_choice="none", parallel_tool_calls=False)
    assert none.tool_choice == ToolChoice(ToolMode.NONE, parallel=False)
    assert chat_source(tools=[TOOL], tool_choice="required").tool_choice.mode is ToolMode.REQUIRED


@pytest.mark.parametrize(
    ("body", "reasoning"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(enabled=True, effort="high")),
        ({"reasoning": {"effort": "low"}}, Reasoning(enabled=True, effort="low")),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False)),
        ({"enable_thinking": False}, Reasoning(enabled=False)),
        ({"enable_thinking": True, "thinking_budget": 9}, Reasoning(True, budget_tokens=9)),
    ],
)
def test_every_form_of_reasoning_is_decoded(body: dict[str, Any], reasoning: Reasoning) -> None:
    assert chat(**body).requests[0].reasoning == reasoning


def test_prompts_of_all_kinds_are_decoded() -> None:
    def sources(prompt: object) -> list[object]:
        return [request.source for request in completion(prompt=prompt).requests]

    assert sources("a") == [RawText("a")]
    assert sources(["a", "b"]) == [RawText("a"), RawText("b")]
    assert sources([1, 2]) == [RawTokens((1, 2))]
    assert sources([[1], [2, 3]]) == [RawTokens((1,)), RawTokens((2, 3))]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [True]]}, "prompt[1][0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 11}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x", "prompt": [1]}, "suffix"),
        ({"suffix": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_bad_completions_name_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        completion(**body)
    assert caught.value.param == param


def test_errors_of_completions_name_the_prompt() -> None:
    error = ContextTooLong(9, 8)
    assert OpenAICompletions().render_error(error)["error"]["param"] == "prompt"
    assert OpenAIChat().render_error(error)["error"]["param"] == "messages"


# --- rendering -----------------------------------------------------------------------------

USAGE = Usage(n_prompt=10, n_completion=4, n_cached=8, n_reasoning=1)
TALK: list[Event] = [
    Started(10),
    Progress(4, 10),
    ReasoningDelta(0, "hm"),
    TextDelta(0, "Hi\u2028\n"),
    ToolCallStarted(0, 0, "call_1", "look"),
    ToolCallDelta(0, 0, '{"at":'),
    ToolCallDelta(0, 0, '"sky"}'),
    ChoiceFinished(0, "tool_calls"),
    Ended(USAGE),
]


def frames(raw: bytes) -> list[Any]:
    lines = raw.decode("ascii").split("\n\n")
    assert lines.pop() == ""
    return [
        json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else line
        for line in lines
    ]


def test_a_chat_stream_has_a_chunk_for_each_event() -> None:
    shown = frames(chat(stream=True).encoder(HEAD).feed(TALK))
    assert shown[0] == ": prefill 4/10"
    assert shown[-1] == "data: [DONE]"
    chunks = shown[1:-1]
    for chunk in chunks:
        assert chunk["id"] == "chatcmpl-1"
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["created"] == 7
        assert chunk["model"] == "fake"
        assert "usage" not in chunk
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Hi\u2028\n"},
        {"tool_calls": [{
            "index": 0, "id": "call_1", "type": "function",
            "function": {"name": "look", "arguments": ""},
        }]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"sky"}'}}]},
        {},
    ]  # fmt: skip
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 6 + ["tool_calls"]


def test_the_usage_chunk_comes_last_and_has_no_choices() -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = frames(call.encoder(HEAD).feed(TALK[2:]))
    assert done == "data: [DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_a_chat_is_folded() -> None:
    folded = chat().fold(HEAD, TALK)
    assert folded["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hi\u2028\n",
                "refusal": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"at":"sky"}'},
                    }
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert folded["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


def test_a_message_of_calls_alone_has_no_content() -> None:
    message = chat().fold(HEAD, TALK[4:])["choices"][0]["message"]
    assert message["content"] is None


CUSTOM = {"type": "custom", "custom": {"name": "patch"}}


def streamed_calls(call: ChatCall, events: list[Event]) -> list[dict[str, Any]]:
    """The calls of a stream, assembled as a client does it."""
    calls: list[dict[str, Any]] = []
    for chunk in frames(call.encoder(HEAD).feed(events))[:-1]:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta.pop("index") == len(calls)
                calls.append(delta)
                continue
            (kind,) = delta.keys() - {"index"}
            for member, text in delta[kind].items():
                calls[delta["index"]][kind][member] += text
    return calls


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb \\ud83d\\ude00"}', "a\nb \U0001f600"),
        (' { "input" :"a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('"a"', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "cut of', "cut of"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_the_text_of_a_custom_tool_is_the_same_in_stream_and_fold(
    arguments: str, text: str
) -> None:
    """However it is split, whatever form the model gives it, alone or before another call."""
    call = chat(tools=[CUSTOM, TOOL])
    cuts = [[arguments[:n], arguments[n:]] for n in range(len(arguments))]
    for pieces in (list(arguments), *cuts):
        written = [ToolCallDelta(0, 0, piece) for piece in pieces]
        then = [ToolCallStarted(0, 1, "call_2", "look"), ToolCallDelta(0, 1, "{}")]
        start, end = ToolCallStarted(0, 0, "call_1", "patch"), ChoiceFinished(0, "tool_calls")
        custom = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": text}}
        look = {"name": "look", "arguments": "{}"}
        function = {"id": "call_2", "type": "function", "function": look}
        for others, expected in (([], [custom]), (then, [custom, function])):
            events: list[Event] = [start, *written, *others, end, Ended(USAGE)]
            assert streamed_calls(call, events) == expected
            folded = call.fold(HEAD, events)["choices"][0]["message"]["tool_calls"]
            assert folded == expected


LOGPROBS = (
    TextLogprob("H", b"H", -0.5, (("H", b"H", -0.5), ("J", b"J", -1.0))),
    TextLogprob("i", b"i", float("-inf"), ()),
)
SPOKEN: list[Event] = [
    TextDelta(0, "Hi", LOGPROBS),
    TextDelta(0, "!", (TextLogprob("!", b"!", -0.1),)),
    ChoiceFinished(0, "stop"),
    Ended(USAGE),
]


def test_a_chat_shows_logprobs_in_stream_and_fold() -> None:
    folded = chat(logprobs=True).fold(HEAD, SPOKEN)["choices"][0]["logprobs"]["content"]
    assert folded == [
        {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "J", "logprob": -1.0, "bytes": [74]},
        ]},
        {"token": "i", "logprob": -9999.0, "bytes": [105], "top_logprobs": []},
        {"token": "!", "logprob": -0.1, "bytes": [33], "top_logprobs": []},
    ]  # fmt: skip
    streamed = [
        token
        for chunk in frames(chat(logprobs=True).encoder(HEAD).feed(SPOKEN))[:-1]
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == folded


def test_a_completion_shows_logprobs_in_stream_and_fold() -> None:
    folded = completion(logprobs=2).fold(HEAD, SPOKEN)["choices"][0]["logprobs"]
    assert folded == {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [-0.5, -9999.0, -0.1],
        "top_logprobs": [{"H": -0.5, "J": -1.0}, {"i": -9999.0}, {"!": -0.1}],
        "text_offset": [0, 1, 2],
    }
    streamed = frames(completion(logprobs=2).encoder(HEAD).feed(SPOKEN))
    assert [chunk["choices"][0]["text"] for chunk in streamed[:-1]] == ["Hi", "!", ""]
    assert streamed[1]["choices"][0]["logprobs"]["text_offset"] == [2]


def test_of_alternatives_that_look_alike_the_likeliest_is_shown() -> None:
    parts = (("\ufffd", b"\xe2", -0.5), ("a", b"a", -1.0), ("\ufffd", b"\xe3", -4.0))
    said = TextDelta(0, "\u2026", (TextLogprob("\ufffd", b"\xe2", -0.5, parts),))
    folded = completion(logprobs=3).fold(HEAD, [said, ChoiceFinished(0, "stop"), Ended(USAGE)])
    (top,) = folded["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("\ufffd", -0.5), ("a", -1.0)]
