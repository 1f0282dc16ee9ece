"""Sampling defaults apply in every dialect, for real clients, unless a request says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firn.api.dialects import discover
from firn.api.http.auth import SHARED
from firn.config import CacheConfig, Config, ModelConfig
from firn.core.values import Defaults, Sampling
from tests.api import real
from tests.api.live import Live, serve

MODEL = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
HI: Any = [{"role": "user", "content": "hi"}]
NOTHING: dict[str, Any] = {}


def ask(live: Live, dialect: str, given: dict[str, Any] = NOTHING) -> Sampling:
    """The sampling that the engine receives for a request with these fields, in this dialect."""
    extra = {"extra_body": given}
    match dialect:
        case "chat":
            live.openai().chat.completions.create(model="fake", messages=HI, **extra)
        case "completions":
            live.openai().completions.create(model="fake", prompt="hi", **extra)
        case "responses":
            shown = live.openai().responses.create(model="fake", input="hi", **extra)
            job = live.engine.jobs[-1]
            assert (shown.temperature, shown.top_p) == (
                job.sampling.temperature,
                job.sampling.top_p,
            )
        case _:
            live.anthropic().messages.create(model="fake", max_tokens=9, messages=HI, **extra)
    return live.engine.jobs[-1].sampling


@pytest.fixture(scope="module")
def warm() -> Iterator[Live]:
    defaults = Defaults(
        sampling=MODEL, template_kwargs={"enable_thinking": False}, thinking_budget=7
    )
    with serve(defaults=defaults) as live:
        yield live


DIALECTS = ("chat", "completions", "responses", "messages")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_defaults_apply_to_what_a_request_does_not_say(warm: Live, dialect: str) -> None:
    assert ask(warm, dialect) == MODEL


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_requests_value_overrides_the_default_even_if_it_is_zero(
    warm: Live, dialect: str
) -> None:
    given = {"temperature": 0, "top_k": 0, "repetition_penalty": 1, "presence_penalty": 0.5}
    assert ask(warm, dialect, given) == Sampling(
        temperature=0.0, top_p=0.9, top_k=0, min_p=0.05, presence_penalty=0.5
    )
    assert ask(warm, dialect, {"top_k": -1, "top_p": 1, "min_p": 0}) == Sampling(
        temperature=0.6, repetition_penalty=1.1
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_defaults_sampling_is_neutral(shared_live: Live, dialect: str) -> None:
    assert ask(shared_live, dialect) == Sampling()


def test_v1_models_shows_the_defaults(warm: Live) -> None:
    shown = warm.openai().models.retrieve("fake").model_dump()["sampling_defaults"]
    assert shown["temperature"] == 0.6
    assert shown["top_k"] == 20
    assert set(shown) == {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    }  # fmt: skip


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_template_variables_reach_the_template(warm: Live, dialect: str) -> None:
    ask(warm, dialect)
    assert warm.tokenizer.rendered[-1]["kwargs"] == {"enable_thinking": False}


def test_a_request_for_thinking_overrides_the_default(warm: Live) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    warm.anthropic().messages.create(model="fake", max_tokens=2048, messages=HI, thinking=thinking)
    assert warm.tokenizer.rendered[-1]["kwargs"]["enable_thinking"] is True


def test_generation_config_gives_the_defaults_on_a_real_server(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    real.write_model(tmp_path, format="json_tags", template=template)
    given = {"temperature": 0.0, "top_p": 7, "repetition_penalty": 1.3}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    config = Config(
        model=ModelConfig(path=str(tmp_path)), cache=CacheConfig(disable_prefix_cache=True)
    )
    with real.serving(tmp_path, config=config) as server:
        client = server.openai()
        shown = client.models.list().data[0].model_dump()["sampling_defaults"]
        assert shown["temperature"] == 0.0
        assert shown["top_p"] == 1.0
        assert shown["repetition_penalty"] == 1.3
        # Greedy by default, so replies repeat; not if a request sets a temperature.
        replies = {said(client, {}) for _ in range(3)}
        assert len(replies) == 1
        assert said(client, {"temperature": 5, "repetition_penalty": 1}) not in replies


def said(client: Any, given: dict[str, Any]) -> str:
    reply = client.chat.completions.create(
        model="", messages=HI, max_tokens=16, extra_body={"ignore_eos": True} | given
    )
    return str(reply.choices[0].message.content)


def test_the_thinking_budget_is_a_default() -> None:
    for dialect in discover(Defaults(thinking_budget=7)):
        if dialect.path in ("/v1/completions", "/api/generate"):
            continue
        body: dict[str, Any] = {"input": "hi"} if "responses" in dialect.path else {"messages": HI}
        (request,) = dialect.decode(body, namespace=SHARED).requests
        assert request.reasoning.budget_tokens == 7
    own = {"messages": HI, "thinking_budget": 3}
    chat = next(
        d for d in discover(Defaults(thinking_budget=7)) if d.path == "/v1/chat/completions"
    )
    (request,) = chat.decode(own, namespace=SHARED).requests
    assert request.reasoning.budget_tokens == 3
