"""`speculation.py --device-run`: an oracle that is right with a given probability, on any device.

The model's weights are random and so is the reply, which is forced token by token; the model
computes as usual. The oracle knows the reply and guesses each of its tokens right with probability
p. The result is tokens per second with guesses, where the gate decides how many to try, over those
without.

With --head a prediction head does its work for each guess, but the oracle's tokens are used; in
steps without guesses it runs along all the same, as a head does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engines import BenchEngine, MakeLayers, shape_of
from report import BenchError, grid, names, numbers, save

from firn import backends
from firn.core.values import Job
from firn.models.decode.batch import Group, Row, StepInFlight, TakenTokens
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.steps import PlainInFlight
from firn.models.speculation.drafters import NO_DRAFT, Draft
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.odds import ExpectedTokens, Odds
from firn.models.speculation.speculator import MAX_DRAFT, RowDrafts, Speculation
from firn.models.speculation.step_clock import StepClock

N_PROMPT = 512
WARM_UP = (1.0, 0.8, 1.0)
MORE_IF_RIGHT = 4


class Oracle:
    """A drafter that knows the reply to each prompt, and guesses each token right with probability
    `right`."""

    is_free = True

    def __init__(self) -> None:
        self.right = 0.0
        self.replies: dict[tuple[int, ...], Sequence[int]] = {}
        self._rng = random.Random(0)
        self._rows: dict[Hashable, tuple[Sequence[int], int]] = {}

    def odds(self, kind: int) -> float:
        return 0.5

    def open(self, row: Hashable, job: Job) -> None:
        reply = self.replies.get(tuple(job.prompt.ids.tolist()), ())
        self._rows[row] = [t if self._rng.random() < self.right else 1 for t in reply], 0

    def prepare(self, row: Hashable) -> bool:
        return True

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        if row in self._rows:
            reply, n = self._rows[row]
            self._rows[row] = reply, n + len(tokens)

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return [self._draft(row, n_most) for row in rows]

    def _draft(self, row: Hashable, n_most: int) -> Draft:
        if row not in self._rows:
            return NO_DRAFT
        reply, n = self._rows[row]
        tokens = tuple(reply[n : n + n_most])
        return Draft(tokens, (int(10 * self.right),) * len(tokens)) if tokens else NO_DRAFT

    def close(self, row: Hashable) -> None:
        self._rows.pop(row, None)

    def end(self) -> None:
        self._rows.clear()


class OracleHead(Oracle):
    """A prediction head that computes its guesses as usual, but returns the oracle's."""

    is_free = False

    def __init__(self) -> None:
        super().__init__()
        self.head: MtpDrafter | None = None

    def odds(self, kind: int) -> float:
        return 0.7

    def open(self, row: Hashable, job: Job) -> None:
        super().open(row, job)
        if self.head is not None:
            self.head.open(row, job)

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        assert self.head is not None
        drafts = []
        for row, draft in zip(rows, self.head.draft(rows, n_most), strict=True):
            known = self._draft(row, len(draft.tokens))
            drafts.append(Draft(known.tokens, tuple(range(len(known.tokens)))))
        return drafts

    def close(self, row: Hashable) -> None:
        super().close(row)
        if self.head is not None:
            self.head.close(row)


class ListingClock(StepClock):
    """Also lists how long each step took, by its kind."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.step_ms: dict[str, list[float]] = {}

    def read(
        self,
        group: Group,
        taken: Sequence[TakenTokens],
        step: StepInFlight,
        *,
        is_asked: bool = False,
    ) -> None:
        before = self.read_at.get(id(group))
        if before is not None:
            kind = f"x{step.width}"
            if isinstance(step, PlainInFlight):
                kind = "plain" if step.is_pipelined else "back"
                kind = "drained" if self.is_draining else kind
            self.step_ms.setdefault(kind, []).append(1000 * (self._clock() - before))
        super().read(group, taken, step, is_asked=is_asked)


class OracleSpeculation(Speculation):
    """Drafts the oracle's guesses, not the forced tokens: replies are forced only to be known."""

    def __init__(self, oracle: Oracle, profile: StepProfile) -> None:
        super().__init__(oracle, profile=profile)
        self.oracle = oracle
        self.listing = ListingClock(self.times, self.allowance, time.perf_counter)
        self.step_clock = self.listing

    def forget(self) -> None:
        """Forgets the odds: the oracle is another one from now on."""
        self._odds = Odds()

    def told(self) -> str:
        """How many steps of each kind there were since the last call, and how long they took."""
        kinds, self.listing.step_ms = self.listing.step_ms, {}
        each = [
            f"{kind}: {len(ms)} of {statistics.median(ms):.1f} ms, longest {max(ms):.0f}"
            for kind, ms in sorted(kinds.items())
        ]
        return "; ".join([*each, f"allowance {self.allowance.steps:.1f}"])

    def _look(self, row: Row, drafted: RowDrafts) -> None:
        drafted.next = NO_DRAFT
        if self.oracle.is_free:
            self._tell(row, drafted)
            drafted.next = self.oracle.draft([row], MAX_DRAFT)[0]
            drafted.source = self._free[-1]

    def _expected(self, row: Row, n_pending: int) -> tuple[ExpectedTokens, ExpectedTokens]:
        forced, row.forced = row.forced, {}
        try:
            return super()._expected(row, n_pending)
        finally:
            row.forced = forced


