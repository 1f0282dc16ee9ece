"""Random use of an engine, step by step, and what it must leave behind: right records, right replies.

A user asks, joins, cancels, stops and forces tokens between any two steps of the engine, which is
driven without its thread: a seed decides what happens in which step. Steps with drafts stay in flight
between two steps of the engine, so whatever happens finds rows whose newest tokens may be taken back.
Prompts may show pictures, and may be thinned before they are read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from firn.backends.cuda.traced import TracedSteps
from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.orders import Worker
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import Tier
from firn.core.errors import StepFailed
from firn.core.ports import MAX_STEP_TOKENS, Delivery, EngineLoad, ReadChunk, Restored
from firn.core.values import CacheControl, Job, Namespace, Prompt, RequestId
from firn.engine import EngineLimits, EngineParts, NoPreparation
from firn.engine.budget import Budget, RowCost
from firn.engine.loop import Loop
from firn.engine.sequence import ForcedTokens
from firn.models.decode.batch import Group, Row, TakenTokens
from firn.models.decode.execution import PLAIN_EXECUTION, Execution
from firn.models.decode.pipelined import PipelinedVerification
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.rewind import can_be_cut_meanwhile, is_rewindable, ready
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.steps import NO_SPECULATION
from firn.models.decode.verify import Verification
from firn.models.grammar.compiler import CompiledGrammar
from firn.models.model_arguments import IDS_ONLY, ModelArguments
from firn.models.patches import Patches
from firn.models.speculation.drafters import Draft, Drafter
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.drafters.model import ModelDrafter
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.mtp import MtpModel, with_head_layer
from firn.models.speculation.speculator import Speculation
from firn.sparse.placing import ArgumentsByPosition
from firn.sparse.prefill import SparsePrefill
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scorer, Scores
from tests.audit import ROUNDING, wrong_records
from tests.dict_tier import DictTier
from tests.harness import GREEDY, Eager, Result, model_info, scorer_of
from tests.models.alone import TIE, Built, plain, with_caches
from tests.models.grammar.grammar_lab import allowed, compiled, tokenizer
from tests.models.integers import chunked, full, integers, quantised, seeing, state, window
from tests.models.speculation.drafters.test_model import AsksWhenReady
from tests.models.speculation.drafters.test_mtp import random_head
from tests.models.speculation.drafting import AnyWidth
from tests.models.vision import gallery
from tests.sparse.test_prefill import DiceScorer, Scoring
from tests.stories.said import (
    N_PICTURES,
    Prompts,
    Reader,
    Shown,
    no_picture,
    of_family,
    of_integers,
)
from tests.zoo import VOCAB_SIZE, ZOO, Entry, build_entry

CHUNK, MAX_ROWS = 64, 4
NAMESPACES = (Namespace(""), Namespace("other"))
INJECTED = "a fault of the test"
LOGPROBS_LOST = "while the prompt's logprobs were computed"
"""What such a request fails with if anything fails meanwhile: they must not be sent twice."""
FAILING = ("launch", "launch", "collect", "collect", "prefill", "finish_chunk", "join", "start")
GRAMMAR = r"(the same words again, [0-9]{2}; ){2,20}end"


@dataclass(frozen=True)
class Kind:
    """A model, and how its cache is used.

    longest: of a prompt. rounding: how far records may differ; 0: not at all. memory_tokens: of how many
    tokens rows and records fit into memory; other records are in a tier. 0: all of them.
    """

    build: Callable[[], Built]
    block: int = 32
    longest: int = 400
    kv_bits: int = 0
    rounding: float = 0.0
    memory_tokens: int = 0
    may_refuse: bool = False
    """Whether a step can add more tokens than a window holds: then some are not stored."""
    is_exact: bool = False
    """Resumes only where chunks end, and drafts nothing."""
    is_traced: bool = False
    """Whether steps are traced, so that those with drafts are launched behind unread ones."""
    shown: Callable[[int], Shown] = no_picture
    """Its pictures, by number."""
    whole_pictures: bool = False
    """Whether a picture's tokens see each other."""
    scorer: Callable[[], Scorer[Any]] | None = None
    """Who says what some prompts are thinned to; None: all are read as they are."""
    takes_blocks: bool = True
    """Whether its attention takes keys in whole blocks of columns."""
    first_token: int = 16
    """Those below are never said in a prompt."""
    takes_grammars: bool = True
    """Whether its tokens are those of the tests' grammars."""

    @property
    def sees(self) -> bool:
        return self.shown is not no_picture

    def arguments(self, model: Any) -> ModelArguments:
        """What this model of this kind is called with."""
        if self.sees:
            return model.base if isinstance(model, MtpModel) else model  # type: ignore[no-any-return]
        return IDS_ONLY if self.scorer is None else ArgumentsByPosition(Patches())

    def prompts(self) -> Prompts:
        return Prompts(self.shown, whole=self.whole_pictures)

    def reader(self, prompts: Prompts) -> Reader:
        model, make_layers = self.build()
        return Reader(model, make_layers, self.arguments(model), prompts)

    def tokens(self, rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(self.first_token, VOCAB_SIZE) for _ in range(n)]

    def said(self, rng: random.Random, n: int) -> list[int]:
        """Something new, with pictures if it sees them."""
        said = self.tokens(rng, n)
        for _ in range(rng.choice((0, 1, 1, 2)) if self.sees else 0):
            said.insert(rng.randint(1, len(said)), -rng.randint(1, N_PICTURES))
        return said


