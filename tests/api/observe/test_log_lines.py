"""Answers and log lines: why a request was refused, what is served, what was shared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from firn.api.http.auth import Keys
from firn.api.services import ApiLimits
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig
from firn.core.errors import QueueFull
from tests.api import real
from tests.api.live import Live, LogLines, serve
from tests.waiting import wait_until

HI: Any = [{"role": "user", "content": "hi"}]

# --- why it was refused --------------------------------------------------------------------

CHAT, JSON = "/v1/chat/completions", "application/json"
REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", CHAT, {"json": {"messages": HI, "temperature": -1}}),
    ("POST", CHAT, {"json": {"messages": [{"role": "user\nforged", "content": "x"}]}}),
    ("POST", CHAT, {"json": {"messages": HI, "model": "other"}}),
    ("POST", CHAT, {"json": {"messages": [{"role": "user", "content": "a" * 5000}]}}),
    ("POST", CHAT, {"content": b"{", "headers": {"content-type": JSON}}),
    ("POST", CHAT, {"content": b"{}", "headers": {"content-type": "text/plain"}}),
    ("POST", CHAT, {"content": b"x" * 20_000, "headers": {"content-type": JSON}}),
    ("GET", CHAT, {}),
    ("POST", "/v1/completions", {"json": {"prompt": []}}),
    ("POST", "/v1/messages", {"json": {"messages": [{"role": "judge"}]}}),
    ("POST", "/v1/messages/count_tokens", {"json": {}}),
    ("POST", "/v1/responses", {"json": {"input": 5}}),
    ("GET", "/v1/responses/resp_none", {}),
    ("POST", "/v1/tokenize", {"json": {}}),
    ("POST", "/v1/embeddings", {"json": {"input": "a"}}),
    ("GET", "/v1/models/other", {}),
    ("GET", "/v1/models?limit=0", {}),
    ("DELETE", "/v1/models", {}),
    ("GET", "/nowhere", {}),
    ("POST", CHAT, {"json": {"messages": HI}, "headers": {"host": "evil.example"}}),
]


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with serve(limits=ApiLimits(body_nbytes=10_000)) as live:
        yield live


@pytest.mark.parametrize(("method", "path", "what"), REFUSALS)
def test_every_refusal_has_its_reason_in_the_log(
    small: Live, method: str, path: str, what: dict[str, Any]
) -> None:
    answer = httpx.request(method, f"{small.url}{path}", **what)
    assert 400 <= answer.status_code < 500
    line = small.log.wait_for(answer.headers["x-request-id"])
    error = answer.json()["error"]
    shown = "prompt is too long" if "prompt is too long" in error["message"] else error["message"]
    assert f" {answer.status_code} " in line
    assert " error=" in line
    assert ascii(shown[:300])[1:-1] in line
    assert "\n" not in line


def test_a_wrong_key_and_a_full_queue_are_logged_with_their_reason() -> None:
    with serve(keys=Keys(["right"])) as live:
        with pytest.raises(openai.AuthenticationError):
            live.openai(api_key="wrong").models.list()
        assert "error=invalid_api_key" in live.log.wait_for(" 401 ")
        live.engine.refusal = QueueFull()
        with pytest.raises(anthropic.RateLimitError):
            live.anthropic(api_key="right").messages.create(
                model="claude-x", max_tokens=4, messages=HI
            )
        assert "error=queue_full 'Too many requests are waiting" in live.log.wait_for(" 429 ")


def test_a_stream_that_breaks_is_logged_with_its_reason(live: Live) -> None:
    live.engine.hold("decode", after=2)
    stream = live.openai().chat.completions.create(model="fake", messages=HI, stream=True)
    live.engine.wait_for(lambda e: e.n_sent() == 2)
    live.engine.fail(QueueFull())
    with pytest.raises(openai.APIError):
        list(stream)
    assert "finish=queue_full error=queue_full" in live.log.wait_for("finish=")


def test_the_log_line_of_a_good_request_has_no_error(live: Live) -> None:
    live.openai().completions.create(model="fake", prompt="a")
    assert "error=" not in live.log.wait_for("finish=")


# --- what is served ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["claude-sonnet-4-5-20250929", "gpt-5.1-codex", "fake", ""])
def test_the_served_model_answers_to_names_that_agents_ask_for(
    shared_live: Live, name: str
) -> None:
    client = shared_live.openai()
    assert client.chat.completions.create(model=name, messages=HI).model == "fake"
    assert client.completions.create(model=name, prompt="a").model == "fake"
    assert client.responses.create(model=name, input="hi").model == "fake"
    message = shared_live.anthropic().messages.create(model=name, max_tokens=4, messages=HI)
    assert message.model == "fake"
    counted = shared_live.anthropic().messages.count_tokens(model=name, messages=HI)
    assert counted.input_tokens > 0
    body = {"model": name, "text": "a"}
    assert httpx.post(f"{shared_live.url}/v1/tokenize", json=body).status_code == 200
    if name:
        assert client.models.retrieve(name).id == "fake"
        assert shared_live.anthropic().models.retrieve(name).id == "fake"


def test_other_model_names_are_404(shared_live: Live) -> None:
    with pytest.raises(openai.NotFoundError):
        shared_live.openai().models.retrieve("llama-3")
    with pytest.raises(anthropic.NotFoundError):
        shared_live.anthropic().models.retrieve("llama-3")
    assert httpx.get(f"{shared_live.url}/v1/models/").status_code == 404


def test_models_come_in_pages(shared_live: Live) -> None:
    client = shared_live.anthropic()
    first = client.models.list(limit=1)
    assert [model.id for model in first.data] == ["fake"]
    assert (first.first_id, first.last_id, first.has_more) == ("fake", "fake", False)
    assert [model.id for model in client.models.list()] == ["fake"]  # follows the pages
    for query in ({"after_id": "fake"}, {"before_id": "fake"}, {"after_id": "claude-x"}):
        page = client.models.list(**query)  # type: ignore[arg-type]
        assert page.data == []
        assert (page.first_id, page.last_id, page.has_more) == (None, None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=٣", "limit"),
        ("after_id=other", "after_id"),
        ("before_id=", "before_id"),
        ("after_id=fake&before_id=fake", "before_id"),
    ],
)
def test_a_bad_page_is_a_400(shared_live: Live, query: str, param: str) -> None:
    answer = httpx.get(f"{shared_live.url}/v1/models?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_head_answers_without_a_key() -> None:
    with serve(keys=Keys(["right"])) as live:
        for path in ("/", "/health", "/ready"):
            answer = httpx.head(f"{live.url}{path}")
            assert (answer.status_code, answer.content) == (200, b"")
            assert httpx.get(f"{live.url}{path}").status_code == 200
        assert httpx.head(f"{live.url}/v1/models").status_code == 401
        allowed = httpx.head(f"{live.url}/v1/models", headers={"x-api-key": "right"})
        assert allowed.status_code == 200


# --- what was shared -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[real.Real, LogLines]]:
    path = tmp_path_factory.mktemp("model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    real.write_model(path, format="json_tags", template=template)
    config = Config(
        model=ModelConfig(path=str(path)),
        engine=EngineConfig(prefill_chunk=16),
        cache=CacheConfig(cache_block_tokens=16, cache_memory_mb=64, no_ssd_cache=True),
    )
    log = LogLines()
    logger = logging.getLogger("firn.api")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    with real.serving(path, config=config) as server:
        yield server, log
    logger.removeHandler(log)


def counts(dialect: str, server: real.Real, text: str) -> tuple[int, int]:
    """Prompt tokens and how many of them were cached, as this dialect's own client shows them."""
    messages: Any = [{"role": "user", "content": text}]
    client = server.openai()
    if dialect == "messages":
        other = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        used = other.messages.create(model="claude-x", max_tokens=4, messages=messages).usage
        cached = used.cache_read_input_tokens or 0
        return used.input_tokens + cached + (used.cache_creation_input_tokens or 0), cached
    if dialect == "messages stream":
        other = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        with other.messages.stream(model="claude-x", max_tokens=4, messages=messages) as stream:
            used = stream.get_final_message().usage
        cached = used.cache_read_input_tokens or 0
        return used.input_tokens + cached, cached
    if dialect == "responses":
        usage = client.responses.create(model="", input=text, max_output_tokens=4).usage
        assert usage is not None
        return usage.input_tokens, usage.input_tokens_details.cached_tokens
    if dialect == "chat":
        chat = client.chat.completions.create(model="", messages=messages, max_tokens=4)
        tokens = chat.usage
    else:
        tokens = client.completions.create(model="", prompt=text, max_tokens=4).usage
    assert tokens is not None
    assert tokens.prompt_tokens_details is not None
    return tokens.prompt_tokens, tokens.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize(
    "dialect", ["chat", "completions", "responses", "messages", "messages stream"]
)
def test_usage_counts_what_a_neighbour_computed_as_cached(
    sharing: tuple[real.Real, LogLines], dialect: str
) -> None:
    """Two equal prompts run together: each takes over what the other computes."""
    server, log = sharing
    text = f"{dialect}: " + " ".join(f"word {i}" for i in range(60))
    gate = threading.Event()
    waiting = server.server.engine.call(lambda parts: gate.wait(30))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(counts, dialect, server, text) for _ in range(2)]
        wait_until(lambda: server.server.engine.health().n_waiting == 2)
        gate.set()
        (n_prompt, first), (_, second) = (each.result() for each in calls)
    waiting.result()
    assert n_prompt > 64
    # The two take turns and compute all but the last token once, so they save nearly one prompt.
    assert first + second >= n_prompt - 1 - 2 * 16
    lines = [log.wait_for(f"prompt={n_prompt} ") for _ in range(2)]
    (line,) = (each for each in lines if f" cached={max(first, second)} " in each)
    assert "neighbour" in line
