"""Weights are replaced in place: the next server reuses nothing, and answers with the new weights.

Slow: three real servers, one after the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from firn.config import CacheConfig, Config, ModelConfig
from firn.demo.server import ServerProcess
from tests.api import real
from tests.zoo import write_folder

PROMPT = "Snow that outlives its season becomes firn: grains packed by their own weight. " * 6
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def answered(model: Path, folder: Path) -> tuple[str, int]:
    """The text, and how much of the prompt was cached."""
    server = ServerProcess(
        str(model), "--ssd-cache-dir", str(folder), "--cache-block-tokens", "16",
        log=folder.with_name("log"),
    )  # fmt: skip
    try:
        reply = ask(server.url)
        assert server.stop() == 0
    finally:
        server.kill()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["text"], cached


def answered_without_a_cache(model: Path) -> str:
    """Served in this process, without stored records."""
    off = CacheConfig(disable_prefix_cache=True)
    config = Config(model=ModelConfig(path=str(model)), cache=off)
    with real.serving(model, config=config) as server:
        return str(ask(server.url)["choices"][0]["text"])


def ask(url: str) -> Any:
    return httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()


def change_the_middle(weights: Path) -> None:
    """Changes rows in the middle of the embeddings, but not the file's size and time stamp."""
    before = weights.stat()
    tensors: Any = mx.load(str(weights))
    name = next(n for n in tensors if "embed_tokens" in n)
    rows = tensors[name]
    n = rows.shape[0]
    changed = rows[n // 4 : 3 * n // 4] * -1.5
    tensors[name] = mx.concatenate([rows[: n // 4], changed.astype(rows.dtype), rows[3 * n // 4 :]])
    mx.eval(tensors)
    mx.save_safetensors(str(weights), tensors, metadata={"format": "mlx"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_other_weights_under_the_same_name_share_nothing(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "cache"
    write_folder("llama", model)
    first, n_cached = answered(model, folder)
    assert n_cached == 0
    again, n_cached = answered(model, folder)
    assert (again, n_cached > 0) == (first, True)
    change_the_middle(model / "model.safetensors")
    other, n_cached = answered(model, folder)
    assert n_cached == 0
    assert other == answered_without_a_cache(model)
