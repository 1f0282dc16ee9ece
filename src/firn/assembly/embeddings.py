"""A server's embedder: a decoder that can also embed texts, or a model that does nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from firn.assembly.compute import ComputeSettings
from firn.core.errors import SetupError
from firn.core.values import ModelInfo
from firn.models import embedder
from firn.models.load import loader

log = logging.getLogger("firn")


def read_recipe(folder: Path) -> embedder.Recipe | None:
    """How the model turns texts into vectors; None: it does not."""
    try:
        return embedder.read_recipe(folder)
    except SetupError as e:
        log.warning("no embeddings: %s", e)
        return None


def of_decoder(
    recipe: embedder.Recipe | None, loaded: loader.LoadedModel
) -> embedder.TextEmbedder | None:
    if recipe is None:
        return None
    try:
        limit = loaded.info.context_length
        return embedder.from_decoder(loaded.model, recipe, context_length=limit)
    except SetupError as e:
        log.warning("no embeddings: %s", e)
        return None


def load_encoder(
    folder: Path, recipe: embedder.Recipe, name: str, compute: ComputeSettings
) -> tuple[embedder.TextEmbedder, ModelInfo]:
    settings = loader.read_config(folder)
    return embedder.load_encoder(
        folder, recipe, settings, served_name=name, form=compute.backend.weights
    )


def for_any_thread(
    text_embedder: embedder.TextEmbedder | None,
    run: Callable[[Callable[[], Any]], Future[Any]],
) -> embedder.EngineEmbedder | None:
    """The embedder as the API sees it. run: calls a function on the engine thread."""
    if text_embedder is None:
        return None
    return embedder.EngineEmbedder(
        lambda f: run(lambda: f(text_embedder)),
        n_dims=text_embedder.n_dims,
        max_tokens=text_embedder.max_tokens,
    )
