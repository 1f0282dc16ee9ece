"""Ollama's own Python client against a server of one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from firn.api.dialects._ollama import ToolCallBuffer
from firn.api.dialects.ollama_chat import OllamaChat
from firn.api.dialects.ollama_generate import OllamaGenerate
from firn.core.errors import InvalidValue
from firn.core.events import ToolCallDelta, ToolCallStarted
from firn.core.values import Chat, Defaults, FillInMiddle, Job, Namespace, PicturePart, RawText
from firn.text.reply.formats import detect_format
from tests.api.live import Live, serve
from tests.fakes import CHAT_TEMPLATE, FakeTokenizer

THOUGHT, SAID = "hm, weather", "I shall look."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
OWN = Namespace("own")


def look(at: str) -> str:
    """Look somewhere.

    Args:
        at: where
    """
    return at


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    template = CHAT_TEMPLATE + "{# <think></think> <tool_call>{{ tool | tojson }}</tool_call> #}"
    tokenizer = FakeTokenizer(chat_template=template)

    def reply(job: Job, choice: int) -> list[int]:
        text = f"<think>{THOUGHT}</think>{SAID}{CALL}"
        return tokenizer.encode(text, add_special=False)

    with serve(reply=reply, tokenizer=tokenizer, reply_format=detect_format(tokenizer)) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> ollama.Client:
    return ollama.Client(host=live.url, timeout=60)


MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is it outside?"}]


def test_a_chat_is_answered_whole(client: ollama.Client) -> None:
    reply = client.chat("fake:latest", MESSAGES, tools=[look], think=True, keep_alive="5m")
    assert reply.message.content == SAID
    assert reply.message.thinking == THOUGHT
    (call,) = reply.message.tool_calls or ()
    assert (call.function.name, dict(call.function.arguments)) == ("look", {"at": "sky"})
    assert reply.done
    assert reply.done_reason == "stop"
    assert reply.model == "fake"
    assert (reply.prompt_eval_count or 0) > 0
    assert (reply.eval_count or 0) > 0
    assert (reply.prompt_eval_duration or 0) > 0
    assert 0 < (reply.eval_duration or 0) < (reply.total_duration or 0)


def test_a_chat_is_answered_as_a_stream(client: ollama.Client) -> None:
    text = thinking = ""
    calls: list[Any] = []
    for part in client.chat("fake", MESSAGES, tools=[look], stream=True):
        text += part.message.content or ""
        thinking += part.message.thinking or ""
        calls += part.message.tool_calls or ()
        last = part
    assert (text, thinking, len(calls)) == (SAID, THOUGHT, 1)
    assert last.done
    assert (last.prompt_eval_duration or 0) > 0


def test_generate_answers_a_prompt(client: ollama.Client) -> None:
    whole = client.generate("fake", "Hello", system="Be brief.", options={"num_predict": 8})
    assert whole.done_reason == "length"
    assert whole.eval_count == 8
    streamed = "".join(part.response or "" for part in client.generate("fake", "Hi", stream=True))
    assert SAID in streamed
    raw = client.generate("fake", "Hello", raw=True)
    assert raw.response is not None
    assert raw.response.startswith("<think>")


def test_a_request_without_a_prompt_only_loads_the_model(client: ollama.Client) -> None:
    assert client.generate("fake").done_reason == "load"
    assert client.chat("fake", []).done_reason == "load"
    assert client.generate("fake", keep_alive=0).done_reason == "unload"


def test_the_model_is_listed_shown_and_running(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "fake:latest"
    (running,) = client.ps().models
    assert running.model == "fake:latest"
    assert running.expires_at is not None
    shown = client.show("fake:latest")
    assert set(shown.capabilities or ()) == {"completion", "tools", "thinking"}
    assert "repeat_penalty 1.0" in (shown.parameters or "").splitlines()


def test_bad_requests_are_refused_in_ollamas_shape(client: ollama.Client) -> None:
    for call in (
        lambda: client.chat("nobody", MESSAGES),
        lambda: client.chat("nobody", []),
        lambda: client.generate("nobody"),
        lambda: client.generate("nobody", keep_alive=0),
    ):
        with pytest.raises(ollama.ResponseError, match="is not served here") as caught:
            call()
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        client.chat("fake", MESSAGES, options={"temperature": -1})
    with pytest.raises(ollama.ResponseError, match="does not compute embeddings"):
        client.embed("fake", ["a"])
    with pytest.raises(ollama.ResponseError, match="One with --models-dir downloads others"):
        client.pull("anything")


def test_logprobs_are_shown(live: Live, client: ollama.Client) -> None:
    asked: Any = {"logprobs": True, "top_logprobs": 2}
    whole = client.chat("fake", MESSAGES, **asked)
    assert whole.logprobs
    assert "".join(token.token for token in whole.logprobs) == whole.message.content
    assert {len(token.top_logprobs or ()) for token in whole.logprobs} == {2}
    streamed = [
        token
        for piece in client.generate("fake", "hi", stream=True, **asked)
        for token in piece.logprobs or ()
    ]
    assert {token.logprob for token in streamed} == {-0.25}
    assert client.chat("fake", MESSAGES).logprobs is None


def test_a_request_may_leave_the_cache_alone() -> None:
    asked = chat(cache={"read": False}, cache_salt="me").requests[0]
    assert (asked.cache.read, asked.cache.write) == (False, True)
    assert asked.cache_salt
    without = OllamaChat(Defaults(stores=False)).decode({"messages": MESSAGES}, namespace=OWN)
    assert not without.requests[0].cache.write


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_curl_as_ollama_documents_it_is_answered(live: Live, kind: str | None) -> None:
    """It declares no type, and curl adds that of a form."""
    raw = json.dumps({"model": "fake", "prompt": "Why is the sky blue?", "stream": False})
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(f"{live.url}/api/generate", content=raw, headers=headers)
    assert answer.json()["response"].startswith(SAID)
    page = {**headers, "origin": "http://evil.example"}
    answer = httpx.post(f"{live.url}/api/generate", content=raw, headers=page)
    assert answer.status_code == 400
    assert "web page" in answer.json()["error"]


# --- decoding ------------------------------------------------------------------------------


def chat(**body: Any) -> Any:
    body = {"messages": MESSAGES, **body}
    return OllamaChat().decode(body, namespace=OWN)


def test_options_become_sampling() -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"],
        "repeat_penalty": 1.25, "num_predict": -1, "num_ctx": 4096,
    }  # fmt: skip
    (request,) = chat(options=options).requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.5,
        7,
        0.5,
        0.1,
    )
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.25)
    assert chat(options={"seed": -1}).requests[0].sampling.seed is None
    assert request.stop == ("x",)
    assert request.max_tokens is None


@pytest.mark.parametrize("option", ["repeat_penalty", "top_p", "seed"])
def test_a_wrong_option_has_the_name_that_was_sent(option: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        chat(options={option: "much"})
    assert caught.value.param == f"options.{option}"
    assert caught.value.message.startswith(f"options.{option}: must be a")


def test_streaming_is_the_default() -> None:
    assert chat().stream
    assert not chat(stream=False).stream


def test_format_and_think_are_decoded() -> None:
    assert chat(format="json").requests[0].grammar.kind == "json_object"
    schema = {"type": "integer"}
    grammar = chat(format=schema).requests[0].grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    assert chat(format="").requests[0].grammar is None
    assert chat(think=False).requests[0].reasoning.enabled is False
    assert chat(think="high").requests[0].reasoning.effort == "high"


def test_calls_get_ids_and_results_find_them() -> None:
    call = {"function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "look", "content": "blue"},
        {"role": "tool", "tool_name": "look", "content": "wet"},
    ]
    source = chat(messages=messages).requests[0].source
    ids = [c.id for c in source.messages[1].tool_calls]
    assert len(set(ids)) == 2
    assert [m.tool_call_id for m in source.messages[2:]] == ids
    assert source.messages[2].name == "look"


def test_pictures_are_bare_base64() -> None:
    source = chat(messages=[{"role": "user", "content": "a", "images": ["iVBOR"]}])
    (_, image) = source.requests[0].source.messages[0].parts
    assert isinstance(image, PicturePart)
    assert image.url == "data:image/png;base64,iVBOR"


def test_a_prompt_of_generate_is_decoded() -> None:
    def source(**body: Any) -> Any:
        (request,) = OllamaGenerate().decode({"prompt": "a", **body}, namespace=OWN).requests
        return request.source

    assert isinstance(source(), Chat)
    assert [m.role for m in source(system="b").messages] == ["system", "user"]
    assert source(raw=True) == RawText("a")
    assert source(suffix="z") == FillInMiddle("a", "z")
    assert len(source(images=["iVBOR"]).messages[0].parts) == 2
    for without_template in ({"raw": True}, {"suffix": "z"}):
        with pytest.raises(InvalidValue, match="images"):
            source(images=["iVBOR"], **without_template)


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "xml"}, {"think": "much"}, {"keep_alive": "soon"}, {"options": {"seed": "a"}},
        {"messages": [{"role": "nobody"}]}, {"options": []},
        {"messages": [{"role": "user", "images": [1]}]},
    ],
)  # fmt: skip
def test_errors_name_the_parameter(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        chat(**wrong)
    assert caught.value.param is not None
    assert caught.value.param.startswith(next(iter(wrong)))


@pytest.mark.parametrize("written", ['{"at": "sk', "[" * 100_000, "5", ""])
def test_arguments_that_are_no_object_are_an_empty_one(written: str) -> None:
    calls = ToolCallBuffer()
    calls.take(ToolCallStarted(0, 0, "call_0", "look"))
    calls.take(ToolCallDelta(0, 0, written))
    assert calls.whole() == [{"function": {"index": 0, "name": "look", "arguments": {}}}]
