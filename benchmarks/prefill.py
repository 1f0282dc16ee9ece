"""What prefill gains from room for the whole prompt, and from chunks sized by depth and load.

    python benchmarks/prefill.py [--shape tiny|0.6b|4b|8b] [--tokens 16384 65536] [--rounds 5] [--pause]
    python benchmarks/prefill.py --bare [--shape ...] [--tokens ...] [--rounds ...]

Three arms in one process, in turn, nothing cached: caches that grow by 256 tokens (as mlx-lm's do)
and the usual chunks; all the room up front and the usual chunks; all the room up front and chunks
sized by depth and by whether other requests wait. Times are to the first token of a lone prompt.
With --pause the last column is the longest pause of a stream that decodes while such a prompt is
read, in the second arm and in the third.

--bare: the runner alone, the first two arms in turn, processor time and peak memory. For a CPU that
is shared with others.

Takes a few minutes on two cores (`--shape tiny`); `--shape 4b --tokens 16384 65536` takes a few minutes
on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from engines import BenchEngine, model_info, shape_of
from mlx_lm.models.cache import make_prompt_cache
from report import cli, grid

from firn import backends
from firn.backends.contract import BackendOptions
from firn.config import default_cache_dir
from firn.core.values import Prompt
from firn.engine.chunks import ChunkSizes
from firn.models.decode import runner
from firn.models.decode.kv_growth import ShapeBuckets
from models import SHAPES, random_model

GIB = 1 << 30
N_STREAM = 4000


class NoRoom(ShapeBuckets):
    """Caches grow as mlx-lm's do."""

    def grow(self, layers: Sequence[Any], n_tokens: int) -> None:
        pass


def set_buckets(of: Any, *, room: bool) -> None:
    """A runner has no option to do without."""
    setattr(of, "_buckets", ShapeBuckets() if room else NoRoom())  # noqa: B010


class Arms:
    """Switches the engine between the three arms."""

    def __init__(self, engine: BenchEngine) -> None:
        self._engine = engine
        device = backends.find().profile
        usual, largest = device.prefill_chunk, device.largest_chunk
        speed = engine.engine.parts.cache.prefill
        self._sizes = {"steps": ChunkSizes(usual, speed), "room": ChunkSizes(usual, speed)}
        self._sizes["chunks"] = ChunkSizes(usual, speed, largest=largest)

    def take(self, name: str) -> None:
        def switch(_: object) -> None:
            loop: Any = self._engine.engine._loop
            loop._prefill._sizes = self._sizes[name]
            set_buckets(self._engine.engine.parts.runner, room=name != "steps")

        self._engine.engine.call(switch).result(60)


def prompts(n_tokens: int, n_vocab: int) -> Any:
    rng = np.random.default_rng(5)
    while True:
        yield rng.integers(10, n_vocab - 10, n_tokens).tolist()


def alone(engine: BenchEngine, ids: list[int]) -> float:
    return engine.ask(ids, 1, read=False, write=False).wait().first_s


def pause(engine: BenchEngine, ids: list[int], short: list[int]) -> float:
    """The longest time between two tokens of a stream while the prompt is read."""
    stream = engine.ask(short, N_STREAM, read=False, write=False)
    while len(stream.times) < 8:
        engine.call(lambda cache: None)
    began = len(stream.times)
    engine.ask(ids, 1, read=False, write=False).wait()
    times = list(stream.times[began - 1 :])
    for request in list(engine._answers):
        engine.engine.cancel(request)
    return max(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def measure(shape: str, lengths: list[int], rounds: int, *, pauses_too: bool) -> None:
    config, dtype = shape_of(shape)
    rows = []
    with BenchEngine(config, dtype=dtype, memory_nbytes=GIB) as engine:
        arms, n_vocab = Arms(engine), int(config["vocab_size"])
        for n_tokens in lengths:
            make = prompts(n_tokens, n_vocab)
            times: dict[str, list[float]] = {"steps": [], "room": [], "chunks": []}
            pauses: dict[str, list[float]] = {"room": [], "chunks": []}
            for i in range(rounds + 1):
                for name in times:
                    arms.take(name)
                    took = alone(engine, next(make))
                    if i:  # the first round warms up
                        times[name].append(took)
                        print(f"{n_tokens} {name}: {took:.3f} s", flush=True)
            for name in pauses:
                arms.take(name)
                short = next(make)[:64]
                pauses[name] = [pause(engine, next(make), short) for _ in range(3 * pauses_too)]
            best = {name: statistics.median(took) for name, took in times.items()}
            longest = {name: statistics.median(took or [0.0]) for name, took in pauses.items()}
            rows.append(
                [
                    f"{n_tokens}",
                    *(f"{best[name]:.3f} s" for name in times),
                    f"{best['steps'] / best['room']:.3f}",
                    f"{best['room'] / best['chunks']:.3f}",
                    f"{longest['room'] * 1e3:.0f} -> {longest['chunks'] * 1e3:.0f} ms",
                ]
            )
    head = ["tokens", "in steps", "room", "chunks", "gain of room", "gain of chunks", "pause"]
    print(grid([head, *rows]))


def bare(shape: str, lengths: list[int], rounds: int) -> None:
    config, dtype = shape_of(shape)
    backend = backends.find()
    backend.install(BackendOptions(cache_folder=default_cache_dir()))
    chunk = backend.profile.prefill_chunk
    model = random_model(config, dtype=dtype)
    probe = make_prompt_cache(model)
    logits = model(mx.array([[0]]), cache=probe)
    mx.eval(logits)
    info = model_info(model, config, probe=probe, n_vocab=int(logits.shape[-1]))
    runs = runner.Runner(model, info, make_layers=lambda: make_prompt_cache(model), max_rows=1)

    def read(ids: list[int], *, room: bool) -> tuple[float, float]:
        set_buckets(runs, room=room)
        prompt, row = Prompt(np.array(ids)), runs.start(None)
        mx.reset_peak_memory()
        began = time.process_time()
        for end in range(chunk, len(ids), chunk):
            runs.prefill(row, prompt, end)
            runs.finish_chunk(row)
        return time.process_time() - began, mx.get_peak_memory() / 2**20

    for n_tokens in lengths:
        make = prompts(n_tokens, int(config["vocab_size"]))
        for _ in range(rounds):
            (grown_s, grown), (roomy_s, roomy) = (
                read(next(make), room=room) for room in (False, True)
            )
            print(
                f"{n_tokens} tokens: in steps {grown_s:.2f} s and {grown:.0f} MiB at the peak, "
                f"room {roomy_s:.2f} s and {roomy:.0f} MiB, gain {grown_s / roomy_s:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", action="store_true")
    parser.add_argument("--bare", action="store_true")
    args = parser.parse_args()
    if args.bare:
        bare(args.shape, args.tokens, args.rounds)
        return
    measure(args.shape, args.tokens, args.rounds, pauses_too=args.pause)


if __name__ == "__main__":
    cli(main)