def of_zoo(name: str, *, has_head: bool = False, **config: int) -> Callable[[], Built]:
    entry: Entry = replace(ZOO[name], config={**ZOO[name].config, **config})

    def build() -> Built:
        model = build_entry(entry)
        if not has_head:
            return with_caches(model)
        make_layers = with_head_layer(lambda: list(make_prompt_cache(model)))
        return MtpModel(model, random_head(model, entry.name)), make_layers

    return build


INTEGERS = {
    "dense": Kind(integers(full, full)),
    "window smaller than a draft": Kind(integers(full, window(20)), may_refuse=True),
    "window of a third of a block": Kind(integers(window(44), full), block=128, longest=600),
    "window smaller than a block": Kind(integers(window(80), full), block=128, longest=600),
    "window of a block": Kind(integers(window(36), full), block=36),
    "window just larger than a block": Kind(integers(full, window(80)), block=64),
    "window of many blocks": Kind(integers(full, window(96)), block=16),
    "windows alone": Kind(integers(window(44), window(70)), block=32),
    "chunked": Kind(integers(chunked(64), full)),
    "hybrid": Kind(integers(full, state)),
    "hybrid with a window": Kind(integers(state, window(44), full)),
    "states alone": Kind(integers(state, state)),
    "stored quantised": Kind(integers(full, full), kv_bits=8),
    "kept quantised": Kind(integers(quantised, quantised)),
    "exact reuse": Kind(integers(full, window(80), state), is_exact=True),
    "dense, short of memory": Kind(integers(full, full), memory_tokens=1500),
    "window, short of memory": Kind(integers(window(44), full), block=64, memory_tokens=1500),
    "hybrid, short of memory": Kind(integers(full, state), memory_tokens=1500),
}
"""Compared bit for bit."""
PICTURES = {
    "pictures": Kind(seeing(full, full), shown=of_integers),
    "pictures, window": Kind(seeing(window(44), full), shown=of_integers),
    "pictures, hybrid": Kind(seeing(full, state), shown=of_integers),
    "pictures, stored quantised": Kind(seeing(full, full), shown=of_integers, kv_bits=8),
    "pictures, exact reuse": Kind(seeing(full, state), shown=of_integers, is_exact=True),
    "pictures, short of memory": Kind(
        seeing(full, window(44)), block=64, shown=of_integers, memory_tokens=2500
    ),
    "whole pictures": Kind(
        seeing(full, full, is_whole=True), shown=of_integers, whole_pictures=True
    ),
    "whole pictures, window": Kind(
        seeing(window(140), full, is_whole=True), shown=of_integers, whole_pictures=True
    ),
    "whole pictures, hybrid": Kind(
        seeing(full, state, is_whole=True), shown=of_integers, whole_pictures=True
    ),
}
"""Compared bit for bit, too."""


class PlaceScorer(DiceScorer):
    """Scores a token by its place, so that prompts with a common beginning keep much of it."""

    def scores(self, reading: Scoring) -> Scores:
        return np.random.default_rng(5).random(10_000).astype(np.float32)[: len(reading.prompt)]


