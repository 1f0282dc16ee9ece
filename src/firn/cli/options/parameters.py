"""Typer parameters that several commands share, and groups of commands. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from firn.config import CONFIG_ENV

Command = Callable[..., None]
Guard = Callable[[Command], Command]
"""Wraps a command so that a named error becomes one line on stderr and an exit code."""


def command_group(help: str, commands: Mapping[str, Command], guarded: Guard) -> typer.Typer:
    app = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    for name, command in commands.items():
        app.command(name)(guarded(command))
    return app


DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[
    str, typer.Option("--url", help="Address of the server.", envvar="FIRN_URL", metavar="URL")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", help="Key, if the server requires one.", envvar="FIRN_API_KEY", metavar="KEY"
    ),
]
ModelsDir = Annotated[
    Path | None,
    typer.Option(
        "--models-dir",
        help="A folder of model folders (otherwise the hub's cache).",
        envvar="FIRN_MODELS_DIR",
        metavar="DIR",
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--ssd-cache-dir",
        help="The cache folder (otherwise the user's). (env FIRN_SSD_CACHE_DIR)",
        metavar="DIR",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help=f"The server's TOML file, which may say where its cache is. (env {CONFIG_ENV})",
        metavar="FILE",
    ),
]
TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="A trace of `firn serve --record-trace`, one in Mooncake's format, or agents' "
        "sessions as JSON."
    ),
]
