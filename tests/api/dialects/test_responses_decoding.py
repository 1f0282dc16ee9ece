"""What the Responses dialect makes of a body, and of the items of earlier responses."""

from __future__ import annotations

from typing import Any

import pytest

from firn.api.dialects import ReplyHead
from firn.api.dialects._responses_items import seal
from firn.api.dialects.openai_responses import OpenAIResponses, ResponsesCall
from firn.core.errors import BadRequest, InvalidValue
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import (
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    PicturePart,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    Usage,
)

MINE, YOURS = Namespace("mine"), Namespace("yours")
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"a": 1}}


def call(input: Any = "hi", **body: Any) -> ResponsesCall:
    return OpenAIResponses().decode({"input": input} | body, namespace=MINE)


def request(input: Any = "hi", **body: Any) -> GenerateRequest:
    return call(input, **body).requests[0]


def chat_of(made: ResponsesCall) -> Chat:
    source = made.requests[0].source
    assert isinstance(source, Chat)
    return source


def messages(*items: Any, **body: Any) -> tuple[Message, ...]:
    return chat_of(call(list(items), **body)).messages


def text(role: Any, said: str, **more: Any) -> Message:
    return Message(role, (TextPart(said),), **more)


def head(id: str) -> ReplyHead:
    return ReplyHead(id=id, model="fake", created=7)


USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "sea"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "waves"}

# --- items ---------------------------------------------------------------------------------


def test_a_string_is_a_users_message() -> None:
    assert messages(USER) == chat_of(call("hi")).messages == (text("user", "hi"),)


def test_instructions_come_first() -> None:
    assert messages(USER, instructions="be brief")[0] == text("system", "be brief")
    listed = [{"role": "developer", "content": "be brief"}]
    assert messages(USER, instructions=listed)[0] == text("system", "be brief")


def test_roles_and_content_parts_are_decoded() -> None:
    decoded = messages(
        {"role": "developer", "content": "a"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "b"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            ],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
    )
    image = PicturePart("data:image/png;base64,AAAA", param="input[1].content[1]")
    assert decoded == (
        text("system", "a"),
        Message("user", (TextPart("b"), image)),
        text("assistant", "c"),
    )


def test_a_turns_items_become_one_message() -> None:
    second = CALL | {"call_id": "c2", "arguments": ""}
    decoded = messages(
        USER,
        {"type": "reasoning", "id": "rs", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "I look."},
        CALL,
        second,
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "sky"}]},
        {"type": "message", "role": "assistant", "content": "It is wet."},
    )  # fmt: skip
    assert decoded[1:] == (
        text(
            "assistant",
            "I look.",
            tool_calls=(ToolCall("c1", "look", {"at": "sea"}), ToolCall("c2", "look", {})),
            reasoning="hm",
        ),
        text("tool", "waves", tool_call_id="c1"),
        text("tool", "sky", tool_call_id="c2"),
        text("assistant", "It is wet."),
    )


SUMMARY = [{"type": "summary_text", "text": "in short"}]


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, "hm"),
        ({"summary": SUMMARY, "encrypted_content": seal("grüß")}, "grüß"),
        ({"summary": SUMMARY, "encrypted_content": "gAAAA of another server"}, "in short"),
        ({"summary": SUMMARY, "encrypted_content": seal("x") + "?"}, "in short"),
        ({"summary": [], "content": None}, None),
    ],
)
def test_reasoning_comes_back_in_any_of_its_forms(item: Any, thought: str | None) -> None:
    decoded = messages(USER, {"type": "reasoning", "id": "rs", **item}, CALL, OUTPUT)
    assert decoded[1].reasoning == thought


def test_custom_tools_are_functions_of_one_text() -> None:
    given = [{"type": "custom", "name": "patch", "description": "Patches.", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}]  # fmt: skip
    made = call("hi", tools=given)
    (tool,) = chat_of(made).tools
    assert tool.name == "patch"
    assert tool.description == "Patches.\n\nstart: /.+/"
    assert tool.parameters["required"] == ["input"]
    history = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}
    answered = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    decoded = messages(USER, history, answered)
    assert decoded[1].tool_calls == (ToolCall("c", "patch", {"input": "*** Begin"}),)
    assert decoded[2] == text("tool", "done", tool_call_id="c")


# --- options -------------------------------------------------------------------------------


def test_hosted_tools_are_left_out_and_named() -> None:
    made = call("hi", tools=[TOOL, {"type": "web_search"}])
    assert chat_of(made).tools == (Tool("look", "Looks.", {"a": 1}, param="tools[0]"),)
    assert made.ignored == ("tools[1] (web_search)",)


def test_tools_in_namespaces_have_long_names() -> None:
    spaces = [
        {"type": "namespace", "name": "mcp__files__", "tools": [TOOL]},
        {"type": "namespace", "name": "agents", "tools": [TOOL, {"type": "custom", "name": "say"}]},
        {"type": "namespace", "name": "more", "tools": [{"type": "namespace", "name": "x"}]},
    ]
    choice = {"type": "function", "name": "look", "namespace": "agents"}
    made = call("hi", tools=[TOOL, *spaces], tool_choice=choice)
    names = [tool.name for tool in chat_of(made).tools]
    assert names == ["look", "mcp__files__look", "agents__look", "agents__say"]
    assert chat_of(made).tool_choice.name == "agents__look"
    assert made.ignored == ("tools[3].tools[0] (namespace)",)
    history = {"type": "custom_tool_call", "call_id": "c", "name": "say", "namespace": "agents"}
    decoded = messages(USER, history | {"input": "hm"})
    assert decoded[1].tool_calls == (ToolCall("c", "agents__say", {"input": "hm"}),)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"tool_choice": "none"}, ToolChoice(ToolMode.NONE)),
        ({"tool_choice": "required"}, ToolChoice(ToolMode.REQUIRED)),
        (
            {"tool_choice": {"type": "function", "name": "look"}},
            ToolChoice(ToolMode.NAMED, name="look"),
        ),
    ],
)
def test_every_form_of_tool_choice_is_decoded(given: dict[str, Any], choice: ToolChoice) -> None:
    assert chat_of(call("hi", tools=[TOOL], **given)).tool_choice == choice


