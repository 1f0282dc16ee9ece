"""The model that a server loads, and the memory that one of its rows takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firn.assembly import model_names, speculation
from firn.assembly.compute import ComputeSettings
from firn.assembly.sharding import ONE_PROCESS, Shard, Sharding
from firn.cache.layout import Layout
from firn.config import Config, ModelConfig, default_cache_dir, of_model, with_model
from firn.core.errors import UnknownCacheLayer
from firn.core.units import MIB
from firn.core.values import Namespace
from firn.engine import RowCost
from firn.models.decode.batch import BUFFER_TOKENS
from firn.models.load import loader
from firn.models.load.hub import HubRules
from firn.models.load.weight_memory import WeightMemory
from firn.models.vision.processor import VisionProcessor

log = logging.getLogger("firn")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What a server should load, and for whom."""

    config: Config
    folder: Path
    name: str
    namespaces: Sequence[Namespace]
    """Whose records to look for in the tiers."""
    processor: VisionProcessor | None = None
    front: int | None = None
    """The id of the process that divides memory among its models, if there is one."""
    sharding: Sharding = ONE_PROCESS


def served_name(config: Config) -> str:
    return config.server.served_model_name or config.model.path.rstrip("/").split("/")[-1]


def with_model_defaults(config: Config, folder: Path) -> Config:
    """The settings, with defaults from the model's folder for what the user has not set."""
    defaults = of_model(folder)
    for line in defaults.warnings:
        log.warning("%s", line)
    return with_model(config, defaults)


def find_folder(options: ModelConfig) -> Path:
    """May download. Raises SetupError."""
    rules = HubRules(options.offline, options.download_timeout, options.download_retries)
    return model_names.resolve(options.path, rules)


def load_model(
    spec: ServerSpec, compute: ComputeSettings, *, shard: Shard | None
) -> loader.LoadedModel:
    """shard: None for the whole model. Raises SetupError."""
    config, processor = spec.config, spec.processor
    loaded = loader.load(
        spec.folder,
        served_name=spec.name,
        adapter=config.model.adapter,
        trust_remote_code=config.model.trust_remote_code,
        picture=processor.example.inputs if processor else None,
        feature_nbytes=config.images.image_feature_cache_mb * MIB,
        memory=WeightMemory(default_cache_dir()),
        form=compute.backend.weights,
        max_context=config.engine.max_context or None,
        shard=shard,
    )
    return speculation.with_head(config, loaded, exact=compute.exact, backend=compute.backend)


def row_cost(loaded: loader.LoadedModel) -> RowCost:
    try:
        return RowCost(*Layout.of(loaded.probe).row_cost(loaded.probe), step_tokens=BUFFER_TOKENS)
    except UnknownCacheLayer:  # estimated from what the probe takes
        nbytes = sum(layer.nbytes for layer in loaded.probe)
        return RowCost(nbytes // 256, nbytes)
