"""How the processes that compute one model together agree with each other.

`OneProcess` is a server that computes its model alone. The other implementation is rank 0 of several
(`firn.ranks`), which the core never names: it is handed to `app.serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from firn.backends.contract import Weights
from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.orders import Worker
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.core.values import ModelInfo
from firn.models.decode.runner import Runner

Shard = Callable[[Any], None]
"""Reduces a model to this process's slice of it."""


class Sharding(Protocol):
    """In the order in which a server asks. Owner: the engine thread; `watch` and `end` are the main
    thread's."""

    @property
    def n_ranks(self) -> int:
        """How many processes compute the model."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes compute what this one does: nothing may then depend on this machine
        alone."""
        ...

    @property
    def text(self) -> str:
        """A part of the root of every record, so that slices never mix; empty for a whole model."""
        ...

    @property
    def shard(self) -> Shard | None:
        """None: this process has the whole model."""
        ...

    def prepare(
        self, settings: Mapping[str, Any], name: str, *, text_only: bool, weights: Weights
    ) -> None:
        """Agree on how to load the model. settings: its config.json. Raises SetupError."""
        ...

    def begin(self, info: ModelInfo, capacity_nbytes: int, *, has_own_memory: bool) -> int:
        """The model is loaded. Returns the capacity that all have. Raises SetupError."""
        ...

    def make_cache(
        self, layout: Layout, settings: CacheSettings, *, fingerprint: bytes, dtype: str
    ) -> PrefixCache: ...

    def options_of(self, options: TierOptions) -> TierOptions:
        """Where this process keeps its records of a tier."""
        ...

    def worker_over(self, own: TierWorker, cache: PrefixCache) -> Worker: ...

    def make_runner(
        self, model: Any, info: ModelInfo, *, max_padding: int, **parts: Any
    ) -> Runner: ...

    def watch(self, *, lost: Callable[[], object], asked: Callable[[], object]) -> None:
        """There are clients now. lost: called if another process is gone. asked: called if another
        process was told to stop."""
        ...

    def end(self) -> None:
        """The engine has stopped."""
        ...


class OneProcess:
    """Implements Sharding: nobody to agree with."""

    n_ranks = 1
    is_shared = False
    text = ""
    shard = None

    def prepare(
        self, settings: Mapping[str, Any], name: str, *, text_only: bool, weights: Weights
    ) -> None:
        pass

    def begin(self, info: ModelInfo, capacity_nbytes: int, *, has_own_memory: bool) -> int:
        return capacity_nbytes

    def make_cache(
        self, layout: Layout, settings: CacheSettings, *, fingerprint: bytes, dtype: str
    ) -> PrefixCache:
        return PrefixCache(layout, settings, fingerprint=fingerprint, dtype=dtype)

    def options_of(self, options: TierOptions) -> TierOptions:
        return options

    def worker_over(self, own: TierWorker, cache: PrefixCache) -> Worker:
        return own

    def make_runner(self, model: Any, info: ModelInfo, *, max_padding: int, **parts: Any) -> Runner:
        return Runner(model, info, **parts, max_padding=max_padding)

    def watch(self, *, lost: Callable[[], object], asked: Callable[[], object]) -> None:
        pass

    def end(self) -> None:
        pass


ONE_PROCESS = OneProcess()
