"""Several models behind one address, through the real clients of each API, with real processes.

Slow: every model is a server process that has to start.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from firn.demo.facts import make_session
from firn.fleet.placement import ModelState
from firn.traces.read import read
from firn.traces.trace import TraceEntry
from tests.fleet.fronts import Running, config, fronting
from tests.metrics_table import documented, shown

DENSE, HYBRID = "firn-demo", "firn-demo-hybrid"
SESSION = make_session(3, n_facts=4, n_questions=4, kinds=("fact",), placement="system")


def messages(n: int = 0) -> list[Any]:
    return SESSION.messages(n)


def ask(front: Running, model: str, n: int = 0, **more: Any) -> Any:
    create = front.client.chat.completions.create
    return create(model=model, messages=messages(n), temperature=0, max_tokens=64, **more)


def right(reply: Any, n: int = 0) -> bool:
    return bool(reply.choices[0].message.content == SESSION.questions[n].answer)


# --- the built-in pair, both loaded --------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of the pair's requests."""
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> Iterator[Running]:
    made = config(
        DENSE,
        HYBRID,
        tmp=tmp_path_factory.mktemp("pair"),
        **{"fleet.aliases": [f"fast={HYBRID}"], "log.record_trace": str(trace)},
    )
    with fronting(made) as front:
        yield front


def test_models_are_loaded_when_a_request_needs_them(pair: Running) -> None:
    assert pair.states() == {DENSE: "unloaded", HYBRID: "unloaded"}
    listed = {model["id"]: model for model in pair.plain.get("/v1/models").json()["data"]}
    assert listed[DENSE]["context_length"] == 16384
    assert listed[DENSE]["capabilities"] == ["completion", "chat", "tools"]
    assert listed[DENSE]["default"]
    assert listed[HYBRID]["aliases"] == ["fast"]
    reply = ask(pair, "fast")
    assert right(reply)
    assert reply.model == HYBRID
    assert pair.states() == {DENSE: "unloaded", HYBRID: "loaded"}
    shown = pair.plain.get("/v1/models/fast").json()
    assert shown["id"] == HYBRID
    assert shown["state"] == "loaded"
    assert shown["expires_at"]
    assert shown["bytes"] > 300e6
    widens = not os.environ.get("TESTS_DEVICE")  # else it is as on a GPU
    assert shown["dtype"] == ("float32" if widens else "bfloat16")


def test_activity_shows_every_model_and_loads_none(pair: Running) -> None:
    assert right(ask(pair, HYBRID))
    pair.plain.post(f"/v1/models/{DENSE}/unload").raise_for_status()
    states = {DENSE: "unloaded", HYBRID: "loaded"}
    seen: dict[str, Any] = {}
    with pair.plain.stream("GET", "/v1/activity") as response:
        assert response.status_code == 200
        event = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                seen[event] = json.loads(line.removeprefix("data: "))
            if {"models", "state", "calls"} <= seen.keys():
                break
        assert pair.states() == states
    assert {model["id"]: model["state"] for model in seen["models"]} == states
    assert seen["state"]["model"] == HYBRID
    assert all(call["model"] == HYBRID and call["phase"] == "done" for call in seen["calls"])
    assert pair.model(DENSE).n_loads == 0


def test_the_default_model_answers_to_names_of_other_vendors(pair: Running) -> None:
    assert ask(pair, "gpt-5-mini").model == DENSE
    assert ask(pair, "").model == DENSE
    reply = pair.anthropic().messages.create(
        model="claude-haiku-4-5",
        system=messages()[0]["content"],
        messages=messages()[1:],
        max_tokens=64,
        extra_body={"temperature": 0},
    )
    assert reply.model == DENSE
    assert reply.content[0].text == SESSION.questions[0].answer  # type: ignore[union-attr]


def test_an_unknown_model_is_a_404_in_each_dialect(pair: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="firn-demo, firn-demo-hybrid"):
        ask(pair, "nobody")
    with pytest.raises(Exception, match="not_found_error"):
        pair.anthropic().messages.create(
            model="nobody", messages=[{"role": "user", "content": "a"}], max_tokens=1
        )
    with pytest.raises(ollama.ResponseError, match="nobody") as caught:
        pair.ollama().chat("nobody", [{"role": "user", "content": "a"}])
    assert caught.value.status_code == 404


