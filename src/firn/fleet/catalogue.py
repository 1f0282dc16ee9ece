"""Which models there are, and all their names. Nothing here is loaded or running."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firn.api.services import STAND_INS
from firn.config import OPTIONS, SECTIONS, Config
from firn.core import units
from firn.core.errors import SetupError

EVERY = "*"
"""At the end of an alias: matches every name that begins with the rest."""
TAG = ":latest"
"""Ollama's clients append this to names."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve. config: of its process. keep_alive_s: how long it stays loaded unused."""

    name: str
    config: Config
    pinned: bool = False
    keep_alive_s: float = units.FOREVER
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.config.model.path


class ModelCatalogue:
    """The models of --models-dir come and go with their folders; the others never change.

    Owner: the front, on the asyncio thread.
    """

    def __init__(self, config: Config) -> None:
        """Raises SetupError."""
        self._config = config
        self._folder = config.fleet.models_dir
        if self._folder is not None and not self._folder.is_dir():
            raise SetupError(f"--models-dir: there is no folder {self._folder}")
        self._fixed = _by_name(_named_models(config))
        _check_events(config, self._fixed.values())
        self._in_folder: dict[str, ModelSpec] = {}
        self._aliases: dict[str, str] = {}
        self.rescan()
        if not self._specs and self._folder is not None:
            raise SetupError(f"--models-dir: {self._folder} contains no model folders")

    @property
    def _specs(self) -> dict[str, ModelSpec]:
        return {**self._fixed, **self._in_folder}

    def rescan(self) -> None:
        """Scan --models-dir again."""
        in_folder: dict[str, ModelSpec] = {}
        for name, folder in folders(self._folder):
            known = self._in_folder.get(name)
            if name not in self._fixed:
                in_folder[name] = known or _spec(self._config, name, str(folder))
        self._in_folder = in_folder
        self._aliases = self._all_aliases()

    def _all_aliases(self) -> dict[str, str]:
        aliases: dict[str, str] = {}
        for spec in self._specs.values():
            aliases |= dict.fromkeys((*spec.aliases, spec.path), spec.name)
        for entry in self._config.fleet.aliases:
            alias, _, name = entry.partition("=")
            if name not in self._specs and name not in aliases and self._folder is None:
                raise SetupError(f"--alias {entry}: no model is called {name}")
            aliases[alias] = aliases.get(name, name)
        return aliases

    def __iter__(self) -> Iterator[ModelSpec]:
        return iter(self._specs.values())

    @property
    def default(self) -> ModelSpec | None:
        """The first model, for requests that name none, or one of OpenAI's or Anthropic's. None:
        all folders of --models-dir are gone."""
        return next(iter(self._specs.values()), None)

    def find(self, name: str) -> ModelSpec | None:
        """The model that a request means by this name."""
        spec = self._known(name)
        means_default = not name or name.startswith(STAND_INS)
        if spec is None and self._folder and not (means_default and self.default):
            self.rescan()
            spec = self._known(name)
        return self.default if spec is None and means_default else spec

    def _known(self, name: str) -> ModelSpec | None:
        specs = self._specs
        for known in (name, name.removesuffix(TAG)):
            spec = specs.get(known) or specs.get(self._aliases.get(known, ""))
            if spec is not None:
                return spec
        for pattern, model in self._aliases.items():
            if pattern.endswith(EVERY) and name.startswith(pattern.removesuffix(EVERY)):
                return specs.get(model)
        return None

    def aliases_of(self, spec: ModelSpec) -> tuple[str, ...]:
        return tuple(a for a, name in self._aliases.items() if name == spec.name and a != spec.path)


def _named_models(config: Config) -> Iterator[ModelSpec]:
    """Models from the command line first, then those from the configuration file's tables."""
    tables = {table.name: table for table in config.tables}
    listed = list(config.fleet.models)
    if config.origin("model.path").kind != "default":
        listed.insert(0, config.model.path)
    elif not (listed or tables or config.fleet.models_dir):
        listed = [config.model.path]
    by_path = {table.path: table.name for table in config.tables}
    listed = [by_path.get(path, path) for path in listed]
    served_name = config.server.served_model_name
    for i, path in enumerate(listed):
        if path in tables:
            yield _table_spec(config, path)
        else:
            name = served_name if served_name and i == 0 else path.rstrip("/").split("/")[-1]
            yield _spec(config, name, path)
    yield from (_table_spec(config, name) for name in tables if name not in listed)


