"""A trace played against a server, with made-up text that shares prefixes as the trace does.

A block of the trace becomes words that are unique to its hash, so that two prompts share text exactly as
far as their chains of blocks do. A trace does not hold replies: where a prompt continues a reply, its
words are new to the server, which can reuse a little less here than when the trace was recorded.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from firn.bench.client import Target, TimedReply, words
from firn.bench.report import BenchError, Column
from firn.traces.trace import TraceEntry

COLUMNS = (
    Column("first_p50_s", "first p50 s", 3),
    Column("first_p90_s", "p90 s", 3),
    Column("first_p99_s", "p99 s", 3),
    Column("reused", "reused", 3, "more"),
    Column("possible", "possible", 3, ""),
    Column("tok_s", "tok/s", 1, "more"),
    Column("failed", "failed", 0, ""),
)
"""reused: share of the prompt tokens that the server reported as cached. possible: what a cache without
limits would reuse of the same trace, in whole blocks."""
N_PROBE = 100
TOKENS_PER_WORD = 5.0
"""Assumed if a server reports no counts."""
KEPT_TEXTS = 1 << 14


@dataclass(frozen=True, slots=True)
class ReplayPace:
    """speed: 1 is the trace's own, 2 twice as fast, 0 without pauses. streams: requests at a time.
    max_prompt, max_reply: tokens; longer ones are cut."""

    speed: float = 1.0
    streams: int = 8
    max_prompt: int = 32_768
    max_reply: int = 64


class PromptWriter:
    """Writes the prompts of one round. Thread-safe: it makes the same text for the same block."""

    def __init__(self, block: int, *, tokens_per_word: float, salt: str) -> None:
        self._tokens_per_word = tokens_per_word
        self._salt = salt
        self._n_words = max(round(block / tokens_per_word), 1)
        self._text = lru_cache(KEPT_TEXTS)(self._block_text)

    def prompt(self, entry: TraceEntry, number: int, *, block: int) -> str:
        rest = entry.n_prompt - len(entry.blocks) * block
        n_own = max(round(rest / self._tokens_per_word), 1)
        own = words(n_own, seed=(self._salt, "own", number))
        return " ".join([*map(self._text, entry.blocks), own])

    def _block_text(self, name: int) -> str:
        return words(self._n_words, seed=(self._salt, name))


def tokens_per_word(target: Target) -> float:
    """Measured with two prompts, because it depends on the server's tokenizer."""
    lengths = [
        target.chat([{"role": "user", "content": words(n, seed="how long")}], 1).n_prompt
        for n in (N_PROBE, 2 * N_PROBE)
    ]
    per_word = (lengths[1] - lengths[0]) / N_PROBE
    return per_word if per_word > 0 else TOKENS_PER_WORD


def cut(entries: Sequence[TraceEntry], *, block: int, max_prompt: int) -> list[TraceEntry]:
    """The requests in order of arrival, with prompts of at most `max_prompt` tokens.

    Longer ones are cut to whole blocks, or to `max_prompt` if that is less than a block.
    """
    limit = max_prompt // block * block or max_prompt
    shortened = []
    for entry in sorted(entries, key=lambda e: e.at_s):
        n_prompt = min(entry.n_prompt, limit)
        kept = entry.blocks[: n_prompt // block]
        shortened.append(replace(entry, n_prompt=n_prompt, blocks=kept, reply_blocks=()))
    return shortened


def run(
    target: Target,
    entries: Sequence[TraceEntry],
    *,
    block: int,
    pace: ReplayPace,
    salt: str,
    on_reply: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """One round of the trace. Raises BenchError when nothing was answered."""
    asked = cut(entries, block=block, max_prompt=pace.max_prompt)
    writer = PromptWriter(block, tokens_per_word=tokens_per_word(target), salt=salt)
    began, first_at = time.perf_counter(), asked[0].at_s
    late: list[float] = []
    ended = threading.Event()

    def ask(i: int) -> TimedReply | BenchError:
        entry = asked[i]
        text = writer.prompt(entry, i, block=block)
        if pace.speed:
            due = began + (entry.at_s - first_at) / pace.speed
            wait = due - time.perf_counter()
            late.append(max(-wait, 0.0))
            if ended.wait(max(wait, 0.0)):
                return BenchError("the replay was stopped before this request was due")
        messages = [{"role": "user", "content": text}]
        try:
            return target.chat(
                messages, max(min(entry.n_reply, pace.max_reply), 1), ignore_eos=True
            )
        except BenchError as e:
            return e
        finally:
            on_reply()

    with ThreadPoolExecutor(pace.streams) as pool:
        try:
            outcomes = list(pool.map(ask, range(len(asked))))
        finally:
            ended.set()  # after Ctrl-C, do not wait for requests that may be due in hours
    replies = [r for r in outcomes if isinstance(r, TimedReply)]
    faults = [r for r in outcomes if isinstance(r, BenchError)]
    if not replies:
        raise BenchError(f"no request of the trace was answered; the first: {faults[0]}")
    took = time.perf_counter() - began
    return _result(replies, asked, block=block, took_s=took) | {
        "failed": len(faults),
        "faults": sorted({str(e) for e in faults})[:5],
        "late_s": max(late, default=0.0),
    }


def _result(
    replies: Sequence[TimedReply], asked: Sequence[TraceEntry], *, block: int, took_s: float
) -> dict[str, Any]:
    first = [r.first_s for r in replies]
    n_prompt = sum(r.n_prompt for r in replies)
    return {
        "first_p50_s": percentile(first, 50),
        "first_p90_s": percentile(first, 90),
        "first_p99_s": percentile(first, 99),
        "reused": sum(r.n_cached for r in replies) / n_prompt if n_prompt else None,
        "possible": possible(asked, block=block),
        "tok_s": sum(r.n_completion for r in replies) / took_s,
        "took_s": took_s,
        "requests": len(asked),
        "first_s": first,
        "prompt_tokens": [r.n_prompt for r in replies],
        "cached_tokens": [r.n_cached for r in replies],
    }


def possible(entries: Sequence[TraceEntry], *, block: int) -> float:
    """The share of these prompts' tokens that a cache without limits reuses."""
    seen: set[tuple[int, int]] = set()
    n_known = 0
    for entry in entries:
        chain = list(enumerate(entry.blocks))
        n = next((i for i, name in chain if (i, name) not in seen), len(chain))
        n_known += n * block
        seen.update(chain[n:])
    return n_known / max(sum(e.n_prompt for e in entries), 1)


def percentile(values: Sequence[float], share: float) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share) - 1]