def test_streams_are_relayed_unchanged(pair: Running) -> None:
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in ask(pair, DENSE, stream=True, stream_options=options):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == SESSION.questions[0].answer
    assert usage is not None
    with pair.anthropic().messages.stream(
        model=HYBRID,
        system=messages()[0]["content"],
        messages=messages()[1:],
        max_tokens=64,
        extra_body={"temperature": 0},
    ) as stream:
        assert stream.get_final_text() == SESSION.questions[0].answer


def test_ollamas_client_lists_asks_and_shows_models(pair: Running) -> None:
    client = pair.ollama()
    names = [model.model for model in client.list().models]
    assert names == [f"{DENSE}:latest", f"{HYBRID}:latest"]
    options = {"temperature": 0, "num_predict": 64}
    reply = client.chat(f"{DENSE}:latest", messages(), options=options, keep_alive="10m")
    assert reply.message.content == SESSION.questions[0].answer
    assert reply.done_reason == "stop"
    assert (reply.eval_count or 0) > 0
    text = "".join(
        part.message.content or ""
        for part in client.chat("fast", messages(), options=options, stream=True)
    )
    assert text == SESSION.questions[0].answer
    shown = client.show(DENSE)
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["qwen3.context_length"] == 16384
    loaded = {model.model: model for model in client.ps().models}
    assert set(loaded) == {f"{DENSE}:latest", f"{HYBRID}:latest"}
    assert loaded[f"{DENSE}:latest"].context_length == 16384
    whole = "".join(
        part.response or ""
        for part in client.generate(DENSE, "Hello", options=options, stream=True)
    )
    assert whole
    with pytest.raises(ollama.ResponseError, match="does not compute embeddings"):
        client.embed(DENSE, "text")


