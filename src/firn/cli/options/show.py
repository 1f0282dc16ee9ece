"""`firn config show`: every value with its origin; secrets are counted, never shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from firn.cli.terminal import plain_console
from firn.config import OPTIONS, Config, Option, of_model, unknown_variables, with_model
from firn.core.errors import SetupError
from firn.demo.builtin import builtin_folder

MASK = "***"


def show(config: Config, *, as_json: bool) -> int:
    for line in unknown_variables(os.environ):
        typer.echo(f"firn: {line}", err=True)
    config = _with_model_defaults(config)
    if as_json:
        values = {
            item.key: {
                "value": _plain(item, config.get(item.key)),
                "origin": str(config.origin(item.key)),
                "flag": item.flag,
                "env": item.env,
            }
            for item in OPTIONS
        }
        values |= {
            key: {"value": value, "origin": "file", "flag": None, "env": None}
            for key, value in _tables(config)
        }
        print(json.dumps(values, indent=2))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "value", "origin", "variable"):
        table.add_column(column, overflow="fold")
    for item in OPTIONS:
        origin = config.origin(item.key)
        style = "dim" if origin.kind == "default" else ""
        value = _text(item, config.get(item.key))
        cells = (item.key, value, str(origin), item.env)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    for key, value in _tables(config):
        table.add_row(*(Text(cell) for cell in (key, str(value), "file", "")))
    plain_console(soft_wrap=False).print(table)
    return 0


def _tables(config: Config) -> Iterator[tuple[str, Any]]:
    """What the file sets for individual models."""
    for model in config.tables:
        own = {"path": model.path, "pinned": model.pinned, "aliases": list(model.aliases)}
        own |= {"keep_alive": model.keep_alive} if model.keep_alive else {}
        given = {key.split(".")[1]: value for key, value in model.values.items()}
        for name, value in (own | given).items():
            shown = str(value) if isinstance(value, Path) else value
            yield f"models.{model.name}.{name}", shown


def _with_model_defaults(config: Config) -> Config:
    """The settings with the model's sampling defaults, if the model is on this machine."""
    folder = _folder(config.model.path)
    if folder is None:
        return config
    defaults = of_model(folder)
    for line in defaults.warnings:
        typer.echo(f"firn: {line}", err=True)
    return with_model(config, defaults)


def _folder(name: str) -> Path | None:
    folder = builtin_folder(name) or Path(name)
    if folder.is_dir():
        return folder
    try:
        from firn.models.load.inspect import local_folder

        return local_folder(name)
    except (ImportError, SetupError):
        return None


def _plain(item: Option, value: Any) -> Any:
    if item.spec.secret:
        return [MASK for _ in value] if isinstance(value, tuple) else value and MASK
    if isinstance(value, Path):
        return str(value)
    return [str(part) for part in value] if isinstance(value, tuple) else value


def _text(item: Option, value: Any) -> str:
    plain = _plain(item, value)
    if plain is None or plain == []:
        return "-"
    for word, meaning in item.spec.words.items():
        if meaning == plain and meaning == item.default:
            return word
    if isinstance(plain, bool):
        return "on" if plain else "off"
    return ", ".join(plain) if isinstance(plain, list) else str(plain)
