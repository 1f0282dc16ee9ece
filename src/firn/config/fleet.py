"""Settings for several models behind one address: the flags, and a [models.NAME] table for each model.

One model without any of these settings is served by a single process, without a front. A table may
set any option that does not concern the whole server; it is part of the file, so flags and
variables win.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firn.config.options import BadValue, Option, option
from firn.core import units
from firn.core.errors import SetupError

SHARED_SECTIONS = frozenset({"server", "fleet"})
SHARED_KEYS = frozenset({"cache.share_cache", "model.tensor_parallel", "page.no_dashboard"})
"""Sections and options of the server as a whole, not of one model."""
OWN_NAMES = ("path", "pinned", "keep_alive", "aliases")


def keep_alive(text: str) -> str:
    try:
        units.seconds(text)
    except ValueError as e:
        raise BadValue(f"{text!r} {e}") from None
    return text


def alias(text: str) -> str:
    name, equals, model = text.partition("=")
    if not (name.strip() and equals and model.strip()):
        raise BadValue(f"{text!r} is not an alias; write it like fast=my-model")
    return f"{name.strip()}={model.strip()}"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    models: tuple[str, ...] = option(
        (),
        "More models to serve at the same address, each in its own process.",
        flag=None,
        env="FIRN_MODELS",
        metavar="MODEL",
    )
    models_dir: Path | None = option(
        None, "Serve every model folder in this folder as well.", metavar="DIR"
    )
    model_memory_gb: float = option(
        0.0,
        "Memory for all models together, in GiB; auto depends on what the machine has.",
        low=0,
        high=1 << 20,
        words={"auto": 0.0},
    )
    """0: depends on the machine."""
    keep_alive: str = option(
        "30m",
        "How long an unused model stays loaded: 30m, 90 (seconds), -1 forever.",
        metavar="TIME",
        check=keep_alive,
    )
    aliases: tuple[str, ...] = option(
        (),
        "Another name for a model: fast=my-model, or claude-haiku-*=my-model for every name with "
        "that prefix; repeat it for several.",
        flag="--alias",
        env="FIRN_ALIASES",
        metavar="NAME=MODEL",
        check=alias,
    )
    model_wait_s: float = option(
        300.0,
        "Seconds that a request may wait for its model to be loaded.",
        flag="--model-wait",
        env="FIRN_MODEL_WAIT",
        low=0,
        high=86400,
    )
    model_queue: int = option(
        256,
        "Requests of one key that may wait for models to be loaded; more get a 503.",
        low=1,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ModelTable:
    """One [models.NAME] table. values: by the option's key ("engine.max_concurrency")."""

    name: str
    path: str
    pinned: bool = False
    keep_alive: str | None = None
    aliases: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def read_tables(file: Path, tables: object, options: Sequence[Option]) -> tuple[ModelTable, ...]:
    """Raises SetupError."""
    if not isinstance(tables, dict):
        raise SetupError(f"{file}: models is not a table: write [models.NAME]")
    return tuple(_table(file, name, table, options) for name, table in tables.items())


def _table(file: Path, name: str, table: object, options: Sequence[Option]) -> ModelTable:
    place = f"models.{name}"
    if not isinstance(table, dict):
        raise SetupError(f"{file}: {place} is not a table: write [{place}]")
    known = {item.name: item for item in options if item.key != "model.path"}
    own: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in OWN_NAMES:
            own[key] = value
        elif key not in known:
            close = difflib.get_close_matches(key, [*known, *OWN_NAMES], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SetupError(f"{file}: unknown key {place}.{key}{hint}")
        elif known[key].section in SHARED_SECTIONS or known[key].key in SHARED_KEYS:
            raise SetupError(
                f"{file}: {place}.{key} is a setting of the whole server, not of one model"
            )
        else:
            values[known[key].key] = _accepted(file, place, known[key], value)
    return ModelTable(
        name=name,
        path=_text(file, f"{place}.path", own.get("path", name), base=file.parent),
        pinned=_flag(file, f"{place}.pinned", own.get("pinned", False)),
        keep_alive=_keep_alive(file, f"{place}.keep_alive", own.get("keep_alive")),
        aliases=_names(file, f"{place}.aliases", own.get("aliases", [])),
        values=values,
    )


def _accepted(file: Path, place: str, item: Option, value: object) -> Any:
    try:
        return item.accept(value, base=file.parent)
    except BadValue as problem:
        raise SetupError(f"{file}: {place}.{item.name}: {problem}") from None


def _text(file: Path, place: str, value: object, *, base: Path) -> str:
    """A relative folder is relative to the file; a hub id or a built-in name stays as it is."""
    if not isinstance(value, str) or not value.strip():
        raise SetupError(f"{file}: {place}: {value!r} is not text")
    path = Path(os.path.expanduser(value))
    if value.startswith("~"):
        return str(path)
    if value.startswith(".") or (not path.is_absolute() and (base / path).is_dir()):
        return str(base / path)
    return value


def _flag(file: Path, place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SetupError(f"{file}: {place}: {value!r} is not true or false")
    return value


def _keep_alive(file: Path, place: str, value: object) -> str | None:
    if value is None:
        return None
    try:
        units.seconds(value)
    except ValueError as e:
        raise SetupError(f"{file}: {place}: {value!r} {e}") from None
    return str(value)


def _names(file: Path, place: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise SetupError(f"{file}: {place}: {value!r} is not a list of names")
    return tuple(value)
