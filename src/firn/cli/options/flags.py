"""Turns the table of options into typer's parameters, and what typer parsed into a Config.

Flags reach `config.load` as they were typed: one place validates flags, variables and files, and
reports each fault in one line.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from firn.cli.options.compat import PARSERS, VLLM_MLX, AliasFlag, IgnoredFlag, RefusedFlag
from firn.cli.options.help import ALL, show_all, text_of
from firn.config import CONFIG_ENV, OPTIONS, Option, UsageError, load

_FLAGS = {item.key: item.flag for item in OPTIONS}


def with_config(run: Callable[..., int], *, environ: Mapping[str, str] = os.environ) -> Any:
    """A typer command with a flag for every option, which calls `run(config, ...)`.

    Further, keyword-only parameters of `run` become typer parameters of their own. `run` returns
    the exit code.
    """
    own = list(inspect.signature(run).parameters.values())[1:]
    hints = get_type_hints(run, include_extras=True)

    def command(**given: Any) -> None:
        extra = {parameter.name: given.pop(parameter.name) for parameter in own}
        del given["help_all"]
        file = given.pop("config_file")
        foreign = {flag: given.pop(_identifier(flag)) for flag in VLLM_MLX}
        flags = {
            item.key: given[_identifier(item.key)]
            for item in OPTIONS
            if given[_identifier(item.key)] not in (None, [], ())
        }
        names = _apply_foreign(foreign, flags)
        if file is not None and not file.strip():
            raise UsageError("--config: is empty")  # an unset variable must not drop the API keys
        file = Path(file) if file else None
        config = load(flags, environ=environ, file=file, flag_names=names)
        raise typer.Exit(run(config, **extra))

    own = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    parameters = [*_parameters(), *own]
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _apply_foreign(
    foreign: Mapping[str, str | bool | None], flags: dict[str, Any]
) -> dict[str, str]:
    """Adds to `flags` what other servers' flags mean in firn. Returns the aliases used, by key.

    An option's own flag wins over its aliases; of those, the first in the table wins.
    """
    names: dict[str, str] = {}
    for flag, value in foreign.items():
        if value in (None, False):
            continue
        match VLLM_MLX[flag]:
            case IgnoredFlag(text):
                typer.echo(f"firn: {flag} is not needed: {text}", err=True)
            case RefusedFlag(text, unless=unless) if value not in unless:
                raise UsageError(f"{flag}: {text}")
            case AliasFlag(key, unset=unset) if value != unset:
                if key in flags:
                    winner = names.get(key, _FLAGS[key])
                    typer.echo(f"firn: {flag} is ignored: {winner} is given too", err=True)
                else:
                    flags[key], names[key] = value, flag
    for key, known in PARSERS.items():
        if flags.get(key) in known:
            flags[key] = known[flags[key]]
    return names


def _identifier(name: str) -> str:
    return name.lstrip("-").replace("-", "_").replace(".", "_")


def _parameters() -> Iterator[inspect.Parameter]:
    for item in OPTIONS:
        yield _parameter(_identifier(item.key), _flag_type(item), _flag(item), None)
    config_file = typer.Option(
        "--config",
        help=f"Read settings from this TOML file. (variable {CONFIG_ENV})",
        metavar="FILE",
    )
    yield _parameter("config_file", str | None, config_file, None)
    all_options = typer.Option(ALL, help="Show every option.", callback=show_all, is_eager=True)
    yield _parameter("help_all", bool, all_options, False)
    for flag, meaning in VLLM_MLX.items():
        info = typer.Option(flag, hidden=True, metavar=meaning.metavar)
        if meaning.metavar is None:
            yield _parameter(_identifier(flag), bool, info, False)
        else:
            yield _parameter(_identifier(flag), str | None, info, None)


def _parameter(name: str, kind: Any, info: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _flag_type(item: Option) -> Any:
    if item.many:
        return list[str] | None
    return bool | None if item.scalar is bool else str | None


def _flag(item: Option) -> Any:
    if item.flag is None:
        return typer.Argument(help=text_of(item), metavar=item.metavar, show_default=False)
    names = f"{item.flag}/{_opposite(item.flag)}" if item.scalar is bool else item.flag
    return typer.Option(
        names,
        help=text_of(item),
        metavar=item.metavar or None,
        show_default=False,
    )


def _opposite(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
