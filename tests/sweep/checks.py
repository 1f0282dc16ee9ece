"""What a supported architecture must do: the same requests with and without the cache.

In exact mode, every logit after a hit must equal the uncached one bit for bit; in full mode, the
tokens must be the same except at ties. The requests re-send, grow, branch, edit, shorten and
continue past a reply, at lengths around blocks, chunks and windows, and in a batch if the model can
batch; blocks are smaller than chunks, larger, and equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firn.cache.layout import Layout
from firn.core.errors import UnknownCacheLayer
from firn.models.decode.batch import why_not_batchable
from firn.models.load.selfcheck import CHUNKS_MATTER, batch_fault
from tests.harness import Harness, Result, running

WINDOW = 32
"""Window size of every windowed model in the zoo."""
TIE = 1e-3
"""If the margin between the two likeliest tokens is smaller, rounding decides."""
N_REPLY = 3

Build = Callable[[], tuple[Any, Callable[[], list[Any]]]]


@dataclass(frozen=True, slots=True)
class Mode:
    chunk: int
    block: int
    exact: bool
    near: tuple[int, ...] = (WINDOW, 2 * WINDOW)
    """Lengths around which prompts end, in addition to the block size."""

    @property
    def step(self) -> int:
        """Reuse is in multiples of this many tokens, if every layer can be cut."""
        return max(self.chunk, self.block) if self.exact else 1

    def __str__(self) -> str:
        name = "exact" if self.exact else "full"
        return f"{name} mode, chunks of {self.chunk}, blocks of {self.block}"


MODES = (
    Mode(32, 16, exact=True),
    Mode(16, 32, exact=True),
    Mode(32, 32, exact=True),
    Mode(32, 16, exact=False),
    Mode(16, 24, exact=False),
)
QUICK = (replace(MODES[0], near=(WINDOW,)), replace(MODES[4], near=()))
"""The modes for every run of the tests."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """status: supported, chunks only, no reuse (served without it), or wrong.

    row_by_row: why rows are not decoded together; empty if they are.
    """

    status: str
    detail: str = ""
    row_by_row: str = ""


def check(
    build: Build, architecture: str, *, vocab: int, modes: Sequence[Mode] = MODES, seed: int = 0
) -> Verdict:
    """Run the whole script on one model, in the given modes that it is served in."""
    model, make_layers = build()
    alone = why_not_batchable(make_layers()) or batch_fault(model, make_layers, architecture) or ""
    try:
        layout = Layout.of(make_layers())
    except UnknownCacheLayer as e:
        return Verdict("no reuse", str(e), alone)
    only_chunks = CHUNKS_MATTER.get(architecture, "")
    colds: dict[tuple[int, bool], Cold] = {}
    try:
        for mode in modes:
            if only_chunks and not mode.exact:
                continue
            cut = (mode.chunk, mode.exact)
            if cut not in colds:
                cold = Harness(build, cache_nbytes=None, chunk=mode.chunk, exact=mode.exact)
                colds[cut] = Cold(cold)
            options = {"chunk": mode.chunk, "block": mode.block, "exact": mode.exact}
            with running(build, **options) as warm:
                stateful = layout.needs().state
                script = Script(colds[cut], warm, vocab, mode, stateful, seed)
                fault = script.run() or (None if alone else script.run_crowd())
                if fault:
                    return Verdict("wrong", f"{mode}: {fault}", alone)
                if warm.cache.stats.faults:
                    faults = dict(warm.cache.stats.faults)
                    return Verdict("wrong", f"{mode}: the cache failed: {faults}", alone)
    finally:
        for cold in colds.values():
            cold.harness.close()
    return Verdict("chunks only" if only_chunks else "supported", only_chunks, alone)


class Cold:
    """The uncached answers, each computed once."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self._known: dict[tuple[int, ...], Result] = {}

    def ask(self, ids: Sequence[int], n_reply: int = N_REPLY) -> Result:
        key = (n_reply, *ids)
        if key not in self._known:
            self._known[key] = self.harness.ask(ids, n_reply)
        return self._known[key]


