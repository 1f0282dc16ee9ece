"""The whole server as `firn serve` builds it, on a tiny random model, behind uvicorn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai

from firn import app
from firn.api.http.connections import Connections, http_config
from firn.api.server import create_app
from firn.config import CacheConfig, Config, ModelConfig, ServerConfig
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from tests import families, zoo
from tests.api.live import _Server
from tests.text import grammar_walks
from tests.zoo import folder as zoo_folder


@dataclass(frozen=True)
class Real:
    server: app.Server
    port: int

    @property
    def tokenizer(self) -> HfTokenizer:
        tokenizer = self.server.services.tokenizer
        assert isinstance(tokenizer, HfTokenizer)
        return tokenizer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="unused", max_retries=0, timeout=60)


def write_model(path: Path, *, format: str, template: str) -> None:
    """Write a tiny model with a tool format's control tokens, and a template that reveals it."""
    tokenizer = grammar_walks.tokenizer(format)
    config = _write_weights(path, tokenizer)
    definition = tokenizer.definition
    assert definition is not None
    grammar_walks.write(path, definition, chat_template=template)
    (path / "config.json").write_text(json.dumps(config))


def write_family(path: Path, name: str) -> None:
    """Write a tiny model with the tokens and the template of a family."""
    config = _write_weights(path, families.tokenizer(name))
    families.write(path, families.FAMILIES[name], families.template(name))
    (path / "config.json").write_text(json.dumps(config))


def _write_weights(path: Path, tokenizer: HfTokenizer) -> dict[str, Any]:
    entry = zoo.ZOO["llama"]
    config = {**entry.config, "vocab_size": tokenizer.n_ids + 9, "eos_token_id": min(tokenizer.eos)}
    zoo_folder.write(zoo.build_entry(replace(entry, config=config)), config, path)
    return config


ELSEWHERE = {"x-forwarded-for": "203.0.113.9"}
"""Headers that a proxy adds: the caller is not a program on this machine."""


def demo_config(**server: Any) -> Config:
    """The built-in model, with a cache in memory."""
    return Config(
        server=ServerConfig(**server),
        model=ModelConfig(path="firn-demo"),
        cache=CacheConfig(no_ssd_cache=True, cache_memory_mb=64),
    )


@contextmanager
def serving(path: Path, *, config: Config | None = None) -> Iterator[Real]:
    """config: None for the defaults, with the cache off."""
    if config is None:
        off = CacheConfig(disable_prefix_cache=True)
        config = Config(model=ModelConfig(path=str(path)), cache=off)
    built = app.build(config)
    server = _Server(http_config(create_app(built.services), Connections(), port=0))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        assert server.up.wait(30)
        yield Real(built, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        built.close()
