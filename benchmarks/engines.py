"""firn's real engine in this process, on a model built in memory: no server, no download.

The only place in the benchmarks that knows how firn is assembled; app.py does that for a server.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from report import BenchError

from firn import backends
from firn.assembly.handles import any_rows
from firn.backends.contract import BackendOptions, Weights, execution_of
from firn.cache.arrays.transfers import use
from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers._folder import Disk
from firn.cache.tiers.ssd import SsdTier
from firn.config import WeightsDtype, default_cache_dir
from firn.core.events import Admitted, Advanced, JobDone, JobFailed, Token
from firn.core.memory_plan import BUFFER_CACHE_SHARE
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
from firn.engine.sequence import ForcedTokens
from firn.models.decode.batch import why_not_batchable
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.runner import Runner
from firn.models.decode.steps import NO_SPECULATION
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import IDS_ONLY
from firn.models.speculation.mtp import MtpModel, PredictionHead, with_head_layer
from firn.models.speculation.speculator import Speculation
from firn.sparse.placing import ArgumentsByPosition
from firn.sparse.prefill import SparsePrefill
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scorer
from models import SHAPES, random_model

MAX_ROWS = 32
EVERYONE = Namespace("")
ANSWER_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 120.0
N_TRIES = 20


@dataclass(eq=False)
class Answer:
    """The outcome of one request. Filled on the engine thread; read after `wait`."""

    asked: float
    times: list[float] = field(default_factory=list)
    """When each token arrived."""
    tokens: list[int] = field(default_factory=list)
    n_skipped: int = 0
    scored_s: float = 0.0
    """Seconds until it was known which tokens are skipped."""
    n_cached: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    why: str = ""
    error: str = ""
    _done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: object, now: float) -> None:
        if isinstance(event, Admitted | Advanced):
            admission = event.admission if isinstance(event, Advanced) else event
            self.n_cached, self.tiers, self.why = (
                admission.n_cached,
                dict(admission.tiers),
                admission.why,
            )
            if admission.n_skipped and not self.n_skipped:
                self.n_skipped, self.scored_s = admission.n_skipped, now - self.asked
        elif isinstance(event, Token):
            self.times.append(now)
            self.tokens.append(event.id)
        elif isinstance(event, JobDone | JobFailed):
            self.error = str(event.error) if isinstance(event, JobFailed) else ""
            self._done.set()

    def wait(self) -> Answer:
        if not self._done.wait(ANSWER_TIMEOUT_S):
            raise BenchError(f"the engine gave no answer in {ANSWER_TIMEOUT_S:.0f} s")
        if self.error:
            raise BenchError(f"the engine failed: {self.error}")
        return self

    @property
    def first_s(self) -> float:
        return self.times[0] - self.asked


MakeLayers = Callable[[], list[Any]]


def widened(dtype: WeightsDtype) -> Weights:
    """How the machine's backend widens weights; nothing is installed."""
    weights = backends.find().weights
    weights.dtype = dtype
    return weights


