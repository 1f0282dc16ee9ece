"""What the contract tests of the ports run on: runners, caches with rows to keep, and the functions
that drive both.

A port deserves the name only if a second implementation can replace the first: the shape of each is
compared with the Protocol, and all must pass the same tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.core.values import CacheControl, Job, Prompt, RequestId, Sampling
from firn.models.decode.runner import Runner
from tests.dict_cache import DictCache
from tests.harness import model_info
from tests.hash_runner import HashRunner
from tests.models.alone import with_caches
from tests.zoo import build

GREEDY = Sampling(temperature=0.0)
EVERYTHING = CacheControl()


def prompt_of(n: int, *, salt: int = 0) -> Prompt:
    return Prompt(np.array([16 + (7 * i * i + salt) % 200 for i in range(n)], dtype=np.int64))


def job_of(prompt: Prompt, *, n: int = 1, max_tokens: int = 8, name: str = "job") -> Job:
    return Job(RequestId(name), prompt, max_tokens, sampling=GREEDY, n=n)


def model_runner(name: str) -> Runner:
    model, make_layers = with_caches(build(name))
    info = model_info(model, make_layers)
    return Runner(model, info, make_layers=make_layers, max_rows=8)


RUNNERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: model_runner("qwen3"),
    "hybrid": lambda: model_runner("qwen3_next"),
    "row by row": lambda: model_runner("llama4"),
    "hash": HashRunner,
}


def tree_over(runner: Any) -> PrefixCache:
    settings = CacheSettings(1 << 30, block=8)
    layout = Layout.of(runner.start(None).view().layers)
    return PrefixCache(layout, settings, fingerprint=b"model", dtype="float32")


@dataclass(frozen=True)
class Stand:
    """A cache, and a runner whose rows it can keep."""

    cache: Any
    runner: Any
    keeps: bool


def stand(kind: str) -> Stand:
    if kind == "dict":
        return Stand(DictCache(), HashRunner(), True)
    if kind == "off":
        return Stand(CacheOff(), HashRunner(), False)
    runner = RUNNERS[kind]()
    return Stand(tree_over(runner), runner, True)


CACHES = ("dense", "hybrid", "dict", "off")


def started(runner: Any, prompt: Prompt, *, chunk: int = 4) -> Any:
    """A row that has read all but the last token and takes part in decode steps."""
    row = runner.start(None)
    read(runner, row, prompt, chunk=chunk)
    (row,) = runner.choices(row, job_of(prompt), [0])
    runner.join(row, int(prompt.ids[-1]))
    return row


def read(runner: Any, row: Any, prompt: Prompt, *, chunk: int = 4) -> None:
    while row.n_tokens < len(prompt) - 1:
        runner.prefill(row, prompt, min(row.n_tokens + chunk, len(prompt) - 1))
        runner.finish_chunk(row)


def step(runner: Any, *, keep_in_flight: int = 0) -> list[Any]:
    for rows in runner.groups():
        runner.launch(rows)
    return [
        taken
        for rows in runner.groups()
        for taken in runner.collect(rows, keep_in_flight=keep_in_flight)
    ]


def reply(runner: Any, row: Any, n: int) -> list[int]:
    taken = (each for _ in range(n) for each in step(runner) if each.row is row)
    return [token for each in taken for token in each.tokens]


def own_members(port: type) -> dict[str, Any]:
    return {n: m for n, m in vars(port).items() if not n.startswith("_")}


def members(port: type) -> dict[str, Any]:
    """A port's members, including those of the ports that it combines."""
    return {n: m for base in reversed(port.__mro__) for n, m in own_members(base).items()}


def shape(function: Any) -> list[tuple[str, Any]]:
    """Names and kinds of the parameters that a caller must pass. Those with defaults may differ."""
    return [
        (p.name, p.kind)
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.name != "self"
    ]


def assert_fits(port: type, thing: Any) -> None:
    for name, member in members(port).items():
        found = getattr(thing, name)  # raises if an attribute or property is missing
        if inspect.isfunction(member):
            assert shape(found) == shape(member), f"{type(thing).__name__}.{name}"
