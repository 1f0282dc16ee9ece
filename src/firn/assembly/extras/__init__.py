"""Extras: what a server can do that its core does not know of. One file each, found by its name.

A module here whose name has no leading underscore names a class in `EXTRA`: an `Extra` with a method
for each point of a server's start at which it does something. One object serves one server. Its file
imports what it needs when it is needed: most servers use few of them.

    documents   PDF and text in messages
    embeddings  /v1/embeddings, and models that make nothing else
    kv_events   which blocks are stored, for routers
    rerank      models that rate documents
    sparse      prompts of which only a part is read
    traces      traffic, recorded without text

Routes are extended in `api/routes`, APIs in `api/dialects`, storage in `cache/tiers`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn.api.services import Services
from firn.assembly.compute import ComputeSettings
from firn.assembly.model import ServerSpec
from firn.assembly.speculation import Drafting, DraftSetup
from firn.cache.prefix import PrefixCache
from firn.config import Config
from firn.core.values import ModelInfo
from firn.engine import Engine, NoPreparation, Preparer
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import PreparePass


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A model that generates no text. make_layers: raises what a request to generate is told."""

    info: ModelInfo
    make_layers: Callable[[], list[Any]]
    what: str
    """Why nothing is cached, as `firn` shows it."""


LoadEncoder = Callable[[ServerSpec, ComputeSettings], LoadedEncoder]
"""On the engine thread. Raises SetupError."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that generates text, before its cache and its runner are built."""

    spec: ServerSpec
    loaded: LoadedModel
    drafting: Drafting
    setup: DraftSetup
    prepare: PreparePass
    """What the device does with a pass before it is computed."""
    preparer: Preparer = NoPreparation()
    """What is done with prompts before they are read, and while the engine is idle."""


class Extra:
    """Does nothing at any point. The points are in the order of a server's start."""

    needs_draft_model = False
    """Whether --draft-model is loaded even if it drafts no tokens."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self) -> None:
        """What can be checked before a model is looked for. Raises SetupError."""

    def begin(self) -> None:
        """The server is about to be built. Raises SetupError."""

    def encoder(self, folder: Path) -> LoadEncoder | None:
        """How to load what is in this folder; None: it is left to others."""
        return None

    def change(self, decoder: Decoder) -> Decoder:
        """On the engine thread: the decoder with what this extra adds to it. Raises SetupError."""
        return decoder

    def watch(self, cache: PrefixCache) -> None:
        """On the engine thread: the cache is built, and empty. Raises SetupError."""

    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        """The engine runs: what the API offers, with what this extra adds to it."""
        return services

    def close(self) -> None:
        """The server ends; the engine still runs."""


def open_extras(config: Config) -> tuple[Extra, ...]:
    """A fresh one of each in this folder."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{n}") for n in names if not n.startswith("_")]
    return tuple(module.EXTRA(config) for module in modules)


def needs_draft_model(extras: Sequence[Extra]) -> bool:
    return any(extra.needs_draft_model for extra in extras)


def find_encoder(extras: Sequence[Extra], folder: Path) -> LoadEncoder | None:
    """None: the folder's model generates text."""
    loaders = (extra.encoder(folder) for extra in extras)
    return next((load for load in loaders if load is not None), None)
