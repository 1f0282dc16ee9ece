"""A server's drafters, and the draft model that they may share with others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from firn.assembly import model_names
from firn.backends.contract import ComputeBackend
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.config import Config
from firn.core.errors import SetupError, UnknownCacheLayer
from firn.core.units import MIB
from firn.core.values import ModelInfo
from firn.engine import RowCost
from firn.models.decode.raggedcheck import ragged_fault, rewind_fault
from firn.models.decode.steps import NO_SPECULATION, Speculator
from firn.models.faults import first_line
from firn.models.load import loader
from firn.models.load.hub import HubRules
from firn.models.speculation import mtp_load
from firn.models.speculation.drafters import Drafter, discover
from firn.models.speculation.drafters.model import ModelDrafter
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.mtp import MtpModel, PredictionHead, with_head_layer
from firn.models.speculation.speculator import Speculation

log = logging.getLogger("firn")

DRAFT_CACHE_DIVISOR = 8
"""The draft model's prefixes get at most this fraction (1 / N) of the memory for the model's."""
DRAFT_QUEUE_NBYTES = 64 * MIB
"""For the draft model's records waiting to be written, which are small."""

HEAD_FAULTS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError)
"""Raised by a head that cannot be read or run. It may be in any file, since mlx-lm ignores it."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model, which has the model's tokens, and its prefix cache."""

    model: loader.LoadedModel
    cache: PrefixCache | CacheOff
    row_cost: RowCost
    cache_nbytes: int = 0
    """Limit for its prefixes, including those waiting to be written."""
    is_drafter: bool = False
    """Whether a drafter uses it and closes its cache."""

    def fit(self, cache_nbytes: int) -> None:
        """Keep its prefixes within this limit, including those waiting to be written."""
        self.cache.set_room(max(cache_nbytes - DRAFT_QUEUE_NBYTES, 0))


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """How a draft model is loaded and cached: like the model that it serves."""

    exact: bool
    backend: ComputeBackend
    cache_nbytes: int
    """Memory for the prefixes of the model that it serves."""
    add_tiers: Callable[[PrefixCache, ModelInfo], None]
    """Adds the tiers below memory to a cache."""
    folder: Path | None = None
    """The draft model's, as found by `find_draft`."""
    is_needed: bool = False
    """Whether the draft model is used even if it cannot draft."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafters, and the device memory that they use."""

    speculator: Speculator = NO_SPECULATION
    weights_nbytes: int = 0
    row_cost: RowCost = RowCost(0, 0)
    draft: DraftModel | None = None
    """The draft model, if one is loaded."""

    def with_rows(self, cost: RowCost) -> RowCost:
        """The cost of a row, including its counterpart in the draft model."""
        own = self.row_cost
        return replace(
            cost,
            per_token_nbytes=cost.per_token_nbytes + own.per_token_nbytes,
            fixed_nbytes=cost.fixed_nbytes + own.fixed_nbytes,
        )


def check_settings(config: Config, *, is_needed: bool) -> None:
    """What can be checked before a model is loaded. is_needed: the draft model is used even if it does
    not draft. Raises SetupError."""
    option, small = config.engine.speculation, config.engine.draft_model
    if small and option not in ("auto", "model") and not is_needed:
        raise SetupError(f"--draft-model is not used with --speculation {option}")
    if option == "model" and not small:
        raise SetupError("--speculation model needs --draft-model")


def with_head(
    config: Config, loaded: loader.LoadedModel, *, exact: bool, backend: ComputeBackend
) -> loader.LoadedModel:
    """The model with its prediction head, if it has one that should draft. Raises SetupError."""
    option = config.engine.speculation
    if exact or option not in ("auto", "mtp") or config.engine.draft_model:
        return loaded
    folder, name = Path(loaded.info.path), loaded.info.name
    settings = loader.read_config(folder)
    try:
        if mtp_load.has_head(folder, settings):
            return _add_head(loaded, mtp_load.read_head(folder, settings), backend=backend)
    except HEAD_FAULTS as e:
        if option == "mtp":
            raise SetupError(f"--speculation mtp: {first_line(e)}") from e
        log.warning("the prediction head of %s cannot draft tokens: %s", name, first_line(e))
        return loaded
    if option == "mtp":
        raise SetupError(f"--speculation mtp: {name} has no prediction head that firn knows")
    return loaded


def _add_head(
    loaded: loader.LoadedModel, head: PredictionHead, *, backend: ComputeBackend
) -> loader.LoadedModel:
    info = loaded.info
    backend.weights.widen_as(head, like=loaded.model)
    model, make_layers = MtpModel(loaded.model, head), with_head_layer(loaded.make_layers)
    probe = mtp_load.probe(model, make_layers)
    log.info("the prediction head of %s drafts tokens", info.name)
    return replace(
        loaded,
        model=model,
        make_layers=make_layers,
        probe=probe,
        info=replace(info, weights_nbytes=info.weights_nbytes + mtp_load.nbytes_of(head)),
    )