@pytest.mark.parametrize(
    ("given", "reasoning"),
    [
        ({"reasoning": {"effort": "high", "summary": "auto"}}, Reasoning(True, "high")),
        ({"reasoning": {"effort": "none"}}, Reasoning(False)),
        ({"thinking_budget": 9}, Reasoning(budget_tokens=9)),
        ({"enable_thinking": False}, Reasoning(False)),
    ],
)
def test_every_form_of_reasoning_is_decoded(given: dict[str, Any], reasoning: Reasoning) -> None:
    assert request(**given).reasoning == reasoning


def test_numbers_reach_the_sampler() -> None:
    decoded = request(temperature=0, top_p=0.5, max_output_tokens=3, seed=4, top_logprobs=2)
    sampling = decoded.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 4)
    assert (decoded.max_tokens, decoded.top_logprobs) == (3, 2)
    assert request(include=["message.output_text.logprobs"]).top_logprobs == 0


def test_fields_without_effect_are_accepted() -> None:
    given = {"user": "x", "truncation": "auto", "prompt_cache_key": "k", "service_tier": "auto"}
    assert call("hi", **given).ignored == ()


@pytest.mark.parametrize("given", [{"conversation": "conv_1"}, {"prompt": {"id": "p"}}])
def test_unsupported_fields_that_would_change_the_answer_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="is not supported"):
        call("hi", **given)


def test_numbers_that_json_cannot_write_are_refused() -> None:
    with pytest.raises(BadRequest, match="infinite"):
        call("hi", metadata={"a": float("nan")})
    with pytest.raises(BadRequest, match="infinite"):
        call([USER | {"x": float("inf")}])


# --- earlier responses ---------------------------------------------------------------------


def reply(*, finish: Any = "stop") -> list[Event]:
    return [
        Started(5),
        ReasoningDelta(0, "hm"),
        TextDelta(0, "I look."),
        ToolCallStarted(0, 0, "c1", "look"),
        ToolCallDelta(0, 0, "{}"),
        ChoiceFinished(0, finish),
        Ended(Usage(5, 4, 3, 1)),
    ]


def ask(dialect: OpenAIResponses, id: str, *, namespace: Namespace = MINE, **body: Any) -> Chat:
    """Answer a body, and return the conversation it was answered with."""
    made = dialect.decode({"input": "hi"} | body, namespace=namespace)
    made.fold(head(id), reply())
    return chat_of(made)


def test_a_response_continues_the_previous_one() -> None:
    dialect = OpenAIResponses()
    ask(dialect, "a", instructions="only now")
    output = [{"type": "function_call_output", "call_id": "c1", "output": "waves"}]
    ask(dialect, "b", previous_response_id="resp_a", input=output)
    decoded = ask(dialect, "c", previous_response_id="resp_b", input="and now?").messages
    turn = text("assistant", "I look.", tool_calls=(ToolCall("c1", "look", {}),), reasoning="hm")
    assert decoded == (
        text("user", "hi"),
        turn,
        text("tool", "waves", tool_call_id="c1"),
        turn,
        text("user", "and now?"),
    )


@pytest.mark.parametrize(
    ("namespace", "stored"), [(YOURS, {}), (MINE, {"store": False})], ids=["others", "not stored"]
)
def test_an_unknown_response_cannot_be_continued(namespace: Namespace, stored: Any) -> None:
    dialect = OpenAIResponses()
    ask(dialect, "a", **stored)
    with pytest.raises(InvalidValue) as caught:
        ask(dialect, "b", namespace=namespace, previous_response_id="resp_a")
    assert caught.value.param == "previous_response_id"


def test_an_item_can_be_referred_to_by_its_id() -> None:
    dialect = OpenAIResponses()
    ask(dialect, "a")
    items = [USER, {"type": "item_reference", "id": "msg_a_1"}, USER]
    assert ask(dialect, "b", input=items).messages[1] == text("assistant", "I look.")
    with pytest.raises(InvalidValue, match="there is no item"):
        ask(dialect, "c", namespace=YOURS, input=items)


def test_a_response_that_is_being_generated_cannot_be_continued() -> None:
    dialect = OpenAIResponses()
    running = dialect.decode({"input": "hi", "background": True}, namespace=MINE)
    assert running.fold(head("a"), [])["status"] == "queued"
    with pytest.raises(InvalidValue, match="still being generated"):
        ask(dialect, "b", previous_response_id="resp_a")
    assert running.fold(head("a"), reply())["status"] == "completed"
    ask(dialect, "b", previous_response_id="resp_a")


def test_a_folded_response_says_how_it_ended() -> None:
    body = call("hi").fold(head("a"), reply(finish="length"))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 1}
