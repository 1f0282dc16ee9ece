"""What the prefix cache itself costs: matching, committing, and decoding with it on.

    python benchmarks/cache_cpu.py [--rounds 5] [--only match,commit,decode]

All in one process. `match` looks up a prompt of 100,000 tokens among 10,000 records, without a
model. `commit` reads prompts on small random models (dense, window, hybrid) through the real engine
and compares the time inside the cache's commit with that of the prefill it follows. `decode`
generates with the cache on and off in alternating rounds. On a busy machine, elapsed times include
other work; ratios of processor times do not.

Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.cache.arrays.payload import Payload
from firn.cache.parts import Part
from firn.cache.planning.match import Walk, resume_points
from firn.cache.prefix import PrefixCache
from firn.cache.tree import CheckpointKind, Record
from firn.core.keys import key_tokens
from firn.core.values import Namespace, PackedTokens, Prompt
from tests.cache.lab import Shape, tree
from tests.cache.tiny import Build, tiny, tokens
from tests.harness import Harness, running

BLOCK, N_PROMPT, N_RECORDS = 256, 100_000, 10_000
SIZE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def models() -> dict[str, Build]:
    hybrid = {**_text_config("qwen3_5"), **SIZE, **GATED_DELTA}
    return {
        "dense": tiny("llama", num_hidden_layers=4, **SIZE),
        "window": tiny("llama-sliding", sliding_window=512, **SIZE),
        "hybrid": tiny("qwen3_5", text_config=hybrid),
    }


def _text_config(name: str) -> dict[str, Any]:
    from tests.zoo import ZOO

    return dict(ZOO[name].config["text_config"])


# --- match ---------------------------------------------------------------------------------


def filled(shape: Shape, *, states: int = 0, windows: bool = True) -> tuple[PrefixCache, Prompt]:
    """10,000 blocks: the prompt's own 390, and other conversations that branch off it."""
    cache = tree(shape, block=BLOCK)
    ids = np.random.default_rng(1).integers(0, 150_000, N_PROMPT, dtype=np.int64)
    values = key_tokens(ids)
    root = cache.records.catalogue.root(Namespace(""))
    array = mx.zeros((1, 1, 1, 1))
    mx.eval(array)

    def add(node: Any, part: Part) -> None:
        payload = Payload((array[None],), (((0, 0),),))
        cache.records.keep(node, part, payload, CheckpointKind.TURN, [])

    def grow(node: Any, tokens: Any) -> Any:
        child = cache.records.tree.child(node, PackedTokens(tokens), 0, len(tokens))
        if shape.pages:
            add(child, Part.PAGES)
        if shape.window and (windows or n < 20):
            add(child, Part.WINDOW)
        return child

    cache.records.tree.lease(root)
    path, node, n = [], root, 0
    for start in range(0, N_PROMPT - BLOCK + 1, BLOCK):
        node = grow(node, values[start : start + BLOCK])
        path.append(node)
        n += 1
    for i in range(1, states + 1):
        add(path[i * len(path) // states - 1], Part.STATE)
    rng = np.random.default_rng(2)
    while n < N_RECORDS:
        node = path[rng.integers(len(path))]
        for _ in range(24):
            node = grow(node, rng.integers(0, 150_000, BLOCK, dtype=np.uint64))
            n += 1
    return cache, Prompt(ids)


class Times(NamedTuple):
    keys_ms: float
    match_ms: float
    n_cached: int


class InMemory:
    """What may be resumed from without a load."""

    def has(self, record: Record) -> bool:
        return record.arrays is not None


def time_match(cache: PrefixCache, prompt: Prompt, rounds: int) -> Times:
    root = cache.records.catalogue.root(Namespace(""))
    needs = cache.records.needs

    keys_s, match_s = [], []
    for _ in range(rounds):
        began = time.process_time()
        text = PackedTokens(key_tokens(prompt.ids))
        middle = time.process_time()
        walk = Walk.of(cache.records.tree, root, text)
        match = next(resume_points(walk, needs, InMemory()))
        match_s.append(time.process_time() - middle)
        keys_s.append(middle - began)
    return Times(1e3 * statistics.median(keys_s), 1e3 * statistics.median(match_s), match.n_tokens)


def match(rounds: int) -> None:
    cases: list[tuple[str, Shape, dict[str, Any]]] = [
        ("dense", Shape(), {}),
        ("window", Shape(window=4096), {}),
        ("window, evicted inside the chain", Shape(window=4096), {"windows": False}),
        ("hybrid, 8 states", Shape(state=True), {"states": 8}),
        ("hybrid, 390 states", Shape(state=True), {"states": 390}),
        ("hybrid, no state", Shape(state=True), {"states": 0}),
        ("recurrent, 8 states", Shape(pages=False, state=True), {"states": 8}),
    ]
    print(f"match: {N_PROMPT:,} tokens against {N_RECORDS:,} blocks of {BLOCK}; under 5 ms wanted")
    for label, shape, options in cases:
        cache, prompt = filled(shape, **options)
        half = np.concatenate([prompt.ids[: N_PROMPT // 2], prompt.ids[: N_PROMPT // 2] + 1])
        cold = prompt.ids + 1
        for what, ids in (("again", prompt.ids), ("diverges half-walk", half), ("cold", cold)):
            times = time_match(cache, Prompt(ids), max(rounds, 5))
            total = times.keys_ms + times.match_ms
            print(
                f"  {label:34} {what:18} keys {times.keys_ms:5.2f} ms  match {times.match_ms:6.2f} ms"
                f"  total {total:6.2f} ms  cached {times.n_cached:6}"
            )


# --- commit --------------------------------------------------------------------------------


class Watch:
    """Adds up the elapsed and the processor time of a method's calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.elapsed_s = self.cpu_s = 0.0
        self._real: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        elapsed, cpu = time.perf_counter(), time.process_time()
        try:
            return self._real(*args, **kwargs)
        finally:
            self.elapsed_s += time.perf_counter() - elapsed
            self.cpu_s += time.process_time() - cpu


def commit(rounds: int, n_prompt: int = 1500) -> None:
    print(f"commit: prompts of {n_prompt} tokens, chunks of 512; under 2% of prefill wanted")
    for name, build in models().items():
        with running(build, chunk=512, block=BLOCK) as warm:
            warm.ask(tokens(0, 600), 2)
            commits = Watch(warm.cache.committer, "commit")
            prefill = Watch(warm.runner, "prefill")
            settle = Watch(warm.runner, "finish_chunk")
            for i in range(rounds):
                warm.ask(tokens(i + 1, n_prompt), 2, boundaries=(n_prompt // 2,))
            cpu = commits.cpu_s / (prefill.cpu_s + settle.cpu_s)
            elapsed = commits.elapsed_s / (prefill.elapsed_s + settle.elapsed_s)
            n_states = warm.cache.records.ledger.memory.n_records[Part.STATE]
            per_token = 1e6 * commits.cpu_s / (rounds * n_prompt)
            print(
                f"  {name:8} {100 * cpu:5.2f}% of processor time, {100 * elapsed:5.2f}% of elapsed"
                f"  ({per_token:.1f} us a token, {n_states} states)"
            )


# --- decode --------------------------------------------------------------------------------


def decode(rounds: int, n_rows: int = 4, n_reply: int = 300) -> None:
    print(f"decode: {n_rows} rows, {n_reply} tokens each; on / off at least 0.98 wanted")
    for name, build in models().items():
        with (
            running(build, chunk=512, block=BLOCK, cache_nbytes=None) as off,
            running(build, chunk=512, block=BLOCK) as on,
        ):
            cache = on.cache
            inside = [Watch(cache, "open"), Watch(cache, "tick"), Watch(cache.parking, "end")]
            inside += [Watch(cache.committer, name) for name in ("commit", "commit_tail", "fork")]
            inside += [Watch(cache.restorer, "restore")]
            times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
            for i in range(rounds + 1):
                both = [("off", off), ("on", on)]
                for label, harness in both if i % 2 else reversed(both):
                    times[label].append(_decode(harness, i, n_rows, n_reply))
            ratios = []
            for k in (0, 1):
                pairs = list(zip(times["on"], times["off"], strict=True))[1:]
                ratios.append(statistics.median(off_[k] / on_[k] for on_, off_ in pairs))
            share = sum(w.elapsed_s for w in inside) / sum(t[0] for t in times["on"])
            speed = n_rows * n_reply / statistics.median(t[0] for t in times["on"][1:])
            print(
                f"  {name:8} {ratios[1]:.3f} by processor time, {ratios[0]:.3f} by elapsed time"
                f"  ({speed:.0f} tokens/s with the cache on, {100 * share:.2f}% of the time inside it)"
            )


def _decode(harness: Harness, seed: int, n_rows: int, n_reply: int) -> tuple[float, float]:
    elapsed, cpu = time.perf_counter(), time.process_time()
    results = [harness.submit(tokens(100 * seed + i, 40), n_reply) for i in range(n_rows)]
    for result in results:
        assert result.finished.wait(600)
        assert result.error is None
    return time.perf_counter() - elapsed, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="match,commit,decode")
    args = parser.parse_args()
    parts = {"match": match, "commit": commit, "decode": decode}
    for name in args.only.split(","):
        parts[name](args.rounds)


if __name__ == "__main__":
    main()
