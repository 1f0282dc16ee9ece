"""Settings that coding agents need for a model they do not know, and the routes that return them.

Each agent knows the models of the large vendors and guesses about others: a million tokens of context,
or none at all. The settings give the address, the name, the real context and the longest reply. Those
of Claude Code 2.1, Codex 0.166, OpenCode 1.18 and aider 0.86 were tested with these programs; those of
Qwen Code, Cline and Continue follow their documentation.

    GET /v1/agents           all agents with their settings, for the dashboard
    GET /v1/agents/{agent}   the settings alone: eval "$(curl -s http://127.0.0.1:8000/v1/agents/claude)"
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from firn.api.http.exchange import exchange_of
from firn.api.routes.openapi import error_responses
from firn.core.errors import FirnError, InvalidValue, NotFound

MAX_OUTPUT_TOKENS = 32_000
"""More than any agent requests by itself."""
KEY_VARIABLE = "FIRN_API_KEY"
NO_KEY = "none"
"""Agents need some key even if the server needs none."""
_URL = re.compile(r"https?://[\w.:\[\]~/%-]{1,300}")


class UnknownContext(FirnError):
    """The length of a model's context is not known."""

    status = 409
    code = "context_length_unknown"
    kind = "invalid_request_error"

    def __init__(self, name: str) -> None:
        super().__init__(f"The context length of {name} is not known until it is loaded.")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an agent sees it. max_output: None if the server has no limit of its own."""

    name: str
    url: str
    context_length: int
    max_output: int | None = None
    vision: bool = False
    has_key: bool = False

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], url: str) -> ServedModel:
        """From an entry of /v1/models. Raises UnknownContext."""
        try:
            return cls(
                name=str(entry["id"]),
                url=url,
                context_length=int(entry["context_length"]),
                max_output=int(entry.get("max_tokens") or 0) or None,
                vision=bool(entry.get("vision")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnknownContext(str(entry.get("id"))) from error

    @property
    def output_tokens(self) -> int:
        """The longest reply to allow: at most a quarter of the context, so that prompts fit."""
        limits = (MAX_OUTPUT_TOKENS, self.context_length // 4, self.max_output or MAX_OUTPUT_TOKENS)
        return max(min(limits), 1)


def claude(model: ServedModel) -> str:
    """Claude Code uses the context length only for names that are not Anthropic's."""
    settings = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_AUTH_TOKEN": f"${KEY_VARIABLE}" if model.has_key else NO_KEY,
        "ANTHROPIC_MODEL": model.name,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model.name,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model.name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.name,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(model.output_tokens),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return "".join(f"export {name}={_word(value)}\n" for name, value in settings.items())


def codex(model: ServedModel) -> str:
    """Codex compacts only at the limit that is set here; the server limits a reply's length."""
    key = f'env_key = "{KEY_VARIABLE}"\n' if model.has_key else ""
    return (
        f"model = {json.dumps(model.name)}\n"
        'model_provider = "firn"\n'
        f"model_context_window = {model.context_length}\n"
        f"model_auto_compact_token_limit = {model.context_length * 4 // 5}\n"
        "\n"
        "[model_providers.firn]\n"
        'name = "firn"\n'
        f"base_url = {json.dumps(f'{model.url}/v1')}\n"
        'wire_api = "responses"\n'
        f"{key}"
    )


def opencode(model: ServedModel) -> str:
    entry: dict[str, Any] = {
        "name": model.name,
        "limit": {"context": model.context_length, "output": model.output_tokens},
    }
    if model.vision:
        entry["attachment"] = True
        entry["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    key = f"{{env:{KEY_VARIABLE}}}" if model.has_key else NO_KEY
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"firn/{model.name}",
        "small_model": f"firn/{model.name}",
        "provider": {
            "firn": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{model.url}/v1", "apiKey": key},
                "models": {model.name: entry},
            }
        },
    }
    return json.dumps(settings, indent=2) + "\n"


def aider(model: ServedModel) -> str:
    name = f"openai/{model.name}"
    metadata = {
        name: {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": model.context_length,
            "max_output_tokens": model.output_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "supports_vision": model.vision,
        }
    }
    key = f'"${KEY_VARIABLE}"' if model.has_key else NO_KEY
    return (
        "cat > .aider.model.metadata.json <<'END'\n"
        f"{json.dumps(metadata, indent=2)}\n"
        "END\n"
        "cat > .aider.model.settings.yml <<'END'\n"
        f"- name: {json.dumps(name)}\n"
        f"  extra_params: {{max_tokens: {model.output_tokens}}}\n"
        "END\n"
        f"aider --model {_word(name)} --openai-api-base {_word(f'{model.url}/v1')} "
        f"--openai-api-key {key}\n"
    )


