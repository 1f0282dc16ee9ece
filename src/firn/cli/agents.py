"""`firn agents`: prints the settings that a coding agent needs for a model it does not know."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import typer

from firn.api.routes.agents import AGENTS, KEY_VARIABLE, ServedModel, UnknownContext
from firn.cli.client import ChatClient, RequestFailed
from firn.cli.options.parameters import DEFAULT_URL
from firn.config import UsageError
from firn.core.errors import SetupError

SHORT_CONTEXT = 32_768


def agents(name: str, model: str | None, *, url: str, api_key: str | None) -> int:
    """Prints the settings to stdout. If that is a terminal, prints to stderr where they belong."""
    if name not in AGENTS:
        fault = f"unknown agent {name!r}" if name else "name the agent"
        raise UsageError(f"{fault}; choose one of {', '.join(AGENTS)}")
    with ChatClient(url, api_key=api_key) as client:
        served = _from_server(client) if model is None else _from_folder(model, client.url)
    served = replace(served, has_key=api_key is not None)
    agent = AGENTS[name]
    if api_key is not None and os.environ.get(KEY_VARIABLE) != api_key:
        typer.echo(
            f"firn: the settings read the key from {KEY_VARIABLE}, which is not set to this key; "
            "export it first",
            err=True,
        )
    if sys.stdout.isatty():
        typer.echo(f"firn: {agent.where(_command(name, model, url))}", err=True)
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
    typer.echo(agent.render(served), nl=False)
    return 0


def _command(name: str, model: str | None, url: str) -> str:
    """This command, quoted for a shell. It reads the key from FIRN_API_KEY, as the agents do."""
    words = ["firn", "agents", name]
    words += [model] if model is not None else []
    words += ["--url", url] if url != DEFAULT_URL else []
    return shlex.join(words)


def _from_server(client: ChatClient) -> ServedModel:
    """The first model that the running server lists."""
    try:
        return ServedModel.from_entry(client.served_models()[0], client.url)
    except UnknownContext as error:
        raise RequestFailed(
            f"{client.url} does not report the context length of its model."
        ) from error


def _from_folder(model: str, url: str) -> ServedModel:
    """The model as its folder describes it, which is what a server would report."""
    from firn.assembly import model_names
    from firn.models.load.loader import read_config
    from firn.models.load.recognise import context_length, is_vision

    folder = model_names.on_this_machine(model)
    if folder is None:
        raise SetupError(f"{model} is not on this machine; `firn serve` would download it.")
    config = read_config(Path(folder))
    return ServedModel(
        name=model.rstrip("/").split("/")[-1],
        url=url,
        context_length=context_length(config),
        vision=is_vision(config),
    )
