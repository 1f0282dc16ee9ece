"""All settings as one frozen tree.

A field of a section IS an option: its one entry gives type, default, help text and bounds, and the
flag, the environment variable, the TOML key, the validation and `firn config show` follow from it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from firn.config.cache import CacheConfig
from firn.config.engine import EngineConfig
from firn.config.fleet import FleetConfig, ModelTable
from firn.config.images import ImagesConfig
from firn.config.model import ModelConfig
from firn.config.monitoring import LogConfig, PageConfig
from firn.config.options import Option, options_of
from firn.config.sampling import ModelDefaults, SamplingConfig
from firn.config.server import ServerConfig
from firn.config.sparse import SparseConfig


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is the file, the variable or the flag."""

    kind: Literal["default", "model", "file", "env", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. The names of its sections are the tables of the TOML file."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    cache: CacheConfig = CacheConfig()
    sparse: SparseConfig = SparseConfig()
    images: ImagesConfig = ImagesConfig()
    fleet: FleetConfig = FleetConfig()
    page: PageConfig = PageConfig()
    log: LogConfig = LogConfig()
    tables: tuple[ModelTable, ...] = ()
    """The file's [models.NAME] tables."""
    origins: Mapping[str, Origin] = field(
        default_factory=lambda: types.MappingProxyType({}), repr=False, compare=False
    )
    """By key ("server.port"); a key that is not here has its default."""

    def get(self, key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, DEFAULT)

    @property
    def has_front(self) -> bool:
        """Whether a front serves one or more models; otherwise one process serves one model."""
        return bool(self.tables) or any(key.startswith("fleet.") for key in self.origins)


SECTIONS: Mapping[str, type] = {
    item.name: get_type_hints(Config)[item.name]
    for item in fields(Config)
    if item.name not in ("tables", "origins")
}
OPTIONS: tuple[Option, ...] = tuple(
    item for section, cls in SECTIONS.items() for item in options_of(section, cls)
)


def with_model(config: Config, defaults: ModelDefaults) -> Config:
    """The settings, with the model's own sampling defaults where the user gives none."""
    if config.sampling.generation_config == "none":
        return config
    adopted = {
        f"default_{name}": value
        for name, value in defaults.values.items()
        if getattr(config.sampling, f"default_{name}") is None
    }
    origin = Origin("model", str(defaults.path))
    origins = {**config.origins, **{f"sampling.{name}": origin for name in adopted}}
    return replace(
        config,
        sampling=replace(config.sampling, **adopted),
        origins=types.MappingProxyType(origins),
    )
