"""Prompts that go through a small memory and a folder, for every kind of layer. See test_ssd_story.py.

Run as a program, it is the restarted server: it sends all prompts again and prints the answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from tests import one_blas
from tests.cache.lab import nodes_of
from tests.cache.tiny import Build, tiny, tokens
from tests.harness import Harness, Result
from tests.waiting import wait_until

CHUNK = BLOCK = 16
N_HELD, N_MORE = 2, 3
N_CACHED = 64
"""Tokens in the whole chunks of each prompt."""
PROMPTS = [tokens(i, N_CACHED + 2 + 2 * i) for i in range(N_HELD + N_MORE)]
N_REPLY = 2
GIB = 1 << 30


def spare_slot(build: Build) -> Build:
    """The recurrent layers have a slot more than the model ever fills."""

    def make() -> tuple[Any, Callable[[], list[Any]]]:
        model, make_layers = build()

        def layers() -> list[Any]:
            made = make_layers()
            for i, layer in enumerate(made):
                if type(layer) is ArraysCache:
                    made[i] = ArraysCache(len(layer.cache) + 1)
            return made

        return model, layers

    return make


TWO: dict[str, Any] = {"num_hidden_layers": 2}
"""Two layers: one of each kind, or two of the same kind, which share a stack."""
LARGE = {"v_proj": 1e6}
"""Past float16's range."""
SLIDING = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, Build] = {
    "float32": tiny("llama", **TWO),
    "float16": tiny("llama", dtype=mx.float16, **TWO),
    "bfloat16": tiny("llama", dtype=mx.bfloat16, gains=LARGE, **TWO),
    "8 bits": tiny("llama", bits=8, head_dim=32, **TWO),
    "4 bits of bfloat16": tiny("llama", bits=4, head_dim=32, dtype=mx.bfloat16, **TWO),
    "window": tiny("llama-sliding", **SLIDING),
    "4 bits and window": tiny("llama-sliding", bits=4, head_dim=32, **SLIDING),
    "state alone": tiny("mamba2", **TWO),
    "state with an empty slot": spare_slot(tiny("qwen3_5")),
    "nested pages": tiny("deepseek_v32"),
    "nested state and pages": tiny("falcon_h1", dtype=mx.bfloat16),
    "nested state and window": tiny("baichuan_m1"),
}

Contents = dict[tuple[bytes, str], list[tuple[str, tuple[int, ...], bytes] | None]]
"""Every record in memory, by its name: dtype, shape and bits of each array, None for an empty slot."""


def contents(harness: Harness) -> Contents:
    def bits(a: mx.array | None) -> tuple[str, tuple[int, ...], bytes] | None:
        if a is None:
            return None
        return str(a.dtype), a.shape, np.array(a.view(mx.uint8)).tobytes()

    def look() -> Contents:
        return {
            (node.key, part.value): [
                bits(a) for i in range(record.arrays.n_layers) for a in record.arrays.layer(i)
            ]
            for node in nodes_of(harness.cache.records.tree)
            for part, record in node.records.items()
            if record.arrays is not None
        }

    return harness.between_steps(look)


def open_engine(kind: str, folder: Path | None, *, memory_nbytes: int = GIB) -> Harness:
    """All kinds share one folder: each has its own weights, and so its own records.

    It has been scanned: a server on a busy machine would go on with its first requests meanwhile.
    """
    harness = Harness(
        KINDS[kind],
        chunk=CHUNK,
        block=BLOCK,
        exact=True,
        cache_nbytes=memory_nbytes,
        fingerprint=kind.encode(),
        tier=SsdTier(TierOptions(str(folder), GIB)) if folder is not None else None,
    )
    tiers = harness.cache.records.tiers
    wait_until(lambda: not any(tier.scanning for tier in tiers))
    return harness


def ask(harness: Harness, ids: list[int]) -> Result:
    return harness.ask(ids, N_REPLY, boundaries=(N_CACHED,))


def main(folder: Path) -> int:
    said: dict[str, Any] = {}
    for kind in KINDS:
        harness = open_engine(kind, folder)
        results = [ask(harness, ids) for ids in PROMPTS]
        harness.close()
        said[kind] = [(r.n_cached, r.tiers, r.reply, r.logprobs[0]) for r in results]
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    one_blas.find()
    sys.exit(main(Path(sys.argv[1])))
