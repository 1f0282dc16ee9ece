"""What the Anthropic dialect makes of a body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firn.api.dialects.anthropic_messages import AnthropicMessages, MessagesCall
from firn.core.errors import InvalidValue
from firn.core.values import (
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    OtherPart,
    PicturePart,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
MARK = {"type": "ephemeral"}


def call(**body: Any) -> MessagesCall:
    given = {"max_tokens": 10, "messages": [HI]} | body
    return AnthropicMessages().decode(given, namespace=Namespace("test"))


def request(**body: Any) -> GenerateRequest:
    return call(**body).requests[0]


def chat(**body: Any) -> Chat:
    source = request(**body).source
    assert isinstance(source, Chat)
    return source


def messages(*given: Any, **body: Any) -> tuple[Message, ...]:
    return chat(messages=list(given), **body).messages


def text(role: Any, said: str, **more: Any) -> Message:
    return Message(role, (TextPart(said),), **more)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def block(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | more


# --- messages ------------------------------------------------------------------------------


def test_strings_and_blocks_are_the_same() -> None:
    assert messages(HI) == messages(user(block("hi"))) == (text("user", "hi"),)


def test_text_blocks_are_paragraphs() -> None:
    (said,) = messages(user(block("<reminder>"), block("do it")))
    assert said.text == "<reminder>\n\ndo it"


def test_the_system_prompt_comes_first() -> None:
    assert messages(HI, system="be brief") == (text("system", "be brief"), text("user", "hi"))


def test_system_blocks_are_messages_so_that_each_can_be_dropped() -> None:
    decoded = messages(HI, system=[block("billing"), block("be brief", cache_control=MARK)])
    assert decoded[:2] == (text("system", "billing"), text("system", "be brief", checkpoint=True))


def test_a_system_message_keeps_its_place_in_the_conversation() -> None:
    assert messages(HI, {"role": "system", "content": "now stop"})[1] == text("system", "now stop")


def test_a_last_message_of_the_assistant_begins_the_reply() -> None:
    begun = {"role": "assistant", "content": "Sure: "}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    assert chat(messages=[HI, begun]).continues
    assert not chat(messages=[HI, begun, HI]).continues
    assert not chat(messages=[HI, {"role": "assistant", "content": [call]}]).continues
    assert not chat(messages=[HI, {"role": "assistant", "content": " "}]).continues


def test_an_assistants_turn_is_put_together() -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "sealed"},
            block("I look"),
            block(" twice."),
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}},
            {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
        ],
    }
    assert messages(HI, turn)[1] == text(
        "assistant",
        "I look twice.",
        tool_calls=(ToolCall("toolu_1", "look", {"at": "sea"}), ToolCall("toolu_2", "look", {})),
        reasoning="hm",
    )


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content} | more


def test_results_come_right_after_their_calls() -> None:
    decoded = messages(HI, user(block("note"), result("a", "1"), result("b", "2"), block("go on")))
    assert decoded[1:] == (
        text("tool", "1", tool_call_id="a"),
        text("tool", "2", tool_call_id="b"),
        text("user", "note\n\ngo on"),
    )


def test_results_alone_leave_no_user_message() -> None:
    assert [m.role for m in messages(HI, user(result("a", "1")))] == ["user", "tool"]


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (None, {}, ""),
        ("", {}, ""),
        ("gone", {"is_error": True}, "Error:\n\ngone"),
        ("Error: gone", {"is_error": True}, "Error: gone"),
        (None, {"is_error": True}, "Error:"),
        ([block("a"), block("b")], {}, "a\n\nb"),
        ([block("a")], {"is_error": True}, "Error:\n\na"),
        ([], {}, ""),
    ],
)
def test_results_are_decoded_in_every_shape(content: Any, more: dict[str, Any], said: str) -> None:
    (_, message) = messages(HI, user(result("a", content, **more)))
    assert (message.role, message.text, message.tool_call_id) == ("tool", said, "a")


IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def test_images_are_decoded_by_data_and_by_address() -> None:
    (said,) = messages(
        user(
            block("what is it"),
            {"type": "image", "source": IMAGE},
            {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}},
        )
    )
    assert said.parts == (
        TextPart("what is it"),
        PicturePart("data:image/png;base64,AAAA", param="messages[0].content[1].source"),
        PicturePart("https://a.example/b.png", param="messages[0].content[2].source"),
    )


def test_an_image_in_a_result_is_kept() -> None:
    shot = {"type": "image", "source": IMAGE}
    (_, message) = messages(HI, user(result("a", [block("done"), shot])))
    param = "messages[1].content[0].content[1].source"
    assert message.parts == (
        TextPart("done"),
        PicturePart("data:image/png;base64,AAAA", param=param),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}},
        {
            "type": "document",
            "title": "T",
            "source": {"type": "content", "content": [block("body")]},
        },
        {"type": "search_result", "title": "T", "content": [block("body")]},
    ],
)
def test_texts_that_come_as_documents(given: dict[str, Any]) -> None:
    assert messages(user(given))[0].text == "T\n\nbody"


def test_cache_control_marks_the_message_that_contains_it() -> None:
    decoded = messages(
        user(result("a", "1", cache_control=MARK), block("b")),
        {"role": "assistant", "content": [block("c", cache_control=MARK | {"ttl": "1h"})]},
        HI,
    )
    assert [m.checkpoint for m in decoded] == [False, True, True, False]


def test_cache_control_of_the_body_marks_the_last_message() -> None:
    assert [m.checkpoint for m in messages(HI, HI, cache_control=MARK)] == [False, True]


# --- options -------------------------------------------------------------------------------


def test_tools_are_decoded() -> None:
    decoded = chat(tools=[TOOL, {"type": "custom", "name": "b", "input_schema": {"x": 1}}])
    assert decoded.tools == (
        Tool("look", "Looks.", {"type": "object"}, param="tools[0]"),
        Tool("b", "", {"x": 1}, param="tools[1]"),
    )


def test_tools_of_anthropics_servers_are_left_out_and_named() -> None:
    served = call(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}])
    assert served.ignored == ("tools[1] (web_search_20250305)",)
    source = served.requests[0].source
    assert isinstance(source, Chat)
    assert [tool.name for tool in source.tools] == ["look"]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            ToolChoice(ToolMode.NAMED, name="look", parallel=False),
        ),
    ],
)
def test_every_form_of_tool_choice_is_decoded(given: Any, choice: ToolChoice) -> None:
    assert chat(tools=[TOOL], tool_choice=given).tool_choice == choice


@pytest.mark.parametrize(
    ("given", "reasoning"),
    [
        ({}, Reasoning()),
        ({"thinking": {"type": "adaptive"}}, Reasoning()),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            Reasoning(enabled=True, budget_tokens=2048),
        ),
        ({"output_config": {"effort": "high"}}, Reasoning(effort="high")),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            Reasoning(effort="max"),
        ),
    ],
)
def test_every_form_of_thinking_is_decoded(given: dict[str, Any], reasoning: Reasoning) -> None:
    assert request(**given).reasoning == reasoning


def test_sampling_and_stop_sequences_are_decoded() -> None:
    decoded = request(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b", "a"])
    sampling = decoded.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert decoded.stop == ("a", "b")
    assert decoded.max_tokens == 10


def test_fields_without_effect_are_accepted() -> None:
    given = {"metadata": {"user_id": "x"}, "service_tier": "auto", "context_management": {}}
    assert call(**given).ignored == ()


def test_the_body_is_not_changed() -> None:
    body = {
        "messages": [user(result("a", [block("x", cache_control=MARK)]), block("y"))],
        "system": [block("s")],
        "tools": [TOOL],
    }
    before = json.dumps(body)
    call(**body)
    assert json.dumps(body) == before


def test_an_error_names_the_parameter() -> None:
    with pytest.raises(InvalidValue) as caught:
        messages(HI, user(result("a", [block("x"), {"type": "text"}])))
    assert caught.value.param == "messages[1].content[0].content[1].text"


def test_unknown_blocks_are_kept_with_their_place() -> None:
    _, told = messages(HI, user(result("a", [block("x"), {"type": "video"}])))
    assert told.parts[1] == OtherPart("video", "messages[1].content[0].content[1].type")


def test_reminders_beside_results_are_asides() -> None:
    note = block("<system-reminder>mind</system-reminder>")
    _, told, aside, asked = messages(HI, user(result("a", "x"), note, block("and now?")))
    assert (told.role, aside.role, asked.role) == ("tool", "user", "user")
    assert (told.aside, aside.aside, asked.aside) == (False, True, False)
    (first,) = messages(user(note, block("hi")))
    assert not first.aside
