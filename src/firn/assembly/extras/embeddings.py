"""Texts as vectors: by a decoder that can also embed, or by a model that does nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from firn.api.services import Services
from firn.assembly.compute import ComputeSettings
from firn.assembly.extras import Decoder, Extra, LoadedEncoder, LoadEncoder
from firn.assembly.model import ServerSpec
from firn.config import Config
from firn.core.errors import SetupError
from firn.engine import Engine
from firn.models import embedder
from firn.models.load import loader

log = logging.getLogger("firn")


class Embeddings(Extra):
    """Owner of the embedder: the engine thread."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._embedder: embedder.TextEmbedder | None = None

    def encoder(self, folder: Path) -> LoadEncoder | None:
        if not embedder.needs_encoder(folder, loader.read_config(folder)):
            return None
        recipe = _read_recipe(folder)
        return None if recipe is None else partial(self._load, recipe)

    def _load(
        self, recipe: embedder.Recipe, spec: ServerSpec, compute: ComputeSettings
    ) -> LoadedEncoder:
        self._embedder, info = embedder.load_encoder(
            spec.folder,
            recipe,
            loader.read_config(spec.folder),
            served_name=spec.name,
            form=compute.backend.weights,
        )
        return LoadedEncoder(info, embedder.refuse_to_generate, "an embedding model")

    def change(self, decoder: Decoder) -> Decoder:
        recipe = _read_recipe(decoder.spec.folder)
        if recipe is None:
            return decoder
        if decoder.spec.sharding.is_shared:
            log.warning("no embeddings: the model is sharded over ranks")
            return decoder
        loaded = decoder.loaded
        try:
            self._embedder = embedder.from_decoder(
                loaded.model, recipe, context_length=loaded.info.context_length
            )
        except SetupError as e:
            log.warning("no embeddings: %s", e)
        return decoder

    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        own = self._embedder
        if own is None:
            return services
        shared = embedder.EngineEmbedder(
            lambda f: engine.call(lambda parts: f(own)),
            n_dims=own.n_dims,
            max_tokens=own.max_tokens,
        )
        return replace(services, embedder=shared)


def _read_recipe(folder: Path) -> embedder.Recipe | None:
    """How the model turns texts into vectors; None: it does not."""
    try:
        return embedder.read_recipe(folder)
    except SetupError as e:
        log.warning("no embeddings: %s", e)
        return None


EXTRA = Embeddings