SPARSE = {
    "sparse": Kind(integers(full, full), scorer=PlaceScorer),
    "sparse, large blocks": Kind(integers(full, full), scorer=PlaceScorer, block=128, longest=600),
    "sparse, small blocks": Kind(integers(full), scorer=PlaceScorer, block=12),
    "sparse, stored quantised": Kind(integers(full, full), scorer=PlaceScorer, kv_bits=8),
    "sparse, kept quantised": Kind(integers(quantised, quantised), scorer=PlaceScorer),
    "sparse, short of memory": Kind(integers(full, full), scorer=PlaceScorer, memory_tokens=1500),
}
"""Compared bit for bit, too: some of their prompts are thinned."""
TRACED = {
    "traced": Kind(integers(full, full), is_traced=True),
    "traced, short of memory": Kind(integers(full, full), is_traced=True, memory_tokens=1500),
    "traced, sparse": Kind(integers(full, full), is_traced=True, scorer=PlaceScorer),
}
"""Compared bit for bit, too."""
_real = partial(Kind, rounding=ROUNDING)
REAL = {
    "qwen3": _real(of_zoo("qwen3")),
    "gpt_oss": _real(of_zoo("gpt_oss", sliding_window=80), block=128, longest=600),
    "gemma3": _real(of_zoo("gemma3_text")),
    "llama4, chunked": _real(of_zoo("llama4_text")),
    "deepseek, latent": _real(of_zoo("deepseek_v3")),
    "qwen3_next, hybrid": _real(of_zoo("qwen3_next")),
    "falcon_h1, both in a layer": _real(of_zoo("falcon_h1")),
    "qwen3, quantised": _real(of_zoo("qwen3"), kv_bits=8),
    "mimo, windows with a head": _real(of_zoo("mimo_v2_flash", has_head=True), block=48),
    "deepseek with a head": _real(of_zoo("deepseek_v3", has_head=True)),
    "qwen3_next with a head": _real(of_zoo("qwen3_next", has_head=True)),
    "qwen3, traced": _real(of_zoo("qwen3"), is_traced=True),
    "qwen3, sparse": _real(of_zoo("qwen3"), scorer=lambda: scorer_of(plain("qwen3"))),
    "deepseek_v2, sparse": _real(of_zoo("deepseek_v2"), scorer=PlaceScorer),
    "qwen3_vl": _real(
        gallery.build("qwen3_vl"),
        shown=of_family("qwen3_vl"),
        first_token=100,
        takes_grammars=False,
    ),
    "qwen3_5, hybrid with pictures": _real(
        gallery.build("qwen3_5"),
        shown=of_family("qwen3_5"),
        first_token=100,
        takes_blocks=False,
        takes_grammars=False,
    ),
    "gemma3 with pictures": _real(
        gallery.build("gemma3"), shown=of_family("gemma3"), first_token=100, takes_grammars=False
    ),
    "gemma4, whole pictures": _real(
        gallery.build("gemma4"),
        shown=of_family("gemma4"),
        first_token=100,
        takes_grammars=False,
        whole_pictures=True,
    ),
}
"""Architectures of mlx-lm and mlx-vlm. Other chunks and batches round differently."""


# --- drafts ------------------------------------------------------------------------------------


@dataclass
class Foreseen:
    """What a row reads and has said, what the model will say next, and the model's caches after all but
    the last token of these."""

    prompt: Prompt
    reply: list[int] = field(default_factory=list)
    next: list[int] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)


