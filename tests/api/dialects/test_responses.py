"""POST /v1/responses as the real openai client sees it, and as it is on the wire."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from firn.api.dialects.openai_responses import OpenAIResponses
from firn.api.http import large_json
from firn.api.routes import json_routes
from firn.core.errors import StepFailed
from firn.core.values import Namespace
from firn.text.reply.formats import PLAIN
from tests.api.live import GREETING, Live, serve
from tests.api.scripted import PARAMETERS, SAID, THOUGHT, frames, post, scripted_server

TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
ASK: dict[str, Any] = {"model": "fake", "input": "How is it outside?"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with serve() as running:
        running.engine.n_cached = 3
        yield running


# --- whole ---------------------------------------------------------------------------------


def test_a_whole_response(plain: Live) -> None:
    response = plain.openai().responses.create(**ASK, metadata={"k": "v"}, temperature=0.5)
    assert response.output_text == GREETING
    assert (response.object, response.status, response.model) == ("response", "completed", "fake")
    assert response.id.startswith("resp_")
    assert response._request_id == f"req_{response.id.removeprefix('resp_')}"
    assert (response.error, response.incomplete_details) == (None, None)
    assert (response.metadata, response.temperature) == ({"k": "v"}, 0.5)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == len(GREETING.encode())
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@pytest.mark.parametrize(
    "more", [{"metadata": {"k": "v" * (3 << 20)}}, {"tools": [TOOLS[0] | {"x": ["y"] * 600_000}]}]
)
def test_what_every_response_repeats_is_bounded(plain: Live, more: dict[str, Any]) -> None:
    refused = httpx.post(f"{plain.url}/v1/responses", json={**ASK, **more}, timeout=60)
    assert refused.status_code == 400
    assert "2 MiB" in refused.json()["error"]["message"]
    assert not plain.n_calls()


def test_a_stored_response_is_sent_as_it_is_kept(plain: Live) -> None:
    """Without being parsed or written again, which the asyncio thread would have to do."""
    asked = {**ASK, "metadata": {"k": "v" * (1 << 20)}}
    made = httpx.post(f"{plain.url}/v1/responses", json=asked, timeout=60).json()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_routes, "JSONResponse", None)
        found = httpx.get(f"{plain.url}/v1/responses/{made['id']}")
    assert found.status_code == 200
    assert found.headers["content-type"] == "application/json"
    assert found.json() == made


def test_reasoning_text_and_calls_are_items(live: Live) -> None:
    response = live.openai().responses.create(**ASK, tools=TOOLS)
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or []] == [THOUGHT]
    assert reasoning.summary == []
    assert message.type == "message"
    assert response.output_text == SAID
    function_calls = [call for call in calls if call.type == "function_call"]
    assert [json.loads(call.arguments) for call in function_calls] == [{"at": "sky"}, {"at": "sea"}]
    assert len({call.call_id for call in function_calls}) == 2
    assert all(call.call_id.startswith("call_") for call in function_calls)
    assert len({item.id for item in response.output}) == 4
    assert {call.status for call in function_calls} == {"completed"}
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_response_cut_off_by_max_tokens_is_incomplete(plain: Live) -> None:
    client = plain.openai()
    response = client.responses.create(**ASK, max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == GREETING[:5]
    assert response.output[0].type == "message"
    assert response.output[0].status == "incomplete"
    events = list(client.responses.create(**ASK, max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details == response.incomplete_details


def test_a_turn_can_be_sent_back_as_it_came(live: Live) -> None:
    client = live.openai()
    first = client.responses.create(**ASK, tools=TOOLS, store=False)
    items: list[Any] = [{"role": "user", "content": "How is it outside?"}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
        for item in first.output
        if item.type == "function_call"
    ]
    client.responses.create(model="fake", input=items, tools=TOOLS)
    rendered = live.tokenizer.rendered[-1]["messages"]
    assert [m["role"] for m in rendered] == ["user", "assistant", "tool", "tool"]
    assert rendered[1]["reasoning_content"] == THOUGHT
    assert rendered[1]["content"] == SAID
    assert rendered[2]["tool_call_id"] == rendered[1]["tool_calls"][0]["id"]


def test_reasoning_survives_a_client_that_keeps_only_the_sealed_part(live: Live) -> None:
    client = live.openai()
    first = client.responses.create(
        **ASK, tools=TOOLS, store=False, include=["reasoning.encrypted_content"]
    )
    items: list[Any] = [
        {"role": "user", "content": "a"},
        *(item.model_dump(exclude_none=True, exclude={"content"}) for item in first.output[:1]),
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    client.responses.create(model="fake", input=items)
    assert live.tokenizer.rendered[-1]["messages"][1]["reasoning_content"] == THOUGHT


def test_a_summary_that_is_asked_for_is_the_reasoning(live: Live) -> None:
    client = live.openai()
    reasoning: Any = {"summary": "auto"}
    response = client.responses.create(**ASK, tools=TOOLS, reasoning=reasoning)
    assert response.output[0].type == "reasoning"
    assert [part.text for part in response.output[0].summary] == [THOUGHT]
    kinds = [e.type for e in client.responses.create(**ASK, reasoning=reasoning, stream=True)]
    assert [kind for kind in dict.fromkeys(kinds) if "reasoning" in kind] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]


def test_custom_tools_are_called_with_a_text() -> None:
    reply = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
    tools: list[Any] = [{"type": "custom", "name": "patch", "description": "Patches files."}]
    with scripted_server(reply) as live:
        client = live.openai()
        (item,) = client.responses.create(**ASK, tools=tools).output
        assert item.type == "custom_tool_call"
        assert (item.name, item.input) == ("patch", "*** Begin\n+a")
        events = list(client.responses.create(**ASK, tools=tools, stream=True))
        done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert [e.input for e in done] == ["*** Begin\n+a"]
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == "*** Begin\n+a"


def test_tools_in_namespaces_are_called_there() -> None:
    """As Codex sends the tools of its MCP servers, and expects their calls."""
    reply = '<tool_call>\n{"name": "mcp__sky__look", "arguments": {"at": "sky"}}\n</tool_call>'
    inner = {"type": "function", "name": "look", "parameters": PARAMETERS}
    tools: list[Any] = [{"type": "namespace", "name": "mcp__sky", "tools": [inner]}]
    with scripted_server(reply) as live:
        client = live.openai()
        (called,) = client.responses.create(**ASK, tools=tools).output
        call = called.model_dump()
        assert (call["namespace"], call["name"]) == ("mcp__sky", "look")
        events = list(client.responses.create(**ASK, tools=tools, stream=True))
        (done,) = [e for e in events if e.type == "response.output_item.done"]
        assert done.item.model_dump(exclude={"id", "call_id"}).items() <= call.items()
        (arguments,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert arguments.name == "look"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
        items: Any = [{"role": "user", "content": "?"}, called, output]
        client.responses.create(model="fake", input=items, tools=tools)
        (sent,) = live.tokenizer.rendered[-1]["messages"][1]["tool_calls"]
        assert sent["function"]["name"] == "mcp__sky__look"


def test_logprobs_are_shown_whole_and_streamed(plain: Live) -> None:
    client = plain.openai()
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(**ASK, **asked, max_output_tokens=3)
    assert response.output[0].type == "message"
    part = response.output[0].content[0]
    assert part.type == "output_text"
    assert [lp.token for lp in part.logprobs or []] == ["H", "e", "l"]
    assert [len(lp.top_logprobs) for lp in part.logprobs or []] == [2, 2, 2]
    events = client.responses.create(**ASK, **asked, max_output_tokens=3, stream=True)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [lp.token for e in deltas for lp in e.logprobs] == ["H", "e", "l"]


# --- streamed ------------------------------------------------------------------------------


def test_a_stream_has_its_events_in_order(live: Live) -> None:
    raw = post(live, "/v1/responses", ASK | {"stream": True, "tools": TOOLS})
    shown = frames(raw.text)
    assert [data["sequence_number"] for _, data in shown] == list(range(len(shown)))
    kinds: list[str] = []
    for name, data in shown:
        kind = name.removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        if "item_id" in data:
            assert data["item_id"].endswith(f"_{data['output_index']}")
    text = ["output_text.delta", "output_text.done"]
    thought = ["reasoning_text.delta", "reasoning_text.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", *thought),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *text),
        *("content_part.done", "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        "completed",
    ]
    assert "[DONE]" not in raw.text


def test_a_stream_is_the_whole_response(live: Live) -> None:
    client = live.openai()
    whole = client.responses.create(**ASK, tools=TOOLS)
    with client.responses.stream(**ASK, tools=TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    def shown(response: Any) -> Any:
        ids = {"id", "call_id", "parsed", "parsed_arguments"}
        return [item.model_dump(exclude=ids) for item in response.output], response.usage

    assert json.dumps(shown(whole)[0]) == json.dumps(_without_parsed(shown(streamed)[0]))
    assert shown(whole)[1] == shown(streamed)[1]
    added = [e.item for e in events if e.type == "response.output_item.added"]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done]
    assert {item.status for item in added} == {"in_progress"}
    snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots[-1] == SAID


def _without_parsed(items: Any) -> Any:
    return json.loads(
        json.dumps(items),
        object_hook=lambda members: {k: v for k, v in members.items() if k != "parsed"},
    )


def test_a_fault_inside_a_stream_fails_the_response(live: Live) -> None:
    live.engine.hold("decode", after=40)

    def break_it() -> None:
        live.engine.wait_for(lambda e: e.n_sent() == 40)
        live.engine.fail(StepFailed("the model broke"))
        live.engine.release("decode")

    thread = threading.Thread(target=break_it)
    thread.start()
    events = list(live.openai().responses.create(**ASK, stream=True))
    thread.join()
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (
        "server_error",
        "the model broke",
    )
    assert last.response.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_a_fault_before_the_first_byte_is_a_status(plain: Live) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        plain.openai().responses.create(model="other-9", input="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        plain.openai().responses.create(model="fake", input="x" * 5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")


# --- stored --------------------------------------------------------------------------------


def test_a_conversation_continues_from_its_last_response(live: Live) -> None:
    client = live.openai()
    first = client.responses.create(**ASK, instructions="be brief", tools=TOOLS)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
        for item in first.output
        if item.type == "function_call"
    ]
    with client.responses.stream(
        model="fake", input=outputs, tools=TOOLS, previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    client.responses.create(model="fake", input="and?", previous_response_id=second.id)
    roles = [m["role"] for m in live.tokenizer.rendered[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_a_stored_response_can_be_read_listed_and_deleted(plain: Live) -> None:
    client = plain.openai()
    made = client.responses.create(
        model="fake",
        input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    )
    assert client.responses.retrieve(made.id).output_text == GREETING
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        client.responses.retrieve(made.id, stream=True)
    listed = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert [item.content for item in listed.data] == ["a"]  # type: ignore[union-attr]
    assert [item.content for item in listed] == ["a", "b"]  # type: ignore[union-attr]
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)


def test_a_response_with_store_false_is_not_stored(plain: Live) -> None:
    client = plain.openai()
    made = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    streamed = list(client.responses.create(**ASK, store=False, stream=True))[-1]
    assert streamed.type == "response.completed"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(streamed.response.id)


def test_a_response_that_has_ended_cannot_be_cancelled(plain: Live) -> None:
    client = plain.openai()
    made = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.responses.cancel(made.id)


def test_input_tokens_counts_what_a_response_would_use(plain: Live) -> None:
    client = plain.openai()
    n_tokens = client.responses.input_tokens.count(**ASK, instructions="be brief").input_tokens
    made = client.responses.create(**ASK, instructions="be brief")
    assert made.usage is not None
    assert made.usage.input_tokens == n_tokens


# --- in the background ---------------------------------------------------------------------


def test_a_response_in_the_background_is_stored_when_it_is_done() -> None:
    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        made = client.responses.create(**ASK, background=True)
        assert made.status == "queued"
        assert made.output == []
        live.engine.wait_for(lambda e: e.n_sent() == 4)
        assert client.responses.retrieve(made.id).status == "queued"
        live.engine.release("decode")
        line = live.log.wait_for("in the background")
        assert "finish=stop" in line
        done = client.responses.retrieve(made.id)
        assert (done.status, done.output_text) == ("completed", GREETING)


def test_a_response_in_the_background_can_be_cancelled() -> None:
    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        made = client.responses.create(**ASK, background=True)
        live.engine.wait_for(lambda e: e.n_sent() == 4)
        assert client.responses.cancel(made.id).status == "cancelled"
        live.engine.wait_for(lambda e: e.cancelled)
        live.log.wait_for("in the background")
        assert client.responses.retrieve(made.id).status == "cancelled"
        assert live.n_calls() == 0


def test_a_response_in_the_background_can_be_deleted() -> None:
    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        made = client.responses.create(**ASK, background=True)
        live.engine.wait_for(lambda e: e.n_sent() == 4)
        client.responses.delete(made.id)
        live.engine.wait_for(lambda e: e.cancelled)
        live.log.wait_for("in the background")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_what_a_client_has_stored_is_rendered_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    dumps = large_json.dumps

    def noted(*given: Any, **options: Any) -> bytes:
        threads.append(threading.current_thread().name.partition("_")[0])
        return dumps(*given, **options)

    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        made = client.responses.create(**ASK, background=True)
        live.engine.wait_for(lambda e: e.n_sent() == 4)
        monkeypatch.setattr(large_json, "dumps", noted)
        (item,) = client.responses.input_items.list(made.id)
        assert item.type == "message"
        assert client.responses.cancel(made.id).status == "cancelled"
    assert threads == ["pool", "pool"]


def test_a_response_that_fails_in_the_background_says_so() -> None:
    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        made = client.responses.create(**ASK, background=True)
        live.engine.wait_for(lambda e: e.n_sent() == 4)
        live.engine.fail(StepFailed("the model broke"))
        live.log.wait_for("in the background")
        failed = client.responses.retrieve(made.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.message == "the model broke"


def test_a_bad_background_request_is_refused_at_once(plain: Live) -> None:
    with pytest.raises(openai.BadRequestError):
        plain.openai().responses.create(model="fake", input="x" * 5000, background=True)


def test_a_running_stream_can_be_cancelled_from_elsewhere() -> None:
    with serve() as live:
        client = live.openai()
        live.engine.hold("decode", after=4)
        events = []
        for event in client.responses.create(**ASK, stream=True):
            events.append(event)
            if event.type == "response.output_text.delta" and len(event.delta) and len(events) == 8:
                made = next(e for e in events if e.type == "response.created").response
                assert client.responses.retrieve(made.id).status == "in_progress"
                client.responses.cancel(made.id)
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "cancelled"
        assert client.responses.retrieve(made.id).output_text == GREETING[:4]


def test_a_client_that_went_away_leaves_no_running_response() -> None:
    with serve() as live:
        live.engine.hold("decode", after=4)
        seen = ""
        with httpx.stream(
            "POST", f"{live.url}/v1/responses", json=ASK | {"stream": True}, timeout=60
        ) as answer:
            for piece in answer.iter_text():
                seen += piece
                if '"delta":"l"' in seen:
                    break
        live.log.wait_for("client gone")
        id = frames(seen)[0][1]["response"]["id"]
        assert live.openai().responses.retrieve(id).status == "cancelled"


# --- compaction ------------------------------------------------------------------------------


def test_a_conversation_is_compacted_and_goes_on() -> None:
    """The client keeps the summary, and sends it in place of all but its own messages."""
    with scripted_server("They chose the red boat.", format=PLAIN) as live:
        client = live.openai()
        items: list[Any] = [
            {"role": "user", "content": "Which boat?"},
            {"role": "assistant", "content": "The red one is the fastest."},
            {"role": "user", "content": [{"type": "input_text", "text": "Then take it."}]},
        ]
        compacted = client.responses.compact(
            model="fake", input=items, instructions="Be brief.", extra_body={"tools": TOOLS}
        )
        asked = live.prompt
        assert asked.index("Be brief.") < asked.index("The red one is the fastest.")
        assert "Summarise this conversation" in asked
        assert "look" in asked, "the tools stay, so that the prefix is reused"
        assert compacted.object == "response.compaction"
        *kept, summary = compacted.output
        assert [item.type for item in kept] == ["message", "message"]
        assert summary.type == "compaction"
        assert "red boat" not in summary.encrypted_content
        assert compacted.usage.output_tokens == len("They chose the red boat.")
        again: Any = [i.model_dump(exclude_none=True, warnings=False) for i in compacted.output]
        client.responses.create(model="fake", input=[*again, {"role": "user", "content": "Go."}])
        assert "They chose the red boat." in live.prompt
        assert "Then take it." in live.prompt
        assert "the fastest" not in live.prompt


def test_a_stored_conversation_is_compacted(plain: Live) -> None:
    client = plain.openai()
    first = client.responses.create(model="fake", input="What is a cairn?")
    compacted = client.responses.compact(model="fake", previous_response_id=first.id)
    assert "What is a cairn?" in plain.prompt
    assert GREETING in plain.prompt
    message, summary = compacted.output
    assert message.type == "message"
    assert summary.type == "compaction"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.compact(model="fake", previous_response_id="resp_nobody")
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.compact(model="fake")
    with pytest.raises(openai.NotFoundError):
        client.responses.compact(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.compact(model="fake", input="hi", extra_body={"stream": True})


def test_a_summary_that_another_server_has_sealed_is_a_note(plain: Live) -> None:
    items: Any = [
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"role": "user", "content": "And now?"},
    ]
    plain.openai().responses.create(model="fake", input=items)
    assert "compaction" in plain.prompt
    assert "gAAAA" not in plain.prompt


# --- what clients expect of a response -------------------------------------------------------


def test_a_response_has_every_member_that_open_responses_requires(plain: Live) -> None:
    asked: dict[str, Any] = {
        **ASK,
        "tools": TOOLS,
        "presence_penalty": 0.25,
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    }
    began = int(time.time())
    body = httpx.post(f"{plain.url}/v1/responses", json=ASK | {"tools": TOOLS}).json()
    assert set(body) >= REQUIRED
    assert began <= body["created_at"] <= body["completed_at"] <= time.time()
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0, 0)
    assert (body["max_tool_calls"], body["service_tier"]) == (None, "default")
    assert body["tools"] == [{**TOOLS[0], "description": None, "strict": False}]
    cut = httpx.post(f"{plain.url}/v1/responses", json={**ASK, "max_output_tokens": 2}).json()
    assert cut["completed_at"] is None
    decoded = OpenAIResponses().decode(asked, namespace=Namespace("test"))
    assert decoded.ignored == ()
    echo = decoded.options.echo
    assert (echo["presence_penalty"], echo["max_tool_calls"]) == (0.25, 3)
    assert (echo["prompt_cache_key"], echo["safety_identifier"]) == ("k", "s")
    assert echo["text"]["format"]["strict"] is True
    assert echo["text"]["format"]["name"] == "n"


def test_every_state_of_a_stream_has_them_too(live: Live) -> None:
    events = frames(post(live, "/v1/responses", {**ASK, "stream": True, "tools": TOOLS}).text)
    states = [data["response"] for name, data in events if "response" in data]
    assert len(states) == 3
    assert all(set(state) >= REQUIRED for state in states)
    assert [state["completed_at"] is None for state in states] == [True, True, False]


REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs",
    "temperature", "reasoning", "user", "usage", "max_output_tokens", "max_tool_calls", "store",
    "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Of the Open Responses specification's ResponseResource."""
