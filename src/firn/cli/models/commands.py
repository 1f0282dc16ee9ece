"""`firn models` and `firn pull`: names, flags and help texts. The work is in work.py."""

from __future__ import annotations

from typing import Annotated

import typer

from firn.cli.options.parameters import (
    DEFAULT_URL,
    ApiKey,
    Command,
    Guard,
    ModelsDir,
    Url,
    command_group,
)

Name = Annotated[str, typer.Argument(help="The model's name.", metavar="NAME")]


def models_app(guarded: Guard) -> typer.Typer:
    commands: dict[str, Command] = {"ls": _ls, "load": _load, "unload": _unload, "rm": _rm}
    return command_group("List, load, unload and remove models.", commands, guarded)


def _ls(url: Url = DEFAULT_URL, api_key: ApiKey = None, models_dir: ModelsDir = None) -> None:
    """List the models of the running server with their states; without one, those on this machine."""
    from firn.cli.models.work import ls

    raise typer.Exit(ls(url, api_key, models_dir))


def _load(
    name: Name,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(help="How long it stays loaded unused: 30m, -1 forever.", metavar="TIME"),
    ] = None,
) -> None:
    """Load a model in the running server, and wait until it is loaded."""
    from firn.cli.models.work import change

    raise typer.Exit(change(name, "load", url, api_key, keep_alive=keep_alive))


def _unload(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Unload a model in the running server once its replies have ended."""
    from firn.cli.models.work import change

    raise typer.Exit(change(name, "unload", url, api_key))


def _rm(
    name: Name,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    models_dir: ModelsDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model's files from this machine. Asks first; its cached prompts stay."""
    from firn.cli.models.work import rm

    raise typer.Exit(rm(name, url, api_key, models_dir, yes=yes))


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="The id of a model on the Hugging Face hub, or smollm2.", metavar="MODEL"
        ),
    ],
    models_dir: ModelsDir = None,
    retries: Annotated[
        int,
        typer.Option(
            "--download-retries", help="How often a broken download is resumed.", min=0, metavar="N"
        ),
    ] = 3,
) -> None:
    """Download a model, so that serving it needs no network. Files that are already here
    are not downloaded again."""
    from firn.cli.models.work import pull

    raise typer.Exit(pull(name, models_dir, retries=retries))
