"""LiteLLM: each of its providers that can speak to firn, and the errors that its users act on."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from target import CHAT_TOOL, HI, MODEL, URL, WEATHER

PROVIDERS = {
    "openai": f"{URL}/v1",
    "hosted_vllm": f"{URL}/v1",
    "lm_studio": f"{URL}/v1",
    "anthropic": URL,
    "ollama": URL,
    "ollama_chat": URL,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
every_provider = pytest.mark.parametrize("provider", PROVIDERS)


def ask(provider: str, **options: Any) -> Any:
    given = {"messages": HI, "max_tokens": 100, "temperature": 0, **options}
    where = {"api_base": PROVIDERS[provider], "api_key": "none"}
    return litellm.completion(f"{provider}/{MODEL}", **where, **given)


@every_provider
def test_a_reply_and_its_stream(provider: str) -> None:
    whole = ask(provider)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.prompt_tokens > 0
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(provider, stream=True)]
    assert "".join(pieces) == text


@every_provider
def test_structured_output(provider: str) -> None:
    reply = ask(provider, response_format=SCHEMA).choices[0]
    assert set(json.loads(reply.message.content)) == {"place"}


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if not p.startswith("ollama")])
def test_a_required_tool_is_called(provider: str) -> None:
    """Ollama's API has no tool_choice."""
    reply = ask(provider, tools=[CHAT_TOOL], tool_choice="required").choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"place"}


@every_provider
def test_tools_may_be_offered(provider: str) -> None:
    assert ask(provider, tools=[CHAT_TOOL]).choices[0].finish_reason in (
        "stop",
        "tool_calls",
        "length",
    )


@every_provider
def test_too_long_a_conversation_is_told_so(provider: str) -> None:
    """LiteLLM knows the words of its Ollama providers' server, not these, and calls it a bad request."""
    ollama = provider.startswith("ollama")
    error = litellm.BadRequestError if ollama else litellm.ContextWindowExceededError
    with pytest.raises(
        error, match="too long" if provider == "anthropic" else "maximum context length"
    ):
        ask(provider, messages=[{"role": "user", "content": "word " * 100_000}])


@every_provider
def test_an_unknown_model_is_not_found(provider: str) -> None:
    where = {"api_base": PROVIDERS[provider], "api_key": "none"}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(f"{provider}/nobody", HI, max_tokens=5, num_retries=0, **where)


def test_responses() -> None:
    reply = litellm.responses(
        model=f"openai/{MODEL}",
        input="Hello!",
        api_base=f"{URL}/v1",
        api_key="none",
        max_output_tokens=20,
    )
    assert reply.output