class Clairvoyant:
    """Drafts what the model itself would say, with a wrong token now and then. Costs a step a token."""

    is_free = True

    def __init__(self, kind: Kind, *, right: float) -> None:
        self._right = right
        self._rng = random.Random(0)
        self._reader = kind.reader(kind.prompts())
        self._rows: dict[Hashable, Foreseen] = {}
        self.read_as: dict[RequestId, Prompt] = {}
        """What is left of the prompts that were thinned."""

    def odds(self, kind: int) -> float:
        return 0.5

    def open(self, row: Hashable, job: Job) -> None:
        self._rows[row] = Foreseen(self.read_as.get(job.id, job.prompt))

    def prepare(self, row: Hashable) -> bool:
        return True

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        seen = self._rows[row]
        seen.reply += tokens
        if seen.next[: len(tokens)] == list(tokens):
            del seen.next[: len(tokens)]
        else:
            seen.next, seen.layers = [], []

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return [self._draft(self._rows[row], n_most) for row in rows]

    def _draft(self, seen: Foreseen, n: int) -> Draft:
        text = seen.prompt.grown([*seen.reply, *seen.next])
        if not seen.layers:
            seen.layers = self._reader.past(text, len(text) - 1)
        while len(seen.next) < n:
            logits = self._reader.read(text, len(text) - 1, len(text), seen.layers)
            seen.next.append(int(mx.argmax(logits[0]).item()))
            text = text.grown(seen.next[-1:])
        tokens = [
            t if self._rng.random() < self._right else (t + 1) % VOCAB_SIZE for t in seen.next[:n]
        ]
        return Draft(tuple(tokens), (0,) * n)

    def close(self, row: Hashable) -> None:
        self._rows.pop(row, None)

    def end(self) -> None:
        self._rows.clear()


WIDE = StepProfile(widths=(1, 2, 5, 17, MAX_STEP_TOKENS))
FEW_SHAPES = replace(WIDE, shapes=(4, 16, MAX_STEP_TOKENS), columns=Columns(64))


def clairvoyant(
    kind: Kind,
    profile: StepProfile = WIDE,
    *,
    right: float = 0.98,
    most: int = MAX_STEP_TOKENS,
) -> Speculation:
    if not kind.takes_blocks:
        profile = replace(profile, columns=ALL_COLUMNS)
    return AnyWidth(Clairvoyant(kind, right=right), least=2, most=most, profile=profile)


def lookups(kind: Kind) -> Speculation:
    return AnyWidth(Lookup(), most=MAX_STEP_TOKENS, profile=WIDE)


def draft_model(kind: Kind, small: Kind) -> Speculation:
    model, make_layers = small.build()
    settings = CacheSettings(1 << 30, small.block)
    cache = PrefixCache(Layout.of(make_layers()), settings, fingerprint=b"small", dtype="float32")
    return AsksWhenReady(ModelDrafter(model, make_layers, cache=cache, batchable=True, chunk=32))


def own_draft_model(kind: Kind) -> Speculation:
    """A draft model that is always right, where tokens of such a model can be taken back."""
    can_draft = is_rewindable(kind.build()[1]())
    return draft_model(kind, kind if can_draft else SMALL)


SMALL = Kind(integers(window(80), full), block=128)
Drafts = Callable[[Kind], Speculation]
DRAFTS: dict[str, Drafts | None] = {
    "no drafts": None,
    "right drafts": clairvoyant,
    "in few shapes": partial(clairvoyant, profile=FEW_SHAPES),
    "short drafts": partial(clairvoyant, profile=FEW_SHAPES, right=0.85, most=6),
    "lookups": lookups,
    "draft model": partial(draft_model, small=SMALL),
    "right draft model": own_draft_model,
}
"""But for the first, forced tokens are drafted as well, and what a grammar leaves no choice about."""


# --- use ---------------------------------------------------------------------------------------


