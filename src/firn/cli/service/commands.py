"""`firn service`: names, flags and help texts. The work is in host/services/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from firn.cli.options.compat import VLLM_MLX
from firn.cli.options.parameters import Guard
from firn.config import OPTIONS
from firn.core.errors import SetupError
from firn.demo.builtin import builtin_folder

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
PATH_FLAGS = frozenset(["--config", *(item.flag for item in OPTIONS if item.scalar is Path)])
MODEL_FLAGS = frozenset(["", "--draft-model"])
VALUE_FLAGS = frozenset(
    [
        "--config",
        *(item.flag for item in OPTIONS if item.scalar is not bool),
        *(flag for flag, meaning in VLLM_MLX.items() if meaning.metavar is not None),
    ]
)
"""Flags whose value is the next word."""


def service_app(guarded: Guard) -> typer.Typer:
    app = typer.Typer(
        help="Run a server whenever you are logged in, or this Mac is on (launchd, systemd).",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("install", context_settings=ANY_ARGUMENTS)(guarded(_install))
    app.command("uninstall")(guarded(_uninstall))
    app.command("restart")(guarded(_restart))
    app.command("status")(guarded(_status))
    app.command("logs")(guarded(_logs))
    return app


def _install(context: typer.Context) -> None:
    """Install and start a server, with the arguments of `firn serve`, in place of an older one.

    For instance `firn service install mlx-community/Qwen3-4B-4bit --port 8000`. It restarts when it
    fails, and at your next login. On a Mac, sudo makes it start with the Mac and run as you.

    Variables for downloads (HF_HOME, HF_TOKEN, proxies, certificates) and for MLX reach it as they are
    now. FIRN_ variables do not: give flags, or --config.
    """
    from firn.host.services import supervisor
    from firn.host.services.environment import passed_on
    from firn.host.services.service import Service

    arguments = tuple(context.args)
    _check(arguments)
    launcher = supervisor()
    environment = passed_on(os.environ)
    launcher.install(Service(_absolute(arguments), environment))
    typer.echo(f"installed and started: {launcher.path}")
    if environment:
        typer.echo(f"with {', '.join(environment)}")
    unused = sorted(name for name in os.environ if name.startswith("FIRN_"))
    if unused:
        typer.echo(
            f"firn: set in this shell, but not for the service: {', '.join(unused)}", err=True
        )


def _check(arguments: tuple[str, ...]) -> None:
    """Raises SetupError for errors that the service, which does not see this shell's variables,
    would report at every start."""
    command = [sys.executable, "-m", "firn", "config", "show", *arguments]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FIRN_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    if done.returncode:
        raise SetupError(
            done.stderr.strip().removeprefix("firn: ") or "these arguments are not valid"
        )


def _absolute(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The service runs in the home folder, so relative paths are made absolute."""
    words: list[str] = []
    flag = ""
    for word in arguments:
        name, sign, value = word.partition("=")
        if not word.startswith("-"):
            words.append(_absolute_value(flag, word))
        else:
            words.append(f"{name}={_absolute_value(name, value)}" if sign else word)
        flag = word if word in VALUE_FLAGS else ""
    return tuple(words)


def _absolute_value(flag: str, text: str) -> str:
    """flag: '' for a model, which may be a folder or a name. firn's own names win over folders."""
    is_path = flag in PATH_FLAGS
    if flag in MODEL_FLAGS and not _is_own(text):
        is_path = text.startswith((".", "~")) or os.path.exists(text)
    return os.path.abspath(os.path.expanduser(text)) if is_path else text


def _is_own(model: str) -> bool:
    from firn.models.load.packaged import PACKAGED

    return model in PACKAGED or builtin_folder(model) is not None


def _uninstall() -> None:
    """Stop the service and remove it. Models and cached prompts stay."""
    from firn.host.services import supervisor

    if not supervisor().uninstall():
        raise SetupError("There is no service to remove.")
    typer.echo("removed")


def _restart() -> None:
    """Stop the service, once running replies have ended, and start it again."""
    from firn.host.services import supervisor

    launcher = supervisor()
    launcher.restart()
    typer.echo(f"restarted: {launcher.path}")


def _status() -> None:
    """Show whether the service is installed and running; exit code 1 if it is not."""
    from firn.host.services import supervisor

    launcher = supervisor()
    status = launcher.status()
    if not status.installed:
        typer.echo("not installed")
    else:
        typer.echo(f"{status.text}: {launcher.path}")
    raise typer.Exit(0 if status.running else 1)


def _logs(
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines.", min=1)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
) -> None:
    """Show what the service has logged."""
    from firn.host.services import supervisor

    command = supervisor().logs(lines, follow=follow)
    try:
        raise typer.Exit(subprocess.call(command))
    except OSError as e:
        raise SetupError(f"{command[0]} cannot be run: {e}") from e
