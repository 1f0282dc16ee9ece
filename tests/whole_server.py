"""The whole server, as `firn serve` builds it, with records in memory alone; and its clients."""

from __future__ import annotations

from typing import Any

import anthropic

from firn.config import CacheConfig, Config, ModelConfig
from tests.api.real import Real

MEMORY = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
GREEDY: Any = {"temperature": 0}


def config(path: str, **model: Any) -> Config:
    return Config(model=ModelConfig(path=path, **model), cache=MEMORY)


def url(real: Real) -> str:
    return f"http://127.0.0.1:{real.port}"


def claude(real: Real) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url(real), api_key="unused", max_retries=0, timeout=60)