class BenchEngine:
    """An engine with a prefix cache, and an SSD tier if a folder is given. Owner: its creator."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        dtype: mx.Dtype,
        memory_nbytes: int,
        ssd: Path | None = None,
        ssd_limit_nbytes: int = 64 << 30,
        disk: Disk | None = None,
        memo: Path | None = None,
        model: Any = None,
        speculation: Callable[[Any, MakeLayers], Speculation] | None = None,
        has_head: bool = False,
        scorer: Callable[[], Scorer[Any]] | None = None,
        chunk: int = 0,
        by_depth: bool = False,
        uses_all_hits: bool = False,
        pads: bool = True,
    ) -> None:
        """disk: the SSD's system calls. memo: where estimates outlive the engine. model: an
        existing one; the weights of a large one take time and memory. speculation: makes what
        drafts tokens, from the model and the function that makes its caches. has_head: the model
        has a prediction head. scorer: makes what scores long prompts. chunk: of prefill; 0 for the
        device's. by_depth: the chunk grows while nobody waits, as in a server. uses_all_hits: also
        those that a server on a GPU would not use. pads: prompts, where the device wants few shapes."""
        self.config = config
        self._answers: dict[RequestId, Answer] = {}
        self._ids = itertools.count()
        self._worker: TierWorker | None = None
        self._tier: SsdTier | None = None
        self.weights: Any = None

        def parts() -> EngineParts:
            backend = backends.find()
            profile = backend.profile
            mx.set_cache_limit(int(backend.memory.total_nbytes * BUFFER_CACHE_SHARE))
            backend.install(BackendOptions(cache_folder=default_cache_dir()))
            use(backend.transfers)
            self.weights = model or random_model(config, dtype=dtype)
            made: Any = self.weights
            make_layers: MakeLayers = partial(make_prompt_cache, made)
            if has_head:
                made = _with_head(made, config, dtype=dtype)
                make_layers = with_head_layer(make_layers)
            probe = make_layers()
            logits = made(mx.array([[0]]), cache=probe)
            mx.eval(logits)
            info = model_info(made, config, probe=probe, n_vocab=int(logits.shape[-1]))
            layout = Layout.of(probe)
            layout.prepare(probe)
            weighs_hits = profile.weighs_hits and not uses_all_hits
            cache = PrefixCache(
                layout,
                CacheSettings(memory_nbytes, weighs_hits=weighs_hits),
                fingerprint=info.fingerprint,
                dtype=info.dtype,
            )
            if ssd is not None:
                options = TierOptions(str(ssd), ssd_limit_nbytes)
                self._tier = SsdTier(options, disk=disk) if disk else SsdTier(options)
                wake = lambda: self.engine.wake()  # noqa: E731
                self._worker = TierWorker(self._tier, wake=wake)
                if memo is not None:
                    cache.keep_estimates(memo)
                cache.add_tier("ssd", self._worker, namespaces=[EVERYONE])
            capacity = backend.memory.total_nbytes - info.weights_nbytes
            budget = Budget(RowCost(*layout.row_cost(probe)), capacity_nbytes=capacity)
            arguments = ArgumentsByPosition(backend.patches) if scorer else IDS_ONLY
            loaded = LoadedModel(made, info, make_layers, probe, arguments)
            execution = execution_of(backend, loaded, exact=False, is_shared=False)
            if not pads:
                execution = replace(execution, buckets=ShapeBuckets())
            common = execution.buckets.common_chunk
            runner = Runner(
                made,
                info,
                make_layers=make_layers,
                max_rows=MAX_ROWS,
                arguments=arguments,
                speculator=speculation(made, make_layers) if speculation else NO_SPECULATION,
                execution=execution,
            )
            largest = profile.largest_chunk if by_depth else 0
            usual = chunk or profile.prefill_chunk
            limits = EngineLimits(MAX_ROWS, 1000, usual, largest_chunk=largest, common_chunk=common)
            preparer = SparsePrefill(scorer()) if scorer else NoPreparation()
            return EngineParts(any_rows(runner), cache, budget, limits, preparer)

        self.engine = Engine(parts, self._publish)
        self.model = self.engine.start()

    def ask(
        self,
        ids: Sequence[int],
        n_tokens: int,
        *,
        read: bool = True,
        write: bool = True,
        speculates: bool = True,
        sparse: Sparse | None = None,
        essential: tuple[tuple[int, int], ...] = (),
        eos: frozenset[int] = frozenset(),
    ) -> Answer:
        """Submits a prompt. The engine fills the answer."""
        request = RequestId(str(next(self._ids)))
        job = Job(
            id=request,
            prompt=Prompt(np.array(ids, dtype=np.int64), essential=essential),
            max_tokens=n_tokens,
            eos=eos,
            preparation=sparse,
            sampling=Sampling(temperature=0.0),
            namespace=EVERYONE,
            cache=CacheControl(read=read, write=write),
            speculates=speculates,
        )
        answer = self._answers[request] = Answer(time.perf_counter())
        self.engine.submit(job)
        return answer

    def ask_forced(
        self,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Sequence[int]],
        *,
        speculates: bool,
    ) -> list[Answer]:
        """Submits all prompts together. Replies are forced, but the model computes as usual."""
        asked = []
        for ids, reply in zip(prompts, replies, strict=True):
            request = RequestId(str(next(self._ids)))
            job = Job(
                id=request,
                prompt=Prompt(np.array(ids, dtype=np.int64)),
                max_tokens=len(reply),
                sampling=Sampling(temperature=0.0),
                namespace=EVERYONE,
                speculates=speculates,
            )
            self._answers[request] = Answer(time.perf_counter())
            asked.append((job, ForcedTokens(0, tuple(reply))))

        def submit(_: EngineParts) -> None:
            for job, forced in asked:
                self.engine.submit(job)
                self.engine.force(job.id, 0, forced.tokens, at=forced.at)

        self.engine.call(submit).result()
        return [self._answers[job.id] for job, _ in asked]

    def call(self, function: Callable[[PrefixCache], Any]) -> Any:
        """Calls a function with the cache on the engine thread."""
        return self.engine.call(lambda parts: function(parts.cache)).result()  # type: ignore[arg-type]

    def settle(self) -> None:
        """Waits until everything that was committed is written."""
        if self._worker is None:
            return
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.call(lambda cache: cache.settled) and not self._worker.write_nbytes:
                self.call(lambda cache: None)  # a tick between the two calls has taken the results
                return
            time.sleep(0.02)
        raise BenchError(f"the cache was not written in {SETTLE_TIMEOUT_S:.0f} s")

    def forget_memory(self) -> None:
        """Drops all records from memory, so that they are only on the SSD."""

        def shrink(cache: PrefixCache) -> None:
            room = cache.records.memory.limit_nbytes
            cache.set_room(0)
            cache.set_room(room)

        for _ in range(N_TRIES):  # an abandoned load may still arrive between the two calls
            self.call(shrink)
            self.settle()  # records that were not written yet are written as they leave
            left = self.call(lambda cache: cache.records.memory.nbytes)
            if not left:
                return
            time.sleep(0.1)
        raise BenchError(f"{left:,} bytes would not leave memory")

    @property
    def nbytes_written(self) -> int:
        return self._tier.usage().counts.get("bytes_written", 0) if self._tier else 0

    def close(self) -> None:
        self.engine.stop(timeout_s=60.0)

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _publish(self, batch: Sequence[Delivery]) -> None:
        now = time.perf_counter()
        for request, event in batch:
            self._answers[request].on_event(event, now)


def shape_of(name: str) -> tuple[dict[str, Any], mx.Dtype]:
    """One of `models.SHAPES`."""
    config, dtype = SHAPES[name]
    return config, getattr(mx, dtype)


def _with_head(model: Any, config: dict[str, Any], *, dtype: mx.Dtype) -> MtpModel:
    """The model with a prediction head of random weights, whose layer is like the model's own."""
    layer = random_model({**config, "num_hidden_layers": 1}, dtype=dtype).model.layers[0]
    head = PredictionHead(layer, hidden_size=config["hidden_size"], eps=config["rms_norm_eps"])
    head.set_dtype(dtype)
    mx.eval(head.parameters())
    return MtpModel(model, head)


def model_info(model: Any, config: dict[str, Any], *, probe: list[Any], n_vocab: int) -> ModelInfo:
    weights = [w for _, w in tree_flatten(model.parameters())]
    why_not = why_not_batchable(probe)
    return ModelInfo(
        name="benchmark",
        path="",
        architecture=str(config["model_type"]),
        fingerprint=b"benchmark",
        context_length=1 << 20,
        vocab_size=n_vocab,
        dtype=str(weights[0].dtype).removeprefix("mlx.core."),
        weights_nbytes=sum(w.nbytes for w in weights),
        layer_kinds=tuple(type(layer).__name__ for layer in probe),
        batchable=why_not is None,
        unbatchable_why=why_not,
    )