def _by_name(specs: Iterable[ModelSpec]) -> dict[str, ModelSpec]:
    by_name: dict[str, ModelSpec] = {}
    for spec in specs:
        other = by_name.get(spec.name)
        if other is not None:
            raise SetupError(
                f"{other.path} and {spec.path} would both be called {spec.name}; name them in the "
                "configuration file: [models.NAME] with path = ..."
            )
        by_name[spec.name] = spec
    return by_name


def _check_events(config: Config, specs: Iterable[ModelSpec]) -> None:
    """Each model's process binds an address of its own. Raises SetupError."""
    addresses = [a for spec in specs if (a := spec.config.cache.kv_events) is not None]
    shared_by_folder = config.fleet.models_dir is not None and config.cache.kv_events is not None
    if shared_by_folder or len(addresses) != len(set(addresses)):
        raise SetupError(
            "--kv-events: each model needs its own address; set kv_events in [models.NAME]"
        )


def _spec(config: Config, name: str, path: str) -> ModelSpec:
    keep_alive_s = units.seconds(config.fleet.keep_alive)
    return ModelSpec(name, child_config(config, name, path), keep_alive_s=keep_alive_s)


def _table_spec(config: Config, name: str) -> ModelSpec:
    table = next(table for table in config.tables if table.name == name)
    keep_alive = table.keep_alive or config.fleet.keep_alive
    if table.keep_alive is not None and config.origin("fleet.keep_alive").kind in ("env", "flag"):
        keep_alive = config.fleet.keep_alive
    return ModelSpec(
        name,
        child_config(config, name, table.path, table.values),
        pinned=table.pinned,
        keep_alive_s=units.seconds(keep_alive),
        aliases=table.aliases,
    )


def folders(root: Path | None) -> Iterator[tuple[str, Path]]:
    """Model folders in `root`, and one level deeper (owner/name), as other programs lay them out."""
    if root is None:
        return
    for folder in _subfolders(root):
        if _holds_model(folder):
            yield folder.name, folder
            continue
        for inner in _subfolders(folder):
            if _holds_model(inner):
                yield f"{folder.name}/{inner.name}", inner


def _holds_model(folder: Path) -> bool:
    """Whether it contains a model. False if it cannot be read, where `Path.exists` would raise."""
    return os.path.exists(folder / "config.json")


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []


# --- a child's settings --------------------------------------------------------------------


def child_config(
    config: Config, name: str, path: str, values: Mapping[str, Any] | None = None
) -> Config:
    """The settings of one model's process.

    values: from its table; flags and environment variables take precedence. What the front enforces
    (rates, a key's concurrency) is not enforced again.
    """
    own: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in (values or {}).items():
        if config.origin(key).kind not in ("env", "flag"):
            section, option = key.split(".")
            own[section][option] = value
    own["server"] |= {
        "served_model_name": name,
        "rate_limit": 0,
        "key_max_concurrency": 0,
        "key_tokens_per_minute": 0,
    }
    own["model"]["path"] = path
    sections = {
        section: replace(getattr(config, section), **given) for section, given in own.items()
    }
    return replace(config, **sections, tables=(), origins=types.MappingProxyType({}))


def to_json(config: Config) -> str:
    """All settings that are not defaults, on one line. Contains API keys: not for argv or logs."""
    shown: dict[str, Any] = {}
    for item in OPTIONS:
        value = config.get(item.key)
        if value == item.default or item.section == "fleet":
            continue
        if isinstance(value, tuple):
            value = [str(part) if isinstance(part, Path) else part for part in value]
        shown[item.key] = str(value) if isinstance(value, Path) else value
    return json.dumps(shown)


def from_json(text: str) -> Config:
    given = json.loads(text)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for item in OPTIONS:
        if item.key in given:
            values[item.section][item.name] = item.accept(given[item.key], base=Path.cwd())
    return Config(**{section: cls(**values[section]) for section, cls in SECTIONS.items()})