def test_errors_have_the_dialects_shape(pair: Running) -> None:
    http = pair.plain
    bad = {"model": DENSE, "messages": [{"role": "nobody"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=bad).json()["error"]["code"] == "invalid_value"
    assert http.post("/v1/messages", json=bad).json()["type"] == "error"
    assert isinstance(http.post("/api/chat", json=bad).json()["error"], str)
    never = {"model": DENSE, "messages": messages(), "keep_alive": "soon"}
    refused = http.post("/v1/chat/completions", json=never)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "keep_alive"
    assert http.get("/v1/nothing").status_code == 404
    assert http.post("/v1/models/nobody/load").status_code == 404


def test_counters_and_statistics_have_the_models_name(pair: Running) -> None:
    http = pair.plain
    for name in (DENSE, HYBRID):
        body = {"model": name, "messages": messages(), "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    stats = http.get("/v1/cache/stats").json()["models"]
    assert set(stats) == {DENSE, HYBRID}
    for each in stats.values():
        assert each["enabled"]
        assert each["tiers"] == ["memory", "ssd"]
        assert {"records", "used_bytes"} <= set(each["memory"]) & set(each["ssd"])
    assert set(http.get(f"/v1/cache/stats?model={DENSE}").json()["models"]) == {DENSE}
    text = http.get("/metrics").text
    assert f'firn_model_loaded{{model="{DENSE}"}} 1.0' in text
    assert f'firn_tokens_total{{model="{HYBRID}",kind="prompt"}}' in text
    assert text.count("# TYPE firn_tokens_total counter") == 1
    for name in (DENSE, HYBRID):
        samples = [
            x for x in text.splitlines() if x.startswith(f'firn_cache_bytes{{model="{name}",')
        ]
        assert any('tier="memory"' in x for x in samples)
        assert any('tier="ssd"' in x for x in samples)
        assert f'firn_mlx_bytes{{model="{name}",kind="active"}}' in text
    table, _, of_the_front = documented()
    named = shown(text)
    assert named.keys() == table.keys()
    for name, metric in named.items():
        assert metric.labels <= table[name].labels | {"model"}, name
    assert of_the_front
    assert http.get("/health").json()["models"] == {DENSE: "loaded", HYBRID: "loaded"}


def test_every_model_writes_to_the_trace(pair: Running, trace: Path) -> None:
    n_before = len(trace.read_bytes().splitlines()) if trace.exists() else 0
    for name in (DENSE, HYBRID, DENSE):
        assert right(ask(pair, name))
    while len(entries := _written(trace)) < n_before + 3:
        pass  # it is written after the reply
    blocks = {
        name: [b for e in entries if e.model == name for b in e.blocks] for name in (DENSE, HYBRID)
    }
    assert len(set(blocks[DENSE])) < len(blocks[DENSE]), "prompts share what they share"
    assert blocks[HYBRID]
    assert not set(blocks[DENSE]) & set(blocks[HYBRID]), "and models nothing"


def _written(trace: Path) -> list[TraceEntry]:
    return list(read(trace).entries) if trace.exists() and trace.stat().st_size else []


def test_stored_responses_are_found_again(pair: Running) -> None:
    client = pair.client
    first = client.responses.create(model=HYBRID, input="Hello", max_output_tokens=4)
    assert client.responses.retrieve(first.id).id == first.id
    compacted = client.responses.compact(model=HYBRID, previous_response_id=first.id)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    again = client.responses.create(
        model=HYBRID, input="More", previous_response_id=first.id, max_output_tokens=4
    )
    assert again.previous_response_id == first.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_only_the_front_can_reach_a_models_process(pair: Running) -> None:
    ask(pair, DENSE)
    child = pair.model(DENSE).child
    assert child is not None
    assert stat.S_IMODE(os.stat(child.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(child.socket.parent).st_mode) == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(child.socket))) as direct:
        body = {"messages": messages()}
        refused = direct.post("http://localhost/v1/chat/completions", json=body)
        assert refused.status_code == 401
    forged = {"x-firn-caller": "other other 1"}
    listed = pair.http(headers=forged).get("/v1/cache/stats")
    assert listed.status_code == 200  # on the front's authority, not because of the header


def test_the_front_refuses_foreign_host_names(pair: Running) -> None:
    http = pair.http(headers={"host": "evil.example"})
    assert http.get("/v1/models").status_code == 403
    page = pair.http(headers={"origin": "https://evil.example"})
    assert page.post(f"/v1/models/{DENSE}/unload").status_code == 403


def test_a_process_that_dies_is_started_again(pair: Running) -> None:
    """Its clients get an error immediately; those of the other model notice nothing."""
    ask(pair, HYBRID)
    with pair.plain.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": DENSE, "messages": messages(), "stream": True, "ignore_eos": True},
    ) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))  # after progress comments
        pair.kill(DENSE)
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["error"]["code"] == "model_died"
    assert right(ask(pair, HYBRID))
    assert right(ask(pair, DENSE))  # waits for the new one
    assert pair.model(DENSE).n_loads == 2
    assert pair.model(HYBRID).n_loads == 1


def test_a_model_that_is_loaded_again_finds_its_records(pair: Running) -> None:
    """What was computed before the model was unloaded is read from the SSD afterwards: the prompt is
    long enough that reading it clearly takes less time than computing it."""
    long = make_session(5, n_facts=80, n_questions=1, kinds=("fact",), placement="system")

    def ask_long() -> Any:
        create = pair.client.chat.completions.create
        return create(model=DENSE, messages=long.messages(0), temperature=0, max_tokens=64)  # type: ignore[arg-type]

    ask_long()
    cached = ask_long().usage.prompt_tokens_details.cached_tokens
    assert cached > 1024
    gone = pair.plain.post(f"/v1/models/{DENSE}/unload").json()
    assert gone["state"] == "unloaded"
    assert gone["expires_at"] is None
    body = {"keep_alive": -1}
    back = pair.plain.post(f"/v1/models/{DENSE}/load", json=body).json()
    assert back["state"] == "loaded"
    assert back["expires_at"] is None
    after = ask_long()
    assert after.choices[0].message.content == long.questions[0].answer
    assert after.usage.prompt_tokens_details.cached_tokens >= cached


def test_a_requests_keep_alive_unloads_the_model(pair: Running) -> None:
    assert right(ask(pair, DENSE, extra_body={"keep_alive": 0}))
    pair.until(DENSE, ModelState.UNLOADED)
    assert pair.model(DENSE).n_unloads["idle"] == 1
    client = pair.ollama()
    assert client.generate(HYBRID, keep_alive=0).done_reason == "unload"
    assert pair.states()[HYBRID] == "unloaded"
