"""Settings of a whole server that keeps its records only in memory."""

from __future__ import annotations

from typing import Any

from firn.config import CacheConfig, Config, ModelConfig

MEMORY = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
GREEDY: Any = {"temperature": 0}


def config(path: str, **model: Any) -> Config:
    return Config(model=ModelConfig(path=path, **model), cache=MEMORY)