def find_draft(config: Config, folder: Path, *, exact: bool, is_needed: bool) -> Path | None:
    """The folder of --draft-model, which must have the tokens of the model in `folder`; None if it
    would not be used. is_needed: it is used even if it does not draft.

    Called before the model is loaded, which may take minutes, so that a fault is reported early.
    May download. Raises SetupError.
    """
    options, small = config.model, config.engine.draft_model
    drafts = config.engine.speculation in ("auto", "model")
    if small is None or exact or not (drafts or is_needed):
        return None
    rules = HubRules(options.offline, options.download_timeout, options.download_retries)
    place, trust = model_names.resolve(small, rules), options.trust_remote_code
    theirs = loader.load_tokenizer(place, trust_remote_code=trust)
    ours = loader.load_tokenizer(folder, trust_remote_code=trust)
    for token in range(min(ours.n_ids, theirs.n_ids)):
        if ours.token_bytes(token) != theirs.token_bytes(token):
            raise SetupError(
                f"--draft-model {small} has a different tokenizer: token {token} differs"
            )
    return place


def build(config: Config, loaded: loader.LoadedModel, setup: DraftSetup) -> Drafting:
    """On the engine thread. Raises SetupError."""
    option, small = config.engine.speculation, config.engine.draft_model
    if option == "off":
        return Drafting()
    if setup.exact:  # a step of several tokens does not yield the same bits as several steps
        log.warning("no tokens are drafted (--speculation): reuse is exact")
        return Drafting()
    why = rewind_fault(loaded.model, loaded.make_layers)
    if why:
        log.warning("no tokens are drafted for %s (--speculation): %s", loaded.info.name, why)
        return Drafting()
    why = ragged_fault(loaded.model, loaded.make_layers) if loaded.info.batchable else None
    if why:
        log.warning("%s drafts tokens for single requests only: %s", loaded.info.name, why)
    profile = setup.backend.step_profile(loaded.model, loaded.make_layers)
    alone = discover()
    name = "lookup" if option == "auto" else option
    drafters: list[Drafter] = [alone[name]()] if name in alone else []
    if isinstance(loaded.model, MtpModel):
        drafters.append(MtpDrafter(loaded.model))
    if small is None or option not in ("auto", "model"):
        return Drafting(Speculation(*drafters, in_groups=why is None, profile=profile))
    draft = open_draft(config, setup)
    try:
        drafters.append(_drafter(draft.model, draft.cache, small, setup.backend))
        draft = replace(draft, is_drafter=True)
        log.info("%s drafts tokens for %s", small, loaded.info.name)
    except SetupError as e:
        if not setup.is_needed:
            raise
        log.warning("%s", e)
    speculator: Speculator = NO_SPECULATION
    if drafters:
        speculator = Speculation(*drafters, in_groups=why is None, profile=profile)
    return Drafting(speculator, draft.model.info.weights_nbytes, draft.row_cost, draft)


def open_draft(config: Config, setup: DraftSetup) -> DraftModel:
    """Load --draft-model. Raises SetupError."""
    small, trust = config.engine.draft_model, config.model.trust_remote_code
    assert small is not None
    assert setup.folder is not None
    draft = loader.load(
        setup.folder, served_name=small, trust_remote_code=trust, form=setup.backend.weights
    )
    return _with_cache(draft, setup)


def _with_cache(draft: loader.LoadedModel, setup: DraftSetup) -> DraftModel:
    try:
        layout = Layout.of(draft.probe)
    except UnknownCacheLayer as e:
        log.warning("%s recomputes every prompt: %s", draft.info.name, e)
        return DraftModel(draft, CacheOff(str(e)), RowCost(0, 0))
    cost, nbytes = RowCost(*layout.row_cost(draft.probe)), setup.cache_nbytes // DRAFT_CACHE_DIVISOR
    if not nbytes:
        return DraftModel(draft, CacheOff(), cost)
    info = draft.info
    cache = PrefixCache(
        layout, CacheSettings(limit_nbytes=nbytes), fingerprint=info.fingerprint, dtype=info.dtype
    )
    setup.add_tiers(cache, info)
    return DraftModel(draft, cache, cost, nbytes + DRAFT_QUEUE_NBYTES)


def _drafter(
    draft: loader.LoadedModel, cache: PrefixCache | CacheOff, name: str, backend: ComputeBackend
) -> ModelDrafter:
    info = draft.info
    try:
        return ModelDrafter(
            draft.model,
            draft.make_layers,
            cache=cache,
            batchable=info.batchable and ragged_fault(draft.model, draft.make_layers) is None,
            n_ids=info.n_ids,
            profile=backend.step_profile(draft.model, draft.make_layers),
        )
    except ValueError as e:
        raise SetupError(f"--draft-model {name} cannot draft tokens: {e}") from e
