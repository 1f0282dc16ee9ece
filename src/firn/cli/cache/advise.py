"""`firn cache advise`: reads a trace, plays it, and shows the result as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firn.bench.report import grid
from firn.cli.terminal import plain_console, steps_progress
from firn.config import UsageError
from firn.core.units import GIB
from firn.traces.advise import Advice, advise
from firn.traces.read import read
from firn.traces.trace import Trace, TraceError

MILLION = 1_000_000
SPANS = ((86_400, "days"), (3600, "hours"), (60, "minutes"))


class Scale:
    """Formats sizes: in GiB if a token's bytes are known, otherwise in millions of tokens."""

    def __init__(self, trace: Trace, token_nbytes: int) -> None:
        self.in_bytes = token_nbytes > 0
        self._block = trace.block * (token_nbytes or 1)
        self._unit = GIB if self.in_bytes else MILLION
        self.blocks = self._unit / self._block
        """Blocks in one GiB, or in a million tokens."""
        self.name = "GiB" if self.in_bytes else "M tokens"

    def of(self, n_blocks: int) -> float:
        return n_blocks * self._block / self._unit

    def text(self, n_blocks: int) -> str:
        value, name = self.of(n_blocks), self.name
        if value < 1:
            value, name = (value * 1024, "MiB") if self.in_bytes else (value * 1000, "K tokens")
        return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def run(
    path: Path,
    *,
    model: str | None,
    token_bytes: int,
    memory_gb: str | None,
    ssd_gb: str | None,
    workers: int,
    as_json: bool,
) -> None:
    try:
        source = read(path, model=model)
        trace = Trace.of(source.entries, block=source.block)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from e
    scale = Scale(trace, token_bytes or trace.token_nbytes)
    memory = _sizes("--memory-gb", memory_gb, scale)
    ssd = _sizes("--ssd-gb", ssd_gb, scale)
    with steps_progress("playing") as progress:
        advice = advise(
            trace,
            memory=memory,
            ssd=ssd,
            unit=scale.blocks,
            progress=progress,
            workers=workers or None,
        )
    if as_json:
        print(json.dumps(_json(trace, advice, scale), indent=2))
    else:
        _show(trace, advice, scale)


def _sizes(flag: str, text: str | None, scale: Scale) -> list[int]:
    if text is None:
        return []
    if not scale.in_bytes:
        raise UsageError(
            f"{flag}: the trace does not say how many bytes a token takes; add --token-bytes"
        )
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 < v < math.inf for v in values):
        raise UsageError(f"{flag} {text}: give sizes above 0, with commas between them")
    return [max(round(v * scale.blocks), 1) for v in values]


def _show(trace: Trace, advice: Advice, scale: Scale) -> None:
    console = plain_console()
    span_s = float(trace.at[-1] - trace.at[0])
    span = next(
        (f"{span_s / unit:.1f} {name}" for unit, name in SPANS if span_s >= 2 * unit),
        f"{span_s:.0f} seconds",
    )
    whole = scale.text(trace.n_nodes)
    console.print(
        f"{len(trace):,} requests in {span}, {trace.n_prompt_tokens / MILLION:,.1f} M prompt tokens; "
        f"together they store {whole}.\n"
        f"A cache without limits reuses {advice.unlimited:.1%} of the prompt tokens, in whole blocks of "
        f"{trace.block}.\n",
        highlight=False,
    )
    rows = [["memory", "no SSD", *(f"SSD {scale.text(s)}" for s in advice.ssd)]]
    for m in advice.memory:
        cells = [f"{advice.together[m, s]:.1%}" for s in advice.ssd]
        rows.append([scale.text(m), f"{advice.alone[m]:.1%}", *cells])
    rows.append(["plain LRU", "", *(f"{advice.lru[s]:.1%}" for s in advice.ssd)])
    console.print(grid(rows), highlight=False)
    console.print(f"\n{_summary(advice, scale)}", highlight=False)


def _summary(advice: Advice, scale: Scale) -> str:
    m, s, first = advice.memory_knee, advice.ssd_knee, advice.memory[0]
    best = max(advice.unlimited, 1e-9)
    lines = [
        f"Memory alone: {scale.text(m)} reuses {advice.alone[m]:.1%}, {advice.alone[m] / best:.0%} "
        f"of what is possible; {_if_doubled(m == advice.memory[-1])}",
        f"With {scale.text(first)} of memory, an SSD of {scale.text(s)} reuses "
        f"{advice.together[first, s]:.1%}, {advice.together[first, s] / best:.0%} of it; "
        f"{_if_doubled(s == advice.ssd[-1])}",
    ]
    return "\n".join(lines)


def _if_doubled(is_largest: bool) -> str:
    if is_largest:
        return "it is the largest size tried, and a larger one may gain more."
    return "doubling it would gain less than 1% of the prompt tokens."


def _json(trace: Trace, advice: Advice, scale: Scale) -> dict[str, Any]:
    def sizes(blocks: Sequence[int]) -> list[dict[str, float]]:
        return [{"tokens": n * trace.block, scale.name: round(scale.of(n), 4)} for n in blocks]

    return {
        "requests": len(trace),
        "prompt_tokens": trace.n_prompt_tokens,
        "working_set_tokens": trace.working_set_tokens,
        "block_tokens": trace.block,
        "unlimited": advice.unlimited,
        "memory": sizes(advice.memory),
        "ssd": sizes(advice.ssd),
        "memory_alone": [advice.alone[m] for m in advice.memory],
        "memory_and_ssd": [[advice.together[m, s] for s in advice.ssd] for m in advice.memory],
        "plain_lru": [advice.lru[s] for s in advice.ssd],
        "memory_knee": sizes([advice.memory_knee])[0],
        "ssd_knee": sizes([advice.ssd_knee])[0],
    }