def qwen(model: ServedModel) -> str:
    entry = {
        "id": model.name,
        "name": model.name,
        "baseUrl": f"{model.url}/v1",
        "envKey": KEY_VARIABLE,
        "generationConfig": {"contextWindowSize": model.context_length},
    }
    settings: dict[str, Any] = {
        "model": {"name": model.name},
        "modelProviders": {"openai": [entry]},
        "security": {"auth": {"selectedType": "openai"}},
    }
    if not model.has_key:
        settings["env"] = {KEY_VARIABLE: NO_KEY}
    return json.dumps(settings, indent=2) + "\n"


def cline(model: ServedModel) -> str:
    """Cline is set up in its settings panel."""
    fields = {
        "API Provider": "OpenAI Compatible",
        "Base URL": f"{model.url}/v1",
        "API Key": f"the value of {KEY_VARIABLE}" if model.has_key else NO_KEY,
        "Model ID": model.name,
        "Context Window Size": model.context_length,
        "Max Output Tokens": model.output_tokens,
        "Supports Images": "yes" if model.vision else "no",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def continue_dev(model: ServedModel) -> str:
    name = json.dumps(model.name)
    key = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if model.has_key else NO_KEY
    capabilities = "[tool_use, image_input]" if model.vision else "[tool_use]"
    return (
        "name: firn\n"
        "version: 0.0.1\n"
        "schema: v1\n"
        "models:\n"
        f"  - name: {name}\n"
        "    provider: openai\n"
        f"    model: {name}\n"
        f"    apiBase: {json.dumps(f'{model.url}/v1')}\n"
        f"    apiKey: {key}\n"
        "    roles: [chat, edit, apply]\n"
        f"    capabilities: {capabilities}\n"
        "    defaultCompletionOptions:\n"
        f"      contextLength: {model.context_length}\n"
        f"      maxTokens: {model.output_tokens}\n"
    )


def _word(text: str) -> str:
    """The text, quoted for a shell so that the variable with the key is still expanded."""
    return f'"{text}"' if text == f"${KEY_VARIABLE}" else shlex.quote(text)


@dataclass(frozen=True, slots=True)
class Agent:
    title: str
    render: Callable[[ServedModel], str]
    file: str = ""
    """Where the settings belong; empty: they are shell commands."""
    start: str = ""
    """The command that starts the agent after these shell commands; empty: they start it."""

    def where(self, command: str | None = None) -> str:
        """What to do with the settings, or with this shell command, which prints them."""
        if self.file:
            return f"put this into {self.file}"
        run = "this in a terminal" if command is None else f'`eval "$({command})"`'
        return f"run {run}" + (f", then {self.start}" if self.start else " in the project's folder")


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("Claude Code", claude, start="claude"),
    "codex": Agent("Codex", codex, "~/.codex/config.toml"),
    "opencode": Agent(
        "OpenCode", opencode, "opencode.json, in the project or in ~/.config/opencode"
    ),
    "aider": Agent("aider", aider),
    "qwen": Agent("Qwen Code", qwen, "~/.qwen/settings.json"),
    "cline": Agent("Cline", cline, "the settings panel of Cline"),
    "continue": Agent("Continue", continue_dev, "~/.continue/config.yaml"),
}

PARAMETERS = [
    {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
    for name in ("model", "url")
]


def add_agents(app: FastAPI, find: Callable[[str | None], Mapping[str, Any]]) -> None:
    """find: the entry of a model in /v1/models, or of the default model; raises ModelNotFound."""

    def served(request: Request) -> ServedModel:
        """The model that the query names, at the address that the client uses, or says that it uses."""
        query = request.query_params
        url = query.get("url", str(request.base_url)).rstrip("/")
        if _URL.fullmatch(url) is None:
            raise InvalidValue("url", "must be an address that begins with http:// or https://")
        model = ServedModel.from_entry(find(query.get("model")), url)
        return replace(model, has_key=exchange_of(request.scope).caller.has_key)

    async def agents(request: Request) -> dict[str, Any]:
        model = served(request)
        listed = [
            {
                "id": name,
                "title": agent.title,
                "where": agent.where(),
                "settings": agent.render(model),
            }
            for name, agent in AGENTS.items()
        ]
        return {"model": model.name, "url": model.url, "agents": listed}

    async def settings(request: Request, agent: str) -> PlainTextResponse:
        if agent not in AGENTS:
            raise NotFound(f"There is no agent {agent}; choose one of {', '.join(AGENTS)}.")
        return PlainTextResponse(AGENTS[agent].render(served(request)))

    add = partial(
        app.add_api_route,
        methods=["GET"],
        responses=error_responses(),
        openapi_extra={"parameters": PARAMETERS},
    )
    add("/v1/agents", agents, summary="Settings for coding agents")
    add(
        "/v1/agents/{agent}",
        settings,
        summary="Settings for one coding agent",
        response_class=PlainTextResponse,
    )
