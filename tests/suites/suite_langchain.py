"""LangChain's standard tests for chat models, through each of its three integrations."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from target import MODEL, URL

NO_TOOL_CHOICE = "Ollama's API has no tool_choice, and a built-in model calls nothing by itself"


class _Standard(ChatModelIntegrationTests):
    """What the built-in text model can do."""

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True


class TestChatOpenAI(_Standard):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": f"{URL}/v1",
            "api_key": "none",
            "max_tokens": 200,
            "temperature": 0,
            "stream_usage": True,
        }


class TestResponses(_Standard):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        shared = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_tokens": 200}
        return {**shared, "use_responses_api": True, "temperature": 0}


class TestChatAnthropic(_Standard):
    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": URL,
            "api_key": "none",
            "max_tokens": 200,
            "temperature": 0,
        }


class TestChatOllama(_Standard):
    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False

    @pytest.mark.xfail(reason=NO_TOOL_CHOICE, strict=False)
    def test_tool_calling_with_no_arguments(self, model: Any) -> None:
        super().test_tool_calling_with_no_arguments(model)

    @property
    def chat_model_class(self) -> type[ChatOllama]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "num_predict": 200, "temperature": 0}
