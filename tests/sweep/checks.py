"""What a supported architecture must do: the same requests with and without the cache.

In exact mode every logit that the cache had a part in must be bit for bit the uncached one; in full
mode the tokens must be the same away from ties. The requests re-send, grow, branch, shorten and continue
past a reply, at lengths that cross windows and blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firn.cache.layout import Layout
from firn.core.errors import UnknownCacheLayer
from firn.models.selfcheck import CHUNKS_MATTER
from tests.harness import Harness, Result, running

CHUNK, BLOCK = 32, 16
TIE = 1e-3
"""A smaller margin between the two likeliest tokens is rounding's to decide."""

Build = Callable[[], tuple[Any, Callable[[], list[Any]]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """status: supported, no reuse (served without it), or wrong."""

    status: str
    detail: str = ""


def check(build: Build, architecture: str, *, vocab: int, seed: int = 0) -> Verdict:
    """Run the whole script on one model."""
    _, make_layers = build()
    try:
        Layout.of(make_layers())
    except UnknownCacheLayer as e:
        return Verdict("no reuse", str(e))
    modes = (True,) if architecture in CHUNKS_MATTER else (True, False)
    for exact in modes:
        with (
            running(build, cache_nbytes=None, chunk=CHUNK) as cold,
            running(build, chunk=CHUNK, block=BLOCK, exact=exact) as warm,
        ):
            fault = Script(cold, warm, vocab, exact=exact, seed=seed).run()
            if fault:
                return Verdict("wrong", f"{'exact' if exact else 'full'} mode: {fault}")
            faults = dict(warm.cache.stats.faults)
            if faults:
                return Verdict("wrong", f"the cache failed: {faults}")
    why = CHUNKS_MATTER.get(architecture)
    return Verdict("supported", f"on prefill chunks only: {why}" if why else "")


class Script:
    """One conversation and its variations, asked of two engines."""

    def __init__(self, cold: Harness, warm: Harness, vocab: int, *, exact: bool, seed: int) -> None:
        self._cold, self._warm, self._exact = cold, warm, exact
        self._rng = random.Random(seed)
        self._vocab = vocab

    def run(self) -> str | None:
        first = self._tokens(150)
        system = 70
        steps: list[tuple[str, list[int], tuple[int, ...], int]] = []
        reply = self._cold.ask(first, 12).reply
        grown = first + reply + self._tokens(20)
        steps.append(("first sight", first, (system, 147), 0))
        steps.append(("sent again", first, (system, 147), 149))
        steps.append(("next turn", grown, (system, 147, len(grown) - 3), 149))
        steps.append(("same system prompt", first[:system] + self._tokens(40), (system,), system))
        steps.append(("branch", first[:101] + self._tokens(30), (system,), system))
        steps.append(("shortened", grown[:160], (system, 147), 149))
        for label, ids, boundaries, at_least in steps:
            fault = self._compare(label, ids, boundaries, at_least)
            if fault:
                return fault
        return None

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab) for _ in range(n)]

    def _compare(
        self, label: str, ids: list[int], boundaries: tuple[int, ...], at_least: int
    ) -> str | None:
        a = self._cold.ask(ids, 8, boundaries=boundaries)
        b = self._warm.ask(ids, 8, boundaries=boundaries)
        if self._exact:
            at_least -= at_least % CHUNK
            if a.logprobs != b.logprobs or a.tokens != b.tokens:
                return f"{label}: logits differ after resuming at {b.n_cached} of {len(ids)}"
        elif not same_tokens(a, b):
            return f"{label}: tokens differ after resuming at {b.n_cached} of {len(ids)}"
        if b.n_cached < at_least:
            return f"{label}: reused {b.n_cached} tokens of at least {at_least}"
        return None


def same_tokens(reference: Result, other: Result) -> bool:
    """Equal up to the first position where the reference itself was undecided."""
    rows = zip(reference.reply, other.reply, reference.margins[0], strict=True)
    for mine, theirs, margin in rows:
        if mine != theirs:
            return margin < TIE
    return True