class Script:
    """One conversation and its variations, asked of two engines."""

    def __init__(
        self, cold: Cold, warm: Harness, vocab: int, mode: Mode, stateful: bool, seed: int
    ) -> None:
        self._cold, self._warm, self._mode, self._stateful = cold, warm, mode, stateful
        self._rng = random.Random(seed)
        self._vocab = vocab
        self._asked: list[list[int]] = []

    def run(self) -> str | None:
        """None, or the first thing that went wrong."""
        first = self._tokens(150)
        other = self._tokens(2 * WINDOW + 8)
        system = 70
        grown = first + self._cold.ask(first).reply + self._tokens(20)
        steps: list[tuple[str, list[int], tuple[int, ...], int]] = [
            ("first sight", first, (system, 147), 0),
            ("sent again", first, (system, 147), 149),
            ("next turn", grown, (system, 147, len(grown) - 3), 149),
            ("the turn after", grown + self._tokens(9), (system, len(grown)), len(grown) - 3),
            ("same system prompt", first[:system] + self._tokens(40), (system,), system),
            ("branch", first[:101] + self._tokens(30), (system,), system),
            ("edited middle", [*first[:80], 7, *first[81:]], (system, 147), system),
            ("shortened", grown[:160], (system, 147), 149),
        ]
        around = {m + d for m in (self._mode.block, *self._mode.near) for d in (-1, 0, 1)}
        for n in sorted(around):
            steps.append((f"a new prompt of {n}", other[:n], (), 0))
            steps.append((f"cut at {n}", first[:n] + self._tokens(5), (), 0))
        for label, ids, boundaries, at_least in steps:
            fault = self._compare(label, ids, boundaries, at_least)
            if fault:
                return fault
        return None

    def run_crowd(self) -> str | None:
        """Prompts that are read and decoded together, and then continue one by one."""
        prompts = [self._tokens(n) for n in (90, 40, 65)]
        results = [self._warm.submit(ids, 20) for ids in prompts]
        replies = [r.wait().reply for r in results]
        if any(r.error for r in results):
            return f"in a batch: {next(r.error for r in results if r.error)}"
        for ids, reply in zip(prompts, replies, strict=True):
            n_stored = len(ids) - 1 + (0 if self._mode.exact else len(reply))
            fault = self._compare("after a batch", [*ids, *reply, 5, 9], (), n_stored)
            if fault:
                return fault
        return None

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab) for _ in range(n)]

    def _compare(
        self, label: str, ids: list[int], boundaries: tuple[int, ...], at_least: int
    ) -> str | None:
        a = self._cold.ask(ids)
        b = self._warm.ask(ids, N_REPLY, boundaries=boundaries)
        if self._mode.exact:
            if a.logprobs != b.logprobs or a.tokens != b.tokens:
                return f"{label}: logits differ after resuming at {b.n_cached} of {len(ids)}"
            at_least -= at_least % (self._mode.chunk if self._stateful else self._mode.step)
        elif not same_tokens(a, b):
            return f"{label}: tokens differ after resuming at {b.n_cached} of {len(ids)}"
        if not self._stateful:
            at_least = max(at_least, self._stored(ids))
        self._asked.append(ids)
        if b.n_cached < at_least:
            return f"{label}: reused {b.n_cached} tokens of at least {at_least}"
        return None

    def _stored(self, ids: list[int]) -> int:
        """Tokens that layers must reuse if they can be cut anywhere: the longest known prefix."""
        step = self._mode.step
        best = 0
        for earlier in self._asked:
            n = common(ids, earlier)
            if self._mode.exact:
                n = min(n, len(earlier) - 1)
            best = max(best, min(n, len(ids) - 1))
        return best - best % step


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def same_tokens(reference: Result, other: Result) -> bool:
    """Whether they are equal up to the first position where the reference itself was undecided."""
    rows = zip(reference.reply, other.reply, reference.margins[0], strict=True)
    for mine, theirs, margin in rows:
        if mine != theirs:
            return margin < TIE
    return True
