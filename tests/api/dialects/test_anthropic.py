"""POST /v1/messages as the real anthropic client sees it, and as it is on the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from firn.api.dialects.anthropic_messages import MessageOptions
from firn.api.http.auth import Keys
from firn.api.services import ApiLimits
from firn.config import CacheConfig
from firn.core.errors import QueueFull, StepFailed
from firn.core.values import Usage
from firn.text.reply.formats import PLAIN, THINK_TAGS, ReplyFormat
from tests.api.live import GREETING, Live, serve
from tests.api.real import demo_config, serving
from tests.api.scripted import CALLS, PARAMETERS, SAID, THOUGHT, frames, post, scripted_server

TOOLS: list[Any] = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
ASK: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "How is it outside?"}],
}
MARKED: dict[str, Any] = ASK | {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        }
    ]
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with serve() as running:
        yield running


# --- whole ---------------------------------------------------------------------------------


def test_a_whole_message(plain: Live) -> None:
    message = plain.anthropic().messages.create(**ASK)
    assert message.content[0].type == "text"
    assert message.content[0].text == GREETING
    assert (message.role, message.type, message.model) == ("assistant", "message", "fake")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id == f"req_{message.id.removeprefix('msg_')}"


def test_thinking_text_and_calls_are_blocks(live: Live) -> None:
    message = live.anthropic().messages.create(**ASK, tools=TOOLS)
    thinking, text, *calls = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == THOUGHT
    assert thinking.signature
    assert text.type == "text"
    assert text.text == SAID
    assert [call.input for call in calls if call.type == "tool_use"] == [
        {"at": "sky"},
        {"at": "sea"},
    ]
    ids = [call.id for call in calls if call.type == "tool_use"]
    assert len(set(ids)) == 2
    assert all(id.startswith("toolu_") for id in ids)
    assert message.stop_reason == "tool_use"


def test_a_turn_can_be_sent_back_as_it_came(live: Live) -> None:
    client = live.anthropic()
    first = client.messages.create(**ASK, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turn: Any = [
        *ASK["messages"],
        first.to_param(),
        {"role": "user", "content": results},
    ]
    client.messages.create(model="fake", max_tokens=9, messages=turn, tools=TOOLS)
    rendered = live.tokenizer.rendered[-1]["messages"]
    assert [m["role"] for m in rendered] == ["user", "assistant", "tool", "tool"]
    assert rendered[1]["reasoning_content"] == THOUGHT
    assert rendered[1]["content"] == SAID
    assert len(rendered[1]["tool_calls"]) == 2
    assert rendered[2]["tool_call_id"] == rendered[1]["tool_calls"][0]["id"]


def test_disable_parallel_tool_use_allows_one_call(live: Live) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = live.anthropic().messages.create(**ASK, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"


def test_without_tools_a_call_is_text(live: Live) -> None:
    client = live.anthropic()
    message = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    for reply in (message, streamed):
        thinking, text = reply.content
        assert thinking.type == "thinking"
        assert text.type == "text"
        assert text.text == f"{SAID}\n{CALLS}"
        assert reply.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("options", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nope", "world"]}, "stop_sequence", "world"),
    ],
)
def test_stop_reasons_say_why_a_reply_ended(
    plain: Live, options: dict[str, Any], reason: str, sequence: str | None
) -> None:
    client = plain.anthropic()
    message = client.messages.create(**(ASK | options))
    with client.messages.stream(**(ASK | options)) as stream:
        streamed = stream.get_final_message()
    for reply in (message, streamed):
        assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)
    if sequence:
        assert message.content[0].type == "text"
        assert message.content[0].text == "Hello, "


# --- usage ---------------------------------------------------------------------------------


@pytest.fixture
def cached() -> Iterator[Live]:
    with serve() as running:
        running.engine.n_cached = 7
        yield running


@pytest.mark.parametrize(("body", "creates"), [(ASK, False), (MARKED, True)])
def test_usage_counts_each_prompt_token_once(
    cached: Live, body: dict[str, Any], creates: bool
) -> None:
    client = cached.anthropic()
    n_prompt = client.messages.count_tokens(
        model="fake", messages=body["messages"], tools=[]
    ).input_tokens
    whole = client.messages.create(**body).usage
    with client.messages.stream(**body) as stream:
        events = list(stream)
        streamed = stream.get_final_message().usage
    begun = next(e.message.usage for e in events if e.type == "message_start")
    for usage in (whole, streamed, begun):
        assert usage.cache_read_input_tokens == 7
        assert usage.cache_creation_input_tokens == (n_prompt - 8 if creates else 0)
        total = usage.input_tokens + 7 + (usage.cache_creation_input_tokens or 0)
        assert total == n_prompt
    assert whole.output_tokens == streamed.output_tokens == len(GREETING.encode())


def test_without_a_cache_nothing_is_created() -> None:
    off = replace(demo_config(), cache=CacheConfig(disable_prefix_cache=True))
    with serving(Path(), config=off) as real:
        marked = {**MARKED, "model": "claude-x", "max_tokens": 2}
        assert real.anthropic().messages.create(**marked).usage.cache_creation_input_tokens == 0
        usage = real.openai().responses.create(model="", input="hi", max_output_tokens=2).usage
        assert usage is not None
        assert usage.input_tokens_details.model_dump()["cache_write_tokens"] == 0


def test_what_sparse_prefill_has_skipped_is_not_created() -> None:
    usage = MessageOptions(counts_creation=True).usage(Usage(100, 5, 20, n_skipped=60))
    assert (usage["cache_creation_input_tokens"], usage["input_tokens"]) == (19, 61)


def test_max_tokens_zero_only_fills_the_cache(plain: Live) -> None:
    client = plain.anthropic()
    message = client.messages.create(**(ASK | {"max_tokens": 0}))
    assert message.content == []
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 0
    with client.messages.stream(**(ASK | {"max_tokens": 0})) as stream:
        assert stream.get_final_message().content == []
    assert plain.engine.jobs[-1].max_tokens == 0


def test_counting_counts_what_the_template_renders(plain: Live) -> None:
    client = plain.anthropic()
    body: dict[str, Any] = {
        "model": "claude-haiku-4-5",
        "messages": [{"role": "user", "content": "hi"}],
        "system": "be brief",
        "tools": TOOLS,
    }
    n_tokens = client.messages.count_tokens(**body).input_tokens
    assert client.messages.create(**body, max_tokens=1).usage.input_tokens == n_tokens
    assert client.messages.count_tokens(**(body | {"system": "b"})).input_tokens == n_tokens - 7
    long = [{"role": "user", "content": "x" * 9000}]
    assert client.messages.count_tokens(**(body | {"messages": long})).input_tokens > 9000


# --- streamed ------------------------------------------------------------------------------


def test_a_stream_has_its_events_in_order(live: Live) -> None:
    raw = post(live, "/v1/messages", ASK | {"stream": True, "tools": TOOLS})
    assert raw.headers["content-type"].startswith("text/event-stream")
    shown = frames(raw.text)
    names = [name for name, _ in shown]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks: list[list[str]] = []
    for name, data in shown[2:-2]:
        kind = name.removeprefix("content_block_")
        if kind == "start":
            assert data["index"] == len(blocks)
            blocks.append([data["content_block"]["type"]])
        elif kind == "delta":
            assert data["index"] == len(blocks) - 1
            if blocks[-1][-1] != data["delta"]["type"]:
                blocks[-1].append(data["delta"]["type"])
        else:
            assert (kind, data["index"]) == ("stop", len(blocks) - 1)
            blocks[-1].append("stop")
    assert blocks == [
        ["thinking", "thinking_delta", "signature_delta", "stop"],
        ["text", "text_delta", "stop"],
        ["tool_use", "input_json_delta", "stop"],
        ["tool_use", "input_json_delta", "stop"],
    ]
    assert shown[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_a_stream_is_the_whole_message(live: Live) -> None:
    client = live.anthropic()
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        streamed = stream.get_final_message()

    def shown(message: Any) -> Any:
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return blocks, message.stop_reason, message.usage

    assert shown(whole) == shown(streamed)


def test_thinking_can_be_left_out(live: Live) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
    client = live.anthropic()
    with client.messages.stream(**ASK, thinking=thinking) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**ASK, thinking=thinking), streamed):
        assert message.content[0].type == "thinking"
        assert message.content[0].thinking == ""
        assert message.content[0].signature


def test_a_stream_gets_pings_while_a_long_prompt_is_read() -> None:
    with scripted_server("ok", limits=ApiLimits(keep_alive_s=0.05)) as live:
        live.engine.chunk = 10
        live.engine.hold("prefill", after=20)
        body = ASK | {"stream": True}
        with httpx.stream("POST", f"{live.url}/v1/messages", json=body, timeout=60) as answer:
            seen = ""
            for piece in answer.iter_text():
                seen += piece
                if seen.count("event: ping") >= 5:  # at the start, for two chunks, in silence
                    live.engine.release("prefill")
        names = [name for name, _ in frames(seen)]
        assert names[0] == "message_start"
        assert names[-1] == "message_stop"
        assert ("", "prefill 20/37") in frames(seen)


def test_a_queued_stream_is_kept_open_by_comments() -> None:
    """No event may come before message_start, whose content is not known yet."""
    with scripted_server("ok", limits=ApiLimits(keep_alive_s=0.05)) as live:
        live.engine.hold("queue")
        body = ASK | {"stream": True}
        with httpx.stream("POST", f"{live.url}/v1/messages", json=body, timeout=60) as answer:
            seen = ""
            for piece in answer.iter_text():
                seen += piece
                if seen.count(": keep-alive") == 2:
                    live.engine.release("queue")
        shown = frames(seen)
        assert shown[0] == ("", "keep-alive")
        assert next(name for name, _ in shown if name) == "message_start"
        with live.anthropic().messages.stream(**ASK) as stream:
            assert stream.get_final_text() == "ok"


# --- faults --------------------------------------------------------------------------------


def test_a_fault_inside_a_stream_is_its_error_event(live: Live) -> None:
    live.engine.hold("decode", after=20)

    def break_it() -> None:
        live.engine.wait_for(lambda e: e.n_sent() == 20)
        live.engine.fail(StepFailed("the model broke"))
        live.engine.release("decode")

    thread = threading.Thread(target=break_it)
    thread.start()
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        live.anthropic().messages.stream(**ASK) as stream,
    ):
        list(stream)
    thread.join()
    body: Any = caught.value.body
    assert body == {"type": "error", "error": {"type": "api_error", "message": "the model broke"}}


def test_errors_have_anthropics_types(plain: Live) -> None:
    client = plain.anthropic()
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**(ASK | {"model": "other-9"}))
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**(ASK | {"messages": [{"role": "user", "content": "x" * 5000}]}))
    body = long.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: 50")
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="fake", messages=[])


def test_a_full_queue_is_a_rate_limit() -> None:
    with serve() as live:
        live.engine.refusal = QueueFull(retry_after_s=3)
        with pytest.raises(anthropic.RateLimitError) as caught:
            live.anthropic().messages.create(**ASK)
        body: Any = caught.value.body
        assert body["error"]["type"] == "rate_limit_error"
        assert caught.value.response.headers["retry-after"] == "3"


def test_a_large_body_is_too_large() -> None:
    with serve(limits=ApiLimits(body_nbytes=1000)) as live:
        with pytest.raises(anthropic.RequestTooLargeError) as caught:
            live.anthropic().messages.create(**ASK, system="x" * 1000)
        body: Any = caught.value.body
        assert body["error"]["type"] == "request_too_large"


def test_a_stopping_server_is_overloaded() -> None:
    with serve() as live:
        live.on_loop(live.event_router.drain)
        with pytest.raises(anthropic.InternalServerError) as caught:
            live.anthropic().messages.create(**ASK)
        body: Any = caught.value.body
        assert (caught.value.status_code, body["error"]["type"]) == (503, "overloaded_error")


def test_errors_below_the_path_have_anthropics_shape(plain: Live) -> None:
    wrong = httpx.get(f"{plain.url}/v1/messages")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    unknown = httpx.post(f"{plain.url}/v1/messages/batches", json={})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")


def test_keys_are_accepted_in_both_headers() -> None:
    with serve(keys=Keys(["secret"])) as live:
        by_header = live.anthropic(api_key="secret")
        assert by_header.messages.create(**ASK).stop_reason == "end_turn"
        by_token = anthropic.Anthropic(
            base_url=live.url, auth_token="secret", api_key=None, max_retries=0
        )
        assert by_token.messages.create(**ASK).stop_reason == "end_turn"
        assert live.engine.jobs[0].namespace == live.engine.jobs[1].namespace != ""
        with pytest.raises(anthropic.AuthenticationError) as caught:
            live.anthropic(api_key="wrong").messages.create(**ASK)
        body: Any = caught.value.body
        assert body["error"]["type"] == "authentication_error"


def test_a_model_without_vision_refuses_images(plain: Live) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    with pytest.raises(anthropic.BadRequestError, match="does not accept images"):
        plain.anthropic().messages.create(
            model="fake", max_tokens=9, messages=[{"role": "user", "content": content}]
        )


def test_what_changes_with_each_request_is_not_in_the_prompt(plain: Live) -> None:
    """Claude Code's billing line changes each time, and would break the prefix."""
    client = plain.anthropic()
    for stamp in ("1", "2"):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={stamp};"},
            {"type": "text", "text": "You are an agent."},
        ]
        client.messages.create(**ASK, system=system)
    first, second = plain.engine.jobs[-2:]
    assert first.prompt.ids.tolist() == second.prompt.ids.tolist()


def test_models_are_listed_for_its_client(plain: Live) -> None:
    (model,) = plain.anthropic().models.list().data
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert plain.anthropic().models.retrieve("fake").id == "fake"


def test_what_a_model_can_do_is_an_object_for_its_client() -> None:
    """The client does not check what it reads, so this does."""
    thinking = ReplyFormat(tool="json_tags", think=THINK_TAGS["think"])
    for format, thinks in ((thinking, True), (PLAIN, False)):
        with serve(reply_format=format) as live:
            client = live.anthropic()
            for shown in (*client.models.list(), client.models.retrieve("fake")):
                model = anthropic.types.ModelInfo.model_validate(shown.model_dump(), strict=False)
                can = model.capabilities
                assert can is not None
                assert can.thinking.types.enabled.supported is thinks
                assert can.effort.high.supported is thinks
                assert can.structured_outputs.supported
                assert not can.image_input.supported
            (plain,) = httpx.get(f"{live.url}/v1/models").json()["data"]
            assert "chat" in plain["capabilities"]
