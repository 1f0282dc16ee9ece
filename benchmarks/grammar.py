"""What a grammar costs in decode speed: the runner in this process, with and without one, in turns.

    python benchmarks/grammar.py [--model llama] [--rows 8] [--steps 40] [--rounds 40]

Both kinds of group run in the same process in alternating rounds on a tiny random model. On a busy
machine the median of the rounds says little; the fastest ones are those that were not disturbed.
`--vocab` widens the model's vocabulary; the tokens beyond the tokenizer's are padding, as in many
models.

Takes under a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.core.values import Grammar, Job, Prompt, RequestId, Sampling
from firn.models.decode.runner import Runner
from firn.models.grammar.compiler import CompiledGrammar, Compiler
from firn.models.load.loader import load_tokenizer
from tests import zoo
from tests.harness import model_info

SCHEMA = """{"type": "array", "minItems": 100000, "items": {"type": "object",
  "properties": {"name": {"type": "string", "maxLength": 24}, "size": {"type": "integer"},
    "kind": {"enum": ["file", "folder", "link"]},
    "tags": {"type": "array", "items": {"type": "string"}}},
  "required": ["name", "size", "kind"], "additionalProperties": false}}"""


class StepTime(NamedTuple):
    """Seconds per step: elapsed, and of the processor."""

    elapsed: float
    worked: float


def widened(name: str, n_vocab: int) -> zoo.Entry:
    entry = zoo.ZOO[name]
    return replace(entry, config={**entry.config, "vocab_size": n_vocab})


def run(
    runner: Runner, n_rows: int, n_steps: int, grammar: CompiledGrammar | None, temperature: float
) -> StepTime:
    """The time per step of one group's decoding."""
    prompt = Prompt(np.arange(20, 52, dtype=np.int64))
    sampling = Sampling(temperature=temperature, seed=7)
    job = Job(RequestId("x"), prompt, 1 << 20, sampling, n=n_rows, grammar=grammar)
    row = runner.start(None)
    runner.prefill(row, prompt, len(prompt) - 1)
    runner.finish_chunk(row)
    rows = runner.choices(row, job, range(n_rows))
    for each in rows:
        runner.join(each, int(prompt.ids[-1]))
    for _ in range(5):
        runner.launch(rows)
    runner.collect(rows, keep_in_flight=0)
    start, worked = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        runner.launch(rows)
        picked = runner.collect(rows, keep_in_flight=1)
        assert not any(p.fault for p in picked)
    runner.collect(rows, keep_in_flight=0)
    took = StepTime(
        (time.perf_counter() - start) / n_steps, (time.process_time() - worked) / n_steps
    )
    runner.leave(rows)
    return took


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="llama")
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--vocab", type=int, default=zoo.VOCAB_SIZE)
    options.add_argument("--temperature", type=float, default=1.0)
    args = options.parse_args()
    with TemporaryDirectory() as folder:
        zoo.write_folder(args.model, Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    model = zoo.build_entry(widened(args.model, args.vocab))
    info = model_info(model, lambda: make_prompt_cache(model))
    runner = Runner(model, info, make_layers=lambda: make_prompt_cache(model), max_rows=args.rows)
    grammar = Compiler(tokenizer, vocab_size=info.vocab_size).compile(
        Grammar("json_schema", SCHEMA)
    )
    times: dict[str, list[StepTime]] = {"free": [], "grammar": []}
    for i in range(args.rounds + 1):
        for kind in ("free", "grammar") if i % 2 else ("grammar", "free"):
            constraint = grammar if kind == "grammar" else None
            took = run(runner, args.rows, args.steps, constraint, args.temperature)
            if i:  # the first round warms up
                times[kind].append(took)
    device = str(mx.default_device()).removeprefix("Device")
    print(f"{args.model}, {args.rows} rows, vocabulary {info.vocab_size}, {device}")
    for kind, each in times.items():
        elapsed, worked = (statistics.median(column) for column in zip(*each, strict=True))
        print(
            f"  {kind:10s}{args.rows / elapsed:8.0f} tokens/s {1e6 * elapsed:8.0f} us a step, "
            f"{1e6 * worked:6.0f} us of processor time"
        )
    pairs = list(zip(times["free"], times["grammar"], strict=True))
    median = statistics.median(free.elapsed / held.elapsed for free, held in pairs)
    fastest = min(f.elapsed for f, _ in pairs) / min(h.elapsed for _, h in pairs)
    work = statistics.median(free.worked / held.worked for free, held in pairs)
    print(f"  speed ratio {median:.3f} (of the fastest rounds {fastest:.3f}), of work {work:.3f}")


if __name__ == "__main__":
    main()
