"""The help of commands that take every setting: the common ones first, all of them on demand.

Plain text in two columns, as wide as the terminal; no name is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer import Exit, echo
from typer.core import TyperCommand

from firn.config import OPTIONS, Option

COMMON = (
    "--host", "--port", "--api-key", "--served-model-name", "--models-dir", "--offline",
    "--max-tokens", "--max-context", "--max-concurrency", "--draft-model", "--tool-call-parser",
    "--reasoning-parser", "--cache-memory-mb", "--ssd-cache-dir", "--ssd-cache-max-gb",
    "--no-ssd-cache", "--kv-cache-quantization", "--log-level",
)  # fmt: skip
ALL = "--help-all"
NOTE = (
    "Each setting can also be a variable of the environment, as FIRN_PORT for --port, or a key of a "
    "TOML file (--config). A flag without a value has an opposite: --no-offline, --ssd-cache."
)
_SHORT = 30
"""Longer names have their text below them."""
_TITLES = {"page": "Dashboard", "log": "Logging", "fleet": "Several models"}


class OptionsCommand(TyperCommand):
    """Its parameters are those of `flags.with_config`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write_head(self, ctx, formatter)
        flags = {item.flag: item for item in OPTIONS}
        _write_options(formatter, "Common options", (flags[flag] for flag in COMMON))
        with formatter.section("More"):
            formatter.write_dl([(ALL, "Show every option."), *_own(self)])
        formatter.write("\n")
        formatter.write_text(NOTE)

    def write_all(self, ctx: Any) -> None:
        formatter = ctx.make_formatter()
        _write_head(self, ctx, formatter)
        for section in dict.fromkeys(item.section for item in OPTIONS):
            items = (item for item in OPTIONS if item.section == section and item.flag)
            _write_options(formatter, _TITLES.get(section, section.capitalize()), items)
        with formatter.section("Other"):
            formatter.write_dl(_own(self))
        formatter.write("\n")
        formatter.write_text(NOTE)
        echo(formatter.getvalue().rstrip("\n"))


def show_all(ctx: Any, is_wanted: bool) -> None:
    """The callback of --help-all."""
    if is_wanted and not ctx.resilient_parsing:
        ctx.command.write_all(ctx)
        raise Exit()


def _write_head(command: TyperCommand, ctx: Any, formatter: Any) -> None:
    formatter.write_usage(ctx.command_path, "[OPTIONS] [MODEL]...")
    command.format_help_text(ctx, formatter)


def _write_options(formatter: Any, title: str, items: Iterable[Option]) -> None:
    with formatter.section(title):
        rows = [(f"{item.flag} {item.metavar}".strip(), text_of(item)) for item in items]
        formatter.write_dl(rows, col_max=_SHORT)


def _own(command: TyperCommand) -> list[tuple[str, str]]:
    """The command's options that are no settings."""
    settings = {item.flag for item in OPTIONS}
    own = [
        param
        for param in command.params
        if param.param_type_name == "option"
        and not getattr(param, "hidden", False)
        and not settings & {*param.opts, *param.secondary_opts}
        and ALL not in param.opts
    ]
    rows = [(f"{param.opts[0]} {param.metavar or ''}".strip(), param.help or "") for param in own]  # type: ignore[attr-defined]
    return [*rows, ("-h, --help", "Show the common options.")]


def text_of(item: Option) -> str:
    """The option's help, its default, and its variable where that is not named like the flag."""
    more = []
    default = item.default
    if default is not None and default != () and default is not False:
        words = item.spec.words.items()
        more.append(f"default {next((word for word, value in words if value == default), default)}")
    if item.flag is None or item.env != f"FIRN_{item.flag[2:].replace('-', '_').upper()}":
        more.append(f"variable {item.env}")
    return f"{item.spec.help} ({', '.join(more)})" if more else item.spec.help
