"""Runs the real engine on a model built in the test: jobs in, tokens out, synchronously."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from firn.backends.cuda.traced import TracedSteps
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.planning.estimates import Estimates
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import Tier
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.errors import FirnError
from firn.core.events import (
    Admitted,
    Advanced,
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    PromptLogprobs,
    Token,
    TokenLogprob,
)
from firn.core.ports import Delivery
from firn.core.values import (
    CacheControl,
    Job,
    ModelInfo,
    Namespace,
    Prompt,
    RequestId,
    Sampling,
)
from firn.engine import EngineLimits, EngineParts, NoPreparation
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine
from firn.models.decode.batch import why_not_batchable
from firn.models.decode.execution import PLAIN_EXECUTION, Execution
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.runner import Runner
from firn.models.decode.steps import NO_SPECULATION
from firn.models.patches import Patches
from firn.models.speculation.mtp import MtpModel
from firn.models.speculation.speculator import Speculation
from firn.sparse.attention import AttentionScorer
from firn.sparse.placing import ArgumentsByPosition
from firn.sparse.prefill import SparsePrefill
from firn.sparse.rules import Sparse

GREEDY = Sampling(temperature=0.0)
T = TypeVar("T")


@dataclass
class Result:
    n_cached: int = 0
    n_skipped: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    """Cached tokens by the tier they came from."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    margins: dict[int, list[float]] = field(default_factory=dict)
    """Logprob of the best token minus that of the second one, if two were asked for."""
    scores: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of the prompt's tokens except the first, if they were asked for."""
    reasons: dict[int, str] = field(default_factory=dict)
    forced: dict[int, set[int]] = field(default_factory=dict)
    """Which tokens of each reply were forced."""
    error: FirnError | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    """What to do once the reply has so many tokens, before the engine's next step."""

    def hear(self, event: EngineEvent) -> None:
        if isinstance(event, Admitted):
            self.n_cached = event.n_cached
            self.tiers = dict(event.tiers)
        elif isinstance(event, Advanced):
            self.n_skipped = event.admission.n_skipped
        elif isinstance(event, Token):
            reply = self.tokens.setdefault(event.choice, [])
            if event.forced:
                self.forced.setdefault(event.choice, set()).add(len(reply))
            reply.append(event.id)
            if event.logprob:
                self.logprobs.setdefault(event.choice, []).append(event.logprob.logprob)
                top = [p for _, p in event.logprob.top]
                self.margins.setdefault(event.choice, []).append(
                    top[0] - top[1] if len(top) > 1 else 0.0
                )
        elif isinstance(event, PromptLogprobs):
            assert event.start == len(self.scores) + 1
            self.scores.extend(event.logprobs)
        elif isinstance(event, ChoiceDone):
            self.reasons[event.choice] = event.reason
        elif isinstance(event, JobFailed | JobDone):
            self.error = event.error if isinstance(event, JobFailed) else None
            self.finished.set()

    def wait(self) -> Result:
        assert self.finished.wait(60), "the engine did not finish a job"
        return self

    @property
    def reply(self) -> list[int]:
        return self.tokens.get(0, [])


def model_info(model: Any, make_layers: Callable[[], list[Any]], name: str = "tiny") -> ModelInfo:
    logits = model(mx.array([[1]]), cache=make_layers())
    layers = make_layers()
    why = why_not_batchable(layers)
    return ModelInfo(
        name=name,
        path="",
        architecture=name,
        fingerprint=name.encode(),
        context_length=1 << 20,
        vocab_size=logits.shape[-1],
        dtype="float32",
        weights_nbytes=0,
        layer_kinds=tuple(type(x).__name__ for x in layers),
        batchable=why is None,
        unbatchable_why=why,
    )


def scorer_of(
    draft: Callable[[], tuple[Any, Callable[[], list[Any]]]], *, buckets: ShapeBuckets | None = None
) -> AttentionScorer:
    """A scorer with its own prefix cache."""
    model, make_layers = draft()
    info = model_info(model, make_layers, "draft")
    cache = PrefixCache(
        Layout.of(make_layers()), CacheSettings(1 << 28, 32), fingerprint=b"draft", dtype="float32"
    )
    return AttentionScorer(model, info, make_layers=make_layers, cache=cache, buckets=buckets)


class Eager(Estimates):
    """Estimates that make every load worth waiting for: tiny models would rather compute."""

    @property
    def knows_prefill(self) -> bool:
        return True

    def load_s(self, tier: str, nbytes: int) -> float:
        return 20.0

    def prefill_s(self, start: int, end: int) -> float:
        return 1e6 * (end - start)

    def chunk_s(self, start: int) -> float:
        return 1e6


