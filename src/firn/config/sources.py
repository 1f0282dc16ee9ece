"""Builds the tree from its sources: defaults < TOML file < environment < flags."""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from firn.config.fleet import ModelTable, read_tables
from firn.config.options import BadValue
from firn.config.server import header_safe
from firn.config.tree import OPTIONS, SECTIONS, Config, Origin
from firn.core.errors import SetupError

CONFIG_ENV = "FIRN_CONFIG"
# FIRN_ variables that are not settings of the server: the Makefile's, the chat's and the tests'.
OTHER_ENV = frozenset({CONFIG_ENV, "FIRN_MLX", "FIRN_URL", "FIRN_API_KEY", "FIRN_BROWSER"})


class UsageError(SetupError):
    """A flag is at fault, not the machine or a file: exit code 2."""

    code = "usage_error"


Given = dict[str, tuple[Any, Origin]]


def load(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: Path | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> Config:
    """The tree from its sources. Raises SetupError, or UsageError where a flag is at fault.

    `flags` holds what the command line gave, by key: a text, a list of texts, or a bool. `file` is
    the TOML file; without it the one that FIRN_CONFIG names. `flag_names`: by key, the flag that was
    given where it is not the option's own.
    """
    if file is None and environ.get(CONFIG_ENV, "").strip():
        file = Path(os.path.expanduser(environ[CONFIG_ENV].strip()))
    given: Given = {}
    tables: tuple[ModelTable, ...] = ()
    if file is not None:
        given, tables = _from_file(file)
    given |= _from_environ(environ)
    given |= _from_flags(flags, flag_names or {})
    _add_key_file(given)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for item in OPTIONS:
        if item.key in given:
            values[item.section][item.name] = given[item.key][0]
    origins = types.MappingProxyType({key: origin for key, (_, origin) in given.items()})
    return Config(
        **{section: cls(**values[section]) for section, cls in SECTIONS.items()},
        tables=tables,
        origins=origins,
    )


def _from_file(path: Path) -> tuple[Given, tuple[ModelTable, ...]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path}: is not valid TOML: {error}") from error
    known = {item.key: item for item in OPTIONS}
    given: Given = {}
    models = read_tables(path, tables.pop("models", {}), OPTIONS)
    for section, table in tables.items():
        if section not in SECTIONS:
            _unknown(path, section, [*SECTIONS, "models"] if isinstance(table, dict) else known)
        if not isinstance(table, dict):
            raise SetupError(f"{path}: {section} is not a table: write [{section}]")
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in known:
                _unknown(path, key, known)
            try:
                value = known[key].accept(value, base=path.parent)
            except BadValue as problem:
                raise SetupError(f"{path}: {key}: {problem}") from None
            given[key] = (value, Origin("file", str(path)))
    return given, models


def _unknown(path: Path, key: str, known: Iterable[str]) -> NoReturn:
    """Names are compared without their sections, to find a right name in the wrong section too."""
    by_name = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)
    hint = f"; did you mean {by_name[close[0]]}?" if close else ""
    raise SetupError(f"{path}: unknown key {key}{hint}")


def _from_environ(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    for item in OPTIONS:
        text = environ.get(item.env)
        # Empty means unset, as compose files write it; but a secret that turned out empty must not
        # leave the server open.
        if text is None or (not text.strip() and not item.spec.secret):
            continue
        try:
            given[item.key] = (item.parse(text), Origin("env", item.env))
        except BadValue as problem:
            raise SetupError(f"{item.env}: {problem}") from None
    return given


def _from_flags(flags: Mapping[str, Any], names: Mapping[str, str]) -> Given:
    known = {item.key: item for item in OPTIONS}
    given: Given = {}
    for key, raw in flags.items():
        item = known[key]
        name = names.get(key) or item.flag or item.metavar
        try:
            given[key] = (item.parse_flag(raw), Origin("flag", name))
        except BadValue as problem:
            raise UsageError(f"{name}: {problem}") from None
    return given


def _add_key_file(given: Given) -> None:
    """Adds the keys in server.api_key_file to those that were listed."""
    if "server.api_key_file" not in given:
        return
    path, origin = given["server.api_key_file"]
    keys = _read_keys(path)
    listed, listed_origin = given.get("server.api_keys", ((), None))
    if listed_origin is not None:
        origin = Origin(listed_origin.kind, f"{listed_origin.where} and {path}")
    given["server.api_keys"] = (tuple(dict.fromkeys(listed + keys)), origin)


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SetupError(f"{path}: the API keys cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"{path}: the API keys are not UTF-8 text") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        # An empty file must not leave the server open.
        raise SetupError(f"{path}: contains no API key")
    for key in keys:
        try:
            header_safe(key)
        except BadValue as problem:
            raise SetupError(f"{path}: {problem}") from None
    return keys


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each FIRN_ variable that sets nothing: it is probably a typo."""
    known = {item.env for item in OPTIONS} | OTHER_ENV
    lines = []
    for name in sorted(environ):
        if name.startswith("FIRN_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            lines.append(f"{name} is set, but firn has no such variable{hint}")
    return tuple(lines)