def rate(engine: BenchEngine, *, n_streams: int, n_tokens: int, seed: int, guesses: bool) -> float:
    """Tokens per second of all streams, while all of them decode."""
    rng = random.Random(seed)
    vocab = engine.model.vocab_size
    speculation: Any = engine.engine.parts.runner.speculator  # type: ignore[attr-defined]
    prompts = [[rng.randrange(2, vocab) for _ in range(N_PROMPT)] for _ in range(n_streams)]
    replies = [[rng.randrange(2, vocab) for _ in range(n_tokens)] for _ in range(n_streams)]
    for prompt, reply in zip(prompts, replies, strict=True):
        speculation.oracle.replies[tuple(prompt)] = reply
    answers = engine.ask_forced(prompts, replies, speculates=guesses)
    for answer in answers:
        answer.wait()
    began = max(a.times[0] for a in answers)
    ended = min(a.times[-1] for a in answers)
    if ended <= began:
        raise BenchError("a reply ended before the last one began: ask for more --tokens")
    n = sum(sum(began < t <= ended for t in a.times) for a in answers)
    return n / (ended - began)


def warm_up(engine: BenchEngine, oracle: Oracle, *, n_streams: int, n_tokens: int) -> None:
    """Prepares every shape of a step, which takes longer than many steps."""
    for seed, oracle.right in enumerate(WARM_UP):
        n = n_said(n_tokens, oracle)
        rate(engine, n_streams=n_streams, n_tokens=n, seed=1 + seed, guesses=True)


def n_said(n_tokens: int, oracle: Oracle) -> int:
    """Length of a reply: more if every guess is right, because such a reply ends soon."""
    return n_tokens * (MORE_IF_RIGHT if oracle.right == 1.0 else 1)


def compare(
    engine: BenchEngine, oracle: Oracle, args: argparse.Namespace, n_streams: int
) -> Comparison:
    """Measures with and without guesses, in turns."""
    n_tokens = n_said(args.tokens, oracle)
    totals = engine.engine.parts.runner.speculator.totals  # type: ignore[attr-defined]
    pairs, per_step = [], 0.0
    for turn in range(args.rounds + 1):
        both = {}
        for guesses in (False, True) if turn % 2 else (True, False):
            before = totals.n_taken, totals.n_row_steps
            both[guesses] = rate(
                engine,
                n_streams=n_streams,
                n_tokens=n_tokens,
                seed=100 * turn + n_streams,
                guesses=guesses,
            )
            if guesses:
                n_steps = totals.n_row_steps - before[1]
                per_step = (totals.n_taken - before[0]) / n_steps
        if turn:  # the first round warms up
            pairs.append((both[False], both[True]))
    return Comparison(pairs, per_step)


@dataclass(frozen=True)
class Comparison:
    pairs: list[tuple[float, float]]
    """Tokens per second without and with guesses, round by round."""
    tokens_per_step: float

    @property
    def ratios(self) -> list[float]:
        return [on / off for off, on in self.pairs]

    @property
    def cells(self) -> list[str]:
        off, on = (statistics.median(x) for x in zip(*self.pairs, strict=True))
        ratio, worst = statistics.median(self.ratios), min(self.ratios)
        rates = [f"{off:.1f}", f"{on:.1f}"]
        return [*rates, f"{ratio:.2f}", f"{worst:.2f}", f"{self.tokens_per_step:.2f}"]


def run(args: argparse.Namespace) -> None:
    config, dtype = shape_of(args.shape)
    rows = [["streams", "right", "off tokens/s", "tokens/s", "ratio", "worst", "tokens a step"]]
    result = []
    oracle = OracleHead() if args.head else Oracle()

    def speculation(model: Any, make_layers: MakeLayers) -> OracleSpeculation:
        if isinstance(oracle, OracleHead):
            oracle.head = MtpDrafter(model)
        return OracleSpeculation(oracle, backends.find().step_profile(model, make_layers))

    began = time.perf_counter()
    with BenchEngine(
        config,
        dtype=dtype,
        memory_nbytes=1 << 30,
        speculation=speculation,
        has_head=args.head,
    ) as engine:
        print(f"the engine is up after {time.perf_counter() - began:.0f} s", flush=True)
        call = engine.engine.call
        for n_streams in numbers(args.streams):
            warm_up(engine, oracle, n_streams=n_streams, n_tokens=args.tokens)
            for right in [float(x) for x in names(args.right)]:
                oracle.right = right
                call(lambda parts: parts.runner.speculator.forget()).result()  # type: ignore[attr-defined]
                comparison = compare(engine, oracle, args, n_streams)
                rows.append([str(n_streams), f"{right:.1f}", *comparison.cells])
                told = call(lambda parts: parts.runner.speculator.told()).result()  # type: ignore[attr-defined]
                print(" ".join(rows[-1]), "|", told, flush=True)
                result.append({"streams": n_streams, "right": right, "ratios": comparison.ratios})
    print(grid(rows))
    if args.out:
        save(args.out, "speculation_device", options=vars(args), result=result)
