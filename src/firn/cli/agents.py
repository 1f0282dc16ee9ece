"""`firn agents`: the settings that a coding agent needs for a model it does not know.

Each agent knows the models of the large vendors and guesses about others: a million tokens of context,
or none at all. The printed settings give the address, the name, the real context and the longest reply.
They were tested with Claude Code 2.1, Codex 0.166, OpenCode 1.18 and aider 0.86.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from firn.cli.client import ChatClient, RequestFailed
from firn.cli.parameters import DEFAULT_URL
from firn.config import UsageError
from firn.core.errors import SetupError

MAX_OUTPUT_TOKENS = 32_000
"""More than any agent requests by itself."""
SHORT_CONTEXT = 32_768
KEY_VARIABLE = "FIRN_API_KEY"
NO_KEY = "none"
"""Agents need some key even if the server needs none."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an agent sees it. max_output: None if the server has no limit of its own."""

    name: str
    url: str
    context_length: int
    max_output: int | None = None
    vision: bool = False
    has_key: bool = False

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


def _word(text: str) -> str:
    """The text, quoted for a shell so that the variable with the key is still expanded."""
    return f'"{text}"' if text == f"${KEY_VARIABLE}" else shlex.quote(text)


AGENTS: Mapping[str, tuple[Callable[[ServedModel], str], str]] = {
    "claude": (claude, 'run `eval "$({command})"`, then claude'),
    "codex": (codex, "put this into ~/.codex/config.toml"),
    "opencode": (opencode, "put this into opencode.json, in the project or in ~/.config/opencode"),
    "aider": (aider, 'run `eval "$({command})"` in the project\'s folder'),
}
"""How settings are rendered, and where they go; {command} stands for the command that prints them."""


def agents(name: str, model: str | None, *, url: str, api_key: str | None) -> int:
    """Prints the settings to stdout. If that is a terminal, prints to stderr where they belong."""
    if name not in AGENTS:
        raise UsageError(f"unknown agent {name!r}; choose one of {', '.join(AGENTS)}")
    with ChatClient(url, api_key=api_key) as client:
        served = _from_server(client) if model is None else _from_folder(model, client.url)
    served = replace(served, has_key=api_key is not None)
    render, where = AGENTS[name]
    if api_key is not None and os.environ.get(KEY_VARIABLE) != api_key:
        typer.echo(
            f"firn: the settings read the key from {KEY_VARIABLE}, which is not set to this key; "
            "export it first",
            err=True,
        )
    if sys.stdout.isatty():
        typer.echo(f"firn: {where.format(command=_command(name, model, url))}", err=True)
    if served.context_length < SHORT_CONTEXT:
        typer.echo(
            f"firn: {served.name} has a context of {served.context_length} tokens; agents begin with "
            "10,000 to 40,000",
            err=True,
        )
    if name == "claude" and served.name.startswith("claude-"):
        typer.echo(
            "firn: Claude Code treats a name that begins with claude- as one of Anthropic's models "
            "and ignores the context length; give the model another name with --served-model-name",
            err=True,
        )
    typer.echo(render(served), nl=False)
    return 0


def _command(name: str, model: str | None, url: str) -> str:
    """This command, quoted for a shell. It reads the key from FIRN_API_KEY, as the agents do."""
    words = ["firn", "agents", name]
    words += [model] if model is not None else []
    words += ["--url", url] if url != DEFAULT_URL else []
    return shlex.join(words)


def _from_server(client: ChatClient) -> ServedModel:
    """The first model that the running server lists."""
    entry = client.served_models()[0]
    try:
        return ServedModel(
            name=str(entry["id"]),
            url=client.url,
            context_length=int(entry["context_length"]),
            max_output=int(entry.get("max_tokens") or 0) or None,
            vision=bool(entry.get("vision")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RequestFailed(
            f"{client.url} does not report the context length of its model."
        ) from error


def _from_folder(model: str, url: str) -> ServedModel:
    """The model as its folder describes it, which is what a server would report."""
    from firn.demo.builtin import builtin_folder
    from firn.models.inspect import local_folder
    from firn.models.loader import read_config
    from firn.models.recognise import context_length, is_vision

    folder = builtin_folder(model) or local_folder(model)
    if folder is None:
        raise SetupError(f"{model} is not on this machine; `firn serve` would download it.")
    config = read_config(Path(folder))
    return ServedModel(
        name=model.rstrip("/").split("/")[-1],
        url=url,
        context_length=context_length(config),
        vision=is_vision(config),
    )
