"""Where the prefix cache's cost goes: an engine in this process, with more and more of the cache.

    python benchmarks/cost_parts.py --shape 4b --streams 32
    python benchmarks/cost_parts.py --shape tiny --streams 8

New prompts of 450 tokens, 128 tokens of reply each, and one long prompt. All begin with the same few
tokens, as chats do.

    none     nothing is looked up or stored
    stored   everything is stored, nothing is looked up
    memory   both
    ssd      both, and written to the SSD

Each kind has an engine of its own, so that all learn equally often what pays. The table shows
tokens per second, the seconds to the long prompt's first token, and the calls in which the engine
spent the most time meanwhile, in milliseconds per round. Below it: during how many decode steps
something was written to the SSD, and how much longer they took. Takes three minutes on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engines import BenchEngine, shape_of
from report import cli, grid

from firn.cache.prefix import PrefixCache, PrefixCursor
from firn.cache.storage.pace import WritePace
from firn.models.decode.runner import Runner

N_PROMPT, N_REPLY, N_ALIKE = 450, 128, 7
MEMORY_NBYTES = 24 << 30
N_CALLS = 8
RUNNER = (
    "start",
    "prefill",
    "batched_prefill",
    "finish_chunk",
    "launch",
    "collect",
    "join",
    "leave",
)
KINDS = {
    "none": (False, False),
    "stored": (False, True),
    "memory": (True, True),
    "ssd": (True, True),
}
"""Whether prompts are looked up, and whether they are stored."""


class Work:
    """New prompts, and how long an engine takes for them."""

    def __init__(self, n_vocab: int, *, n_streams: int, n_long: int) -> None:
        self._n_vocab, self._n_streams, self._n_long = n_vocab, n_streams, n_long
        self._rng = random.Random(0)

    def _prompt(self, n_tokens: int) -> list[int]:
        new = (self._rng.randrange(1000, self._n_vocab) for _ in range(n_tokens - N_ALIKE))
        return [*range(100, 100 + N_ALIKE), *new]

    def tokens_per_s(self, engine: BenchEngine, flags: tuple[bool, bool]) -> float:
        read, write = flags
        prompts = [self._prompt(N_PROMPT) for _ in range(self._n_streams)]
        began = time.perf_counter()
        for answer in [engine.ask(p, N_REPLY, read=read, write=write) for p in prompts]:
            answer.wait()
        return self._n_streams * N_REPLY / (time.perf_counter() - began)

    def first_s(self, engine: BenchEngine, flags: tuple[bool, bool]) -> float:
        read, write = flags
        prompt = self._prompt(self._n_long)
        return engine.ask(prompt, 2, read=read, write=write).wait().first_s


@contextlib.contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """Milliseconds that the engine spends in each method of the cache and of the runner."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                spent[name] += 1000 * (time.perf_counter() - began)

        return call

    places: list[tuple[type, str]] = [
        (owner, name)
        for owner in (PrefixCache, PrefixCursor)
        for name, value in vars(owner).items()
        if callable(value) and not name.startswith("_")
    ]
    places += [(Runner, name) for name in RUNNER]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, method in kept:
        label = f"{'runner' if owner is Runner else 'cache'}.{name}"
        setattr(owner, name, timed(label, method))
    try:
        yield spent
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


class WatchedSteps:
    """Decode steps while something is written, and others: how many, and how long they took."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        tick, seconds = WritePace.tick, self._seconds

        def watched(pace: WritePace, now: float, *, is_writing: bool) -> None:
            if pace._last is not None:
                seconds[is_writing].append(now - pace._last)
            tick(pace, now, is_writing=is_writing)

        setattr(WritePace, "tick", watched)  # noqa: B010 - mypy allows no other way
        try:
            yield
        finally:
            setattr(WritePace, "tick", tick)  # noqa: B010

    def clear(self) -> None:
        for seconds in self._seconds.values():
            seconds.clear()

    def __str__(self) -> str:
        writing, others = self._seconds[True], self._seconds[False]
        if not writing or not others:
            return f"something was written in {len(writing)} of {len(writing) + len(others)} steps"
        ratio = statistics.fmean(writing) / statistics.fmean(others)
        return (
            f"something was written in {len(writing)} of {len(writing) + len(others)} steps, "
            f"which took {ratio:.2f} times as long"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the long prompt")
    parser.add_argument(
        "--all-hits", action="store_true", help="use hits of any length, on a GPU too"
    )
    args = parser.parse_args()
    config, dtype = shape_of(args.shape)
    work = Work(config["vocab_size"], n_streams=args.streams, n_long=args.tokens)
    make = partial(
        BenchEngine,
        config,
        dtype=dtype,
        memory_nbytes=MEMORY_NBYTES,
        by_depth=True,
        uses_all_hits=args.all_hits,
    )
    rows: dict[str, dict[str, list[float]]] = {k: defaultdict(list) for k in KINDS}
    steps = WatchedSteps()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spent = stack.enter_context(timed_calls())
        stack.enter_context(steps.watch())
        engines = {
            "ssd": stack.enter_context(make(ssd=folder, ssd_limit_nbytes=MEMORY_NBYTES)),
        }
        for kind in KINDS:
            if kind not in engines:
                engines[kind] = stack.enter_context(make(model=engines["ssd"].weights))
        for turn in range(-1, args.rounds):  # the first warms up
            if turn == 0:
                steps.clear()
            for kind in list(KINDS)[:: 1 if turn % 2 else -1]:
                engine, flags = engines[kind], KINDS[kind]
                spent.clear()
                rate = work.tokens_per_s(engine, flags)
                calls = dict(spent)
                engines["ssd"].settle()
                first_s = work.first_s(engine, flags)
                engines["ssd"].settle()  # pending writes would slow down the next one
                print(f"round {turn + 1}: {kind} {rate:.0f} tokens/s, {first_s:.3f} s", flush=True)
                if turn < 0:
                    continue
                for name, value in {"tokens/s": rate, "first, s": first_s, **calls}.items():
                    rows[kind][name].append(value)
    print(f"\n{table(rows)}\n{steps}")


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    medians = {
        kind: {name: statistics.median(values) for name, values in row.items()}
        for kind, row in rows.items()
    }
    calls = Counter[str]()
    for row in medians.values():
        for name, value in row.items():
            if "." in name:
                calls[name] = max(calls[name], round(value))
    names = ["tokens/s", "first, s", *(name for name, _ in calls.most_common(N_CALLS))]
    lines = [["", *names]]
    for kind, row in medians.items():
        lines.append([kind, *(f"{row.get(name, 0):.3g}" for name in names)])
    return grid(lines)


if __name__ == "__main__":
    cli(main)