class WatchedRunner(Runner):
    """Counts what happened to groups while a step with drafts was in flight."""

    def watch(self) -> WatchedRunner:
        self.seen: Counter[str] = Counter()
        self.read_as: dict[RequestId, Prompt] = {}
        """The prompts as they were read."""
        self.fails: dict[str, Exception] = {}
        """What the next call of a method raises."""
        self.n_failed = 0
        return self

    def _may_fail(self, name: str, *in_doubt: Any) -> None:
        """in_doubt: layers that hold anything after the fault."""
        error = self.fails.pop(name, None)
        if error is not None:
            self.n_failed += 1
            for layer in in_doubt:
                scramble(layer)
            raise error

    @property
    def _live_layers(self) -> list[Any]:
        return [layer for group in self._groups for layer in group.layers]

    def start(self, restored: Restored | None) -> Row:
        row = super().start(restored)
        self._may_fail("start", *row.layers)
        return row

    def prefill(
        self, row: Row, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        super().prefill(row, prompt, end, top_logprobs=top_logprobs)
        self._may_fail("prefill", *row.layers)

    def finish_chunk(self, row: Row) -> ReadChunk:
        self._may_fail("finish_chunk", *row.layers)
        return super().finish_chunk(row)

    def collect(self, rows: Sequence[Row], *, keep_in_flight: int) -> list[TakenTokens]:
        group = rows[0].group
        self._may_fail("collect", *(group.layers if group else ()))
        return super().collect(rows, keep_in_flight=keep_in_flight)

    def confirm(self) -> None:
        self._may_fail("confirm", *self._live_layers)
        super().confirm()

    def choices(self, row: Row, job: Job, indices: Sequence[int]) -> list[Row]:
        self.read_as[job.id] = job.prompt
        self.seen["thinned"] += job.prompt.has_gaps
        return super().choices(row, job, indices)

    def join(self, row: Row, token: int, *, before: Sequence[int] = (), n_coming: int = 0) -> None:
        self._may_fail("join", *row.layers)
        drafting = [g for g in self._groups if _has_drafts_in_flight(g)]
        super().join(row, token, before=before, n_coming=n_coming)
        self.seen["joined"] += row.group in drafting

    def leave(self, rows: Sequence[Row]) -> None:
        self.seen["left"] += sum(
            r.group is not None and _has_drafts_in_flight(r.group) for r in rows
        )
        super().leave(rows)

    def launch(self, rows: Sequence[Row]) -> None:
        group = rows[0].group
        assert group is not None
        n_seats, had_drafts = len(group.seats), _has_drafts_in_flight(group)
        super().launch(rows)
        self._may_fail("launch", *group.layers)
        self.seen["pipelined"] += isinstance(group.unread[-1], PipelinedVerification)
        self.seen["shrank"] += had_drafts and len(group.seats) < n_seats


def scramble(layer: Any) -> None:
    for name in ("keys", "values"):
        if isinstance(getattr(layer, name, None), mx.array):
            setattr(layer, name, 0 * getattr(layer, name) + 7)
    if isinstance(layer, ArraysCache):
        layer.cache = [None if a is None else 0 * a + 7 for a in layer.cache]


def _has_drafts_in_flight(group: Group) -> bool:
    return any(isinstance(step, Verification) and not step.is_settled for step in group.unread)


@dataclass
class Asked:
    said: list[int]
    job: Job
    result: Result


class Used:
    """An engine without its thread, and what was asked of it."""

    def __init__(self, kind: Kind, drafts: Drafts | None, *, fails: bool = False) -> None:
        """fails: whether steps, chunks and the device fail now and then."""
        self.kind = kind
        self.fails = fails
        self.asked: list[Asked] = []
        self.prompts = kind.prompts()
        self.tier = DictTier(1 << 40) if kind.memory_tokens else None
        model, make_layers = kind.build()
        self.speculation: Speculation | None = None
        if drafts is not None and not kind.is_exact:
            self.speculation = drafts(kind)
        if isinstance(model, MtpModel):
            self.speculation = AsksWhenReady(MtpDrafter(model))
        self.runner = self.make_runner(
            model,
            model_info(model, make_layers),
            make_layers=make_layers,
            max_rows=MAX_ROWS,
            arguments=kind.arguments(model),
            speculator=self.speculation or NO_SPECULATION,
            execution=Execution(trace=TracedSteps(model, n_built=0))
            if kind.is_traced
            else PLAIN_EXECUTION,
        ).watch()
        for drafter in self.drafters:
            if isinstance(drafter, Clairvoyant):
                drafter.read_as = self.runner.read_as
        preparer = NoPreparation() if kind.scorer is None else SparsePrefill(kind.scorer())
        probe = make_layers()
        model(mx.array([[1]]), cache=probe)  # its heads' width decides how it is quantised
        self.layout = Layout.of(probe, kv_bits=kind.kv_bits)
        cost = RowCost(*self.layout.row_cost(probe))
        self.drafts_stay_in_flight = can_be_cut_meanwhile(ready(probe))
        capacity = cost.of(kind.memory_tokens) if kind.memory_tokens else 1 << 40
        settings = CacheSettings(1 << 30, kind.block, CHUNK if kind.is_exact else 0)
        self.cache = self.make_cache(self.layout, settings)
        self.cache.expect_recipes(preparer.recipes)
        if self.tier is not None:
            self.cache.records.estimates = Eager()
            self.cache.add_tier("ssd", self.make_worker(self.tier), namespaces=NAMESPACES)
        budget = Budget(cost, capacity_nbytes=capacity, reserve_tokens=32, grow_tokens=32)
        limits = EngineLimits(MAX_ROWS, 10_000, CHUNK, aligned=kind.is_exact)
        self.loop = Loop(
            EngineParts(self.runner, self.cache, budget, limits, preparer),
            self._publish,
            left_queue=lambda: None,
        )

    def make_runner(self, *args: Any, **options: Any) -> WatchedRunner:
        return WatchedRunner(*args, **options)

    def make_cache(self, layout: Layout, settings: CacheSettings) -> PrefixCache:
        return PrefixCache(layout, settings, fingerprint=b"model", dtype="float32")

    def make_worker(self, tier: Tier) -> Worker:
        return TierWorker(tier)

    @property
    def drafters(self) -> Sequence[Drafter]:
        return self.speculation.drafters if self.speculation else ()

    def _publish(self, batch: Sequence[Delivery]) -> None:
        for request, event in batch:
            self.asked[int(request)].result.hear(event)

    @property
    def running(self) -> list[int]:
        return [i for i, a in enumerate(self.asked) if not a.result.finished.is_set()]

    def ask(
        self,
        said: list[int],
        n_reply: int,
        *,
        boundaries: Sequence[float] = (),
        salt: str = "",
        **options: Any,
    ) -> Result:
        """boundaries: shares of the prompt; those in a picture are left out."""
        prompt = self.prompts.make(said, salt=salt)
        places = sorted(int(share * len(prompt)) for share in boundaries)
        spans = prompt.picture_spans
        outside = [p for p in places if not any(s.start < p < s.end for s in spans)]
        job = Job(
            id=RequestId(str(len(self.asked))),
            prompt=replace(prompt, boundaries=tuple(outside)),
            max_tokens=n_reply,
            sampling=GREEDY,
            **options,
        )
        self.asked.append(Asked(said, job, Result()))
        self.loop.accept(job)
        return self.asked[-1].result

    def cancel(self, i: int) -> None:
        self.loop.cancel(RequestId(str(i)))
        self.asked[i].result.finished.set()  # nothing tells of its end

    def stop(self, i: int, choice: int) -> None:
        self.loop.stop_choice(RequestId(str(i)), choice)

    def clear(self, namespace: str) -> None:
        self.cache.records.clear(Namespace(namespace))

    def squeeze(self) -> None:
        """Another program takes all the memory for a moment."""
        self.cache.set_room(0)

    def force(self, i: int, choice: int, tokens: Sequence[int]) -> None:
        self.loop.force(RequestId(str(i)), choice, ForcedTokens(0, tuple(tokens)))

    def wait(self) -> None:
        """Until all replies are said, and everything is stored."""
        self._step_until(lambda: not self.running and not self.loop.busy)
        self._step_until(lambda: self.cache.settled)

    def _step_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.loop.step()
            if not self.loop.busy:
                self.cache.tick(EngineLoad.NONE)

    def reader(self) -> Reader:
        """Of the model alone."""
        return self.kind.reader(self.prompts)

    def own_layers(self, layers: list[Any]) -> list[Any]:
        """Those of the reader's layers that the cache has records of."""
        return layers

    def check(self) -> int:
        """Assert that all records, those of a draft model, and all replies are right. Returns how many
        records were compared."""
        kind, reader = self.kind, self.reader()
        n_compared, wrong = wrong_records(
            self.cache,
            self.layout,
            reader.model,
            reader.make_layers,
            rounding=kind.rounding,
            tier=self.tier,
            fresh=reader,
            own=self.own_layers,
        )
        assert not wrong, f"{len(wrong)} of {n_compared} records: {wrong[:5]}"
        faults = set(self.cache.stats.faults)
        expected = {"commit", "close"} if kind.may_refuse else set()
        assert faults <= expected | ({"fill"} if self.runner.n_failed else set()), faults
        assert "internal error" not in self.cache.stats.dropped
        assert "in doubt" not in self.cache.stats.dropped or self.runner.n_failed
        for drafter in self.drafters:
            if isinstance(drafter, ModelDrafter):
                self._check_drafter(drafter)
        errors = [asked.result.error for asked in self.asked if asked.result.error is not None]
        assert all(isinstance(error, StepFailed) for error in errors), errors
        own = [error for error in errors if LOGPROBS_LOST not in str(error)]
        assert len(own) <= self.runner.n_failed, errors
        assert not errors or self.runner.n_failed, errors
        for asked in self.asked:
            self._check_prompt(asked.job)
        if not (kind.kv_bits and kind.rounding):  # such prefixes are not exact
            bad = [why for asked in self.asked for why in self._unlike(asked, reader)]
            assert not bad, f"{len(bad)} replies: {bad[:5]}"
        return n_compared

    def _check_prompt(self, job: Job) -> None:
        """It was read as it was sent, or a part of it was, if that was asked for."""
        read = self.runner.read_as.get(job.id, job.prompt)
        if job.preparation is None or not read.has_gaps:
            assert read is job.prompt
        else:
            kept = read.positions.at(0, len(read))
            assert np.array_equal(read.ids, job.prompt.ids[kept])
            assert (kept[0], kept[-1]) == (0, len(job.prompt) - 1)

    def _unlike(self, asked: Asked, reader: Reader) -> list[str]:
        read = self.runner.read_as.get(asked.job.id, asked.job.prompt)
        return unlike(replace(asked.job, prompt=read), asked.result, reader)

    def _check_drafter(self, drafter: ModelDrafter) -> None:
        cache: Any = drafter._cache
        layout = Layout.of(drafter._make_layers())
        reader = Reader(drafter._model, drafter._make_layers, IDS_ONLY, self.prompts)
        n_compared, wrong = wrong_records(
            cache,
            layout,
            reader.model,
            reader.make_layers,
            rounding=self.kind.rounding,
            fresh=reader,
        )
        assert not wrong, f"{len(wrong)} of {n_compared} of a draft model: {wrong[:5]}"
        assert not cache.stats.faults or self.kind.may_refuse, cache.stats.faults
        assert n_compared or self.kind.sees  # it reads no prompts with pictures

    def close(self) -> None:
        self.cache.close()
        self.runner.speculator.end()

    def __enter__(self) -> Used:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def unlike(job: Job, result: Result, reader: Reader) -> list[str]:
    """The replies that the model alone would not give after the same tokens."""
    wrong, n_prompt = [], len(job.prompt)
    for choice, reply in result.tokens.items():
        layers = reader.past(job.prompt, n_prompt - 1)
        last = n_prompt - 1 + len(reply)
        logits = reader.read(job.prompt.grown(reply), n_prompt - 1, last, layers)
        if job.grammar is not None:
            logits = mx.where(mx.array(_permitted(job.grammar, reply)), logits, -mx.inf)
        best = mx.sort(logits, axis=-1)
        margins = (best[:, -1] - best[:, -2]).tolist()
        said = mx.argmax(logits, axis=-1).tolist()
        forced = result.forced.get(choice, set())
        for i, (got, token) in enumerate(zip(reply, said, strict=True)):
            if got != token and i not in forced and margins[i] > TIE:
                wrong.append(f"token {i} after {n_prompt}, {result.n_cached} of them cached")
                break
    return wrong


def _permitted(grammar: CompiledGrammar, reply: Sequence[int]) -> np.ndarray:
    """(tokens, vocabulary): what each token of the reply could have been."""
    constraint = grammar.start()
    table = np.zeros((len(reply), VOCAB_SIZE), dtype=bool)
    for row, token in zip(table, reply, strict=True):
        row[[t for t in allowed(constraint) if t < VOCAB_SIZE]] = True
        constraint.take([token])
    return table


@dataclass
class User:
    """Does something at random between two steps."""

    used: Used
    rng: random.Random

    n_faults: int = 0

    def act(self) -> None:
        running, rng = self.used.running, self.rng
        if self.used.fails and rng.random() < 0.03 and not self.used.runner.fails:
            self._fail()
        choice = rng.random()
        if choice < (0.4, 0.2, 0.1, 0.06, 0.04)[min(len(running), 4)]:
            self._ask()
        elif 0.4 < choice < 0.43 and running:
            self.used.cancel(rng.choice(running))
        elif 0.43 < choice < 0.46 and running:
            self.used.stop(rng.choice(running), rng.randrange(2))
        elif 0.46 < choice < 0.54 and running:
            i = rng.choice(running)
            if self.used.asked[i].job.grammar is None:
                tokens = self.used.kind.tokens(rng, rng.randint(1, 12))
                self.used.force(i, rng.randrange(2), tokens)
        elif 0.54 < choice < 0.543:
            self.used.clear(rng.choice(NAMESPACES))
        elif 0.543 < choice < 0.546:
            self.used.squeeze()

    def _fail(self) -> None:
        """Let a call fail: of a device only twice, since a third time ends the process."""
        self.n_faults += 1
        where = self.rng.choice(FAILING) if self.n_faults not in (3, 6) else "confirm"
        of_device = where == "confirm" or self.rng.random() < 0.5
        error = RuntimeError(INJECTED) if of_device else ValueError(INJECTED)
        self.used.runner.fails[where] = error

    def _ask(self) -> None:
        rng, options = self.rng, dict[str, Any]()
        prompt, reply = self._prompt()
        how = rng.random()
        if how < 0.1 and self.used.kind.takes_grammars:
            options |= {"grammar": compiled("regex", GRAMMAR), "eos": tokenizer().eos}
        elif how < 0.3:
            options["eos"] = frozenset(self.used.kind.tokens(rng, 6))
        if rng.random() < 0.2:
            wrong = {rng.randrange(len(reply)): 17 for _ in range(3)} if reply else {}
            options["prediction"] = tuple(wrong.get(i, t) for i, t in enumerate(reply))
        options["n"] = rng.choice((1, 1, 1, 1, 2))
        options["speculates"] = rng.random() < 0.95
        options["boundaries"] = [rng.random() for _ in range(rng.randrange(4))]
        if self.used.kind.scorer is not None and rng.random() < 0.4:
            options["preparation"] = Sparse(rng.choice((0.2, 0.5)), over=64)
        options |= self._seldom()
        self.used.ask(prompt, rng.choice((0, 1, 3, 40, 200, 200, 200)), **options)

    def _seldom(self) -> dict[str, Any]:
        """One of what few requests ask for, or nothing."""
        seldom: list[dict[str, Any]] = [
            {"namespace": NAMESPACES[1]},
            {"salt": "a user's"},
            {"cache": CacheControl(write=False)},
            {"cache": CacheControl(read=False)},
            {"prompt_logprobs": True, "top_logprobs": 1},
        ]
        return self.rng.choice(seldom) if self.rng.random() < 0.25 else {}

    def _prompt(self) -> tuple[list[int], list[int]]:
        """New, or something that was said: again, continued, cut off or edited. And the reply to it,
        where that was said."""
        rng, kind = self.rng, self.used.kind
        if not self.used.asked or rng.random() < 0.15:
            return kind.said(rng, rng.randint(2, kind.longest // 2)), []
        asked = rng.choice(self.used.asked)
        reply = rng.choice([*asked.result.tokens.values(), []])
        said = [*asked.said, *reply]
        how = rng.random()
        if how < (0.6 if self.used.running else 0.3):
            return list(asked.said), reply  # which joins at once
        if how < 0.7 and len(said) > 4:
            said = said[: rng.randint(2, len(said))]
        elif how < 0.8:
            self._edit(said)
        return [*said, *kind.said(rng, rng.randint(1, 40))][: kind.longest], []

    def _edit(self, said: list[int]) -> None:
        """Another token, or another picture in the place of one."""
        rng = self.rng
        shown = [i for i, unit in enumerate(said) if unit < 0]
        if shown and rng.random() < 0.5:
            said[rng.choice(shown)] = -rng.randint(1, N_PICTURES)
        else:
            said[rng.randrange(len(said))] = 17 + self.used.kind.first_token


def use(kind: Kind, drafts: Drafts | None, seed: int, n_asked: int, *, fails: bool = False) -> Used:
    """Use an engine until so much was asked, and check everything that it said and stored."""
    with Used(kind, drafts, fails=fails) as used:
        use_up(used, seed, n_asked)
    return used


def use_up(used: Used, seed: int, n_asked: int) -> None:
    user = User(used, random.Random(seed))
    while len(used.asked) < n_asked:
        user.act()
        used.loop.step()
    used.runner.fails.clear()
    used.wait()
    used.check()