class Harness:
    """An engine on one model, with a table of results filled by its publish calls."""

    def __init__(
        self,
        build: Callable[[], tuple[Any, Callable[[], list[Any]]]],
        *,
        chunk: int = 64,
        block: int = 32,
        exact: bool = False,
        cache_nbytes: int | None = 1 << 30,
        max_rows: int = 32,
        capacity_nbytes: int = 1 << 40,
        fingerprint: bytes = b"model",
        kv_bits: int = 0,
        tier: Tier | None = None,
        namespaces: Sequence[str] = ("",),
        clock: Clock = SYSTEM_CLOCK,
        speculation: Callable[[], Speculation] | None = None,
        draft: Callable[[], tuple[Any, Callable[[], list[Any]]]] | None = None,
        recipes: Sequence[str] = (),
        traced: Callable[[Any, Callable[[], list[Any]]], TracedSteps] | None = None,
    ) -> None:
        """tier: the tier below memory, in which records of these `namespaces` are looked for.

        draft: a model that scores prompts. recipes: the recipes of thinned prompts whose records
        are looked for. traced: makes the TracedSteps for a model and its caches.
        """
        self.results: dict[RequestId, Result] = {}
        self._ids = itertools.count()

        def parts() -> EngineParts:
            model, make_layers = build()
            info = model_info(model, make_layers)
            bare = model.base if isinstance(model, MtpModel) else model
            is_vision = hasattr(bare, "chunk")
            arguments = bare if is_vision else ArgumentsByPosition(Patches())
            runner = Runner(
                model,
                info,
                make_layers=make_layers,
                max_rows=max_rows,
                arguments=arguments,
                speculator=speculation() if speculation else NO_SPECULATION,
                execution=Execution(trace=traced(model, make_layers))
                if traced
                else PLAIN_EXECUTION,
            )
            cache: Any = CacheOff()
            if cache_nbytes is not None:
                settings = CacheSettings(cache_nbytes, block, chunk if exact else 0)
                layers = make_layers()
                if kv_bits:  # the heads' width decides how they are quantised
                    model(mx.array([[1]]), cache=layers)
                layout = Layout.of(layers, kv_bits=kv_bits)
                cache = PrefixCache(
                    layout, settings, fingerprint=fingerprint, dtype=info.dtype, clock=clock
                )
                if tier is not None:
                    cache.records.estimates = Eager()
                    wake = lambda: self.engine.wake()  # noqa: E731
                    self.worker = TierWorker(tier, wake=wake, clock=clock)
                    known = [Namespace(n) for n in namespaces]
                    cache.expect_recipes(recipes)
                    cache.add_tier("ssd", self.worker, namespaces=known)
            budget = Budget(RowCost(1, 1), capacity_nbytes=capacity_nbytes)
            limits = EngineLimits(max_rows, 10_000, chunk, aligned=exact)
            preparer = SparsePrefill(scorer_of(draft)) if draft else NoPreparation()
            return EngineParts(runner, cache, budget, limits, preparer)

        self.engine = Engine(parts, self._publish)
        self.engine.start()

    @property
    def cache(self) -> PrefixCache:
        return self.engine._parts.cache  # type: ignore[return-value]

    @property
    def runner(self) -> Runner:
        return self.engine._parts.runner  # type: ignore[return-value]

    def _publish(self, batch: Sequence[Delivery]) -> None:
        for request, event in batch:
            result = self.results[request]
            result.hear(event)
            for n in [n for n in result.waiting if len(result.reply) >= n]:
                result.waiting.pop(n)()

    def submit(
        self,
        ids: Sequence[int] | Prompt,
        n_reply: int = 8,
        *,
        sampling: Sampling = GREEDY,
        n: int = 1,
        boundaries: Sequence[int] = (),
        namespace: str = "",
        control: CacheControl = CacheControl(),
        eos: frozenset[int] = frozenset(),
        grammar: Any = None,
        scored: bool = False,
        prediction: Sequence[int] = (),
        speculates: bool = True,
        sparse: Sparse | None = None,
    ) -> Result:
        request = RequestId(str(next(self._ids)))
        result = self.results[request] = Result()
        prompt = ids
        if not isinstance(prompt, Prompt):
            prompt = Prompt(np.array(ids, dtype=np.int64), boundaries=tuple(boundaries))
        self.engine.submit(
            Job(
                id=request,
                prompt=prompt,
                max_tokens=n_reply,
                sampling=sampling,
                n=n,
                eos=eos,
                top_logprobs=2,
                namespace=Namespace(namespace),
                cache=control,
                grammar=grammar,
                prompt_logprobs=scored,
                prediction=tuple(prediction),
                speculates=speculates,
                preparation=sparse,
            )
        )
        return result

    def ask(self, ids: Sequence[int] | Prompt, n_reply: int = 8, **options: Any) -> Result:
        result = self.submit(ids, n_reply, **options).wait()
        if result.error:
            raise result.error
        return result

    def between_steps(self, function: Callable[[], T]) -> T:
        return self.engine.call(lambda _: function()).result(60)

    def close(self) -> None:
        self.engine.stop()


@contextmanager
def running(build: Callable[[], Any], **options: Any) -> Iterator[Harness]:
    harness = Harness(build, **options)
    try:
        yield harness
    finally:
        harness.close()
