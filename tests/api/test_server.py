"""Probes, models, metrics, keys, origins and /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpx
import openai
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from firn.api.http.auth import SHARED, Keys, namespace_of
from firn.api.services import ApiLimits, Telemetry
from firn.core.reuse import Cause, Reason
from firn.text.reply.formats import THINK_TAGS, ReplyFormat
from tests.api.live import Live, serve
from tests.fakes import CHAT_TEMPLATE, FakeTokenizer


def metrics(live: Live, **headers: str) -> dict[str, float]:
    text = httpx.get(f"{live.url}/metrics", headers=headers).text
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_v1_models_shows_the_model(shared_live: Live) -> None:
    client = shared_live.openai()
    (model,) = client.models.list().data
    assert model.id == "fake"
    shown = client.models.retrieve("fake").model_dump()
    assert shown["context_length"] == 4096
    assert shown["layer_kinds"] == ["KVCache", "RotatingKVCache"]
    assert shown["batched"] is False
    assert shown["unbatched_why"] == "it is a fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_aliases_and_an_empty_name_are_the_served_model() -> None:
    with serve(model_aliases=frozenset({"org/other"})) as live:
        for name in ("fake", "org/other", ""):
            reply = live.openai().completions.create(model=name, prompt="a")
            assert reply.model == "fake"
        assert live.openai().models.retrieve("org/other").id == "fake"
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_health_shows_further_details() -> None:
    with serve(telemetry=Telemetry(health=lambda: {"cache": {"reuse": "off"}})) as live:
        health = httpx.get(f"{live.url}/health").json()
        assert health["status"] == "ok"
        assert health["model"] == "fake"
        assert health["cache"] == {"reuse": "off"}


def test_ready_needs_a_recent_step() -> None:
    with serve(limits=ApiLimits(stale_after_s=10)) as live:
        assert httpx.get(f"{live.url}/ready").json() == {"ready": True, "why": None}
        live.engine.last_step_age_s = 11
        answer = httpx.get(f"{live.url}/ready")
        assert answer.status_code == 503
        assert "11 s" in answer.json()["why"]


class ExtraCollector(Collector):
    def collect(self) -> Iterable[Metric]:
        return [GaugeMetricFamily("firn_extra", "Something else.", value=7)]


def test_metrics_count_requests_tokens_and_stages() -> None:
    with serve(telemetry=Telemetry(collectors=(ExtraCollector(),))) as live:
        live.engine.n_cached = 3
        client = live.openai()
        client.completions.create(model="fake", prompt="hello", max_tokens=4)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nope", prompt="hello")
        httpx.get(f"{live.url}/some/stranger/path")
        live.engine.hold("queue")
        with httpx.stream(
            "POST", f"{live.url}/v1/completions", json={"prompt": "a", "stream": True}
        ):
            seen = metrics(live)
        assert seen["firn_requests_total//v1/completions/200"] == 1
        assert seen["firn_requests_total//v1/completions/404"] == 1
        assert seen["firn_requests_total/other/404"] == 1
        assert seen["firn_tokens_total/prompt"] == 5
        assert seen["firn_tokens_total/cached"] == 3
        assert seen["firn_tokens_total/completion"] == 4
        assert seen["firn_first_token_seconds_count"] == 1
        assert seen["firn_jobs/waiting"] == 1
        assert seen["firn_calls"] == 1
        assert seen["firn_engine_alive"] == 1
        assert seen["firn_extra"] == 7
        live.log.wait_for("client gone")
        assert metrics(live)["firn_clients_gone_total"] == 1


def test_one_log_line_per_request(live: Live) -> None:
    live.engine.n_cached = 2
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "hello", "max_tokens": 4})
    line = live.log.wait_for("POST")
    for text in (answer.headers["x-request-id"], "200", "prompt=5", "cached=2", "reply=4"):
        assert text in line
    assert "first=" in line
    assert "finish=length" in line
    assert sum(answer.headers["x-request-id"] in r.getMessage() for r in live.log.records) == 1


# --- keys ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with serve(keys=Keys(["alice", "bob"])) as live:
        yield live


CLOSED = ["/v1/models", "/v1/models/fake", "/metrics", "/docs", "/openapi.json", "/nowhere"]


@pytest.mark.parametrize("path", CLOSED)
def test_all_other_routes_need_a_key(locked: Live, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer carol"}, {"x-api-key": "carol"}):
        answer = httpx.get(f"{locked.url}{path}", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["x-request-id"]
    for headers in ({"authorization": "Bearer alice"}, {"x-api-key": "bob"}):
        expected = 404 if path == "/nowhere" else 200
        assert httpx.get(f"{locked.url}{path}", headers=headers).status_code == expected


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(locked: Live, path: str) -> None:
    assert httpx.get(f"{locked.url}{path}").status_code == 200


def test_each_key_has_its_own_namespace(locked: Live) -> None:
    for key in ("alice", "bob"):
        locked.openai(api_key=key).completions.create(model="fake", prompt="a")
        assert locked.engine.jobs[-1].namespace == namespace_of(key)
    n_jobs = len(locked.engine.jobs)
    with pytest.raises(openai.AuthenticationError):
        locked.openai(api_key="carol").completions.create(model="fake", prompt="a")
    assert len(locked.engine.jobs) == n_jobs


def test_a_shared_cache_shares_no_responses() -> None:
    with serve(keys=Keys(["alice", "bob"], share=True)) as live:
        alice, bob = (live.openai(api_key=key).responses for key in ("alice", "bob"))
        kept = alice.create(model="fake", input="hi")
        assert live.engine.jobs[-1].namespace == SHARED
        for foreign in (bob.retrieve, bob.delete, bob.cancel, bob.input_items.list):
            with pytest.raises(openai.NotFoundError):
                foreign(kept.id)
        with pytest.raises(openai.BadRequestError, match="does not exist or was evicted"):
            bob.create(model="fake", input="hi", previous_response_id=kept.id)
        assert alice.retrieve(kept.id).output_text == kept.output_text


def test_without_keys_there_is_one_namespace(shared_live: Live) -> None:
    shared_live.openai(api_key="anything").completions.create(model="fake", prompt="a")
    assert shared_live.engine.jobs[-1].namespace == SHARED


# --- browsers ------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": "http://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type",
}


def test_other_origins_are_off_by_default(shared_live: Live) -> None:
    answer = httpx.options(f"{shared_live.url}/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


def test_an_allowed_origin_gets_cors_headers() -> None:
    with serve(allow_origins=("http://app.example",), keys=Keys(["alice"])) as live:
        url = f"{live.url}/v1/completions"
        assert httpx.options(url, headers=PREFLIGHT).status_code == 200
        refused = httpx.post(url, json={"prompt": "a"}, headers={"origin": "http://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://app.example"
        exposed = refused.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-session", "x-firn-approximate", "retry-after"} <= set(exposed)
        stranger = {**PREFLIGHT, "origin": "http://evil.example"}
        assert httpx.options(url, headers=stranger).status_code == 400


# --- its description -----------------------------------------------------------------------


def test_openapi_describes_the_bodies(shared_live: Live) -> None:
    spec = httpx.get(f"{shared_live.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = spec["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"temperature", "stop", "n", "cache"} <= set(schema["properties"])
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
        answer = httpx.post(f"{shared_live.url}{path}", json=schema["example"])
        assert answer.status_code == 200
    assert "Error" in spec["components"]["schemas"]


def test_one_line_a_request_says_what_was_reused_and_why_not_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="firn.api")
    with serve() as live:
        live.engine.n_cached = 3
        live.engine.tiers = (("memory", 1), ("ssd", 2))
        live.engine.reason = Reason(Cause.DIVERGED, 3)
        live.openai().completions.create(model="fake", prompt="a b c d e", max_tokens=2)
    # Another server of this module may still be writing its last line.
    lines = [r.getMessage() for r in caplog.records if "/v1/completions" in r.getMessage()]
    (line,) = [line for line in lines if "diverged at token 3" in line]
    assert 'cached=3 (memory 1, ssd 2) why="diverged at token 3" reply=2 first=' in line
    assert "finish=length" in line


def test_a_model_without_a_template_neither_chats_nor_thinks() -> None:
    tagged = ReplyFormat(tool="json_tags", think=THINK_TAGS["think"])
    for template, can in (
        (None, ["completion"]),
        (CHAT_TEMPLATE, ["completion", "chat", "tools", "thinking"]),
    ):
        with serve(tokenizer=FakeTokenizer(chat_template=template), reply_format=tagged) as live:
            (model,) = httpx.get(f"{live.url}/v1/models").json()["data"]
            assert model["capabilities"] == can
