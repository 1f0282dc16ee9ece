"""What a server needs to read prompts sparsely, if it may."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from firn.assembly import speculation
from firn.assembly.speculation import Drafting, DraftSetup
from firn.config import Config
from firn.core.errors import SetupError
from firn.engine import NoPreparation, Preparer
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.load import loader
from firn.models.model_arguments import PreparePass
from firn.models.patches import Patches
from firn.sparse.attention import AttentionScorer
from firn.sparse.placing import ArgumentsByPosition, why_not_sparse
from firn.sparse.prefill import SparsePrefill
from firn.sparse.rules import SparseRules

log = logging.getLogger("firn")

NOT_EXACT = "--sparse-prefill is approximate: it cannot be used where reuse is exact"


def check_settings(config: Config) -> None:
    """What can be checked before a model is loaded. Raises SetupError."""
    options = config.sparse
    if options.sparse_prefill_over and not options.sparse_prefill:
        raise SetupError("--sparse-prefill-over needs --sparse-prefill")
    if options.sparse_prefill and config.engine.draft_model is None:
        raise SetupError("--sparse-prefill needs --draft-model: a small model that scores prompts")
    if options.sparse_prefill and config.cache.reuse == "exact":
        raise SetupError(NOT_EXACT)


def rules(config: Config) -> SparseRules:
    """What requests may ask for, and which prompts are thinned anyway."""
    options = config.sparse
    keep = round(options.sparse_prefill_keep, 2)
    return SparseRules(options.sparse_prefill, keep, over=options.sparse_prefill_over)


def build(
    config: Config,
    loaded: loader.LoadedModel,
    drafting: Drafting,
    *,
    setup: DraftSetup,
    prepare: PreparePass,
    buckets_of: Callable[[loader.LoadedModel], ShapeBuckets],
) -> tuple[loader.LoadedModel, Drafting, Preparer]:
    """The model with its arguments by position if prompts may be thinned, the drafting with the draft
    model's memory added, and the engine's preparer.

    That model is loaded only once, whether it drafts, scores or both. On the engine thread. Raises
    SetupError.
    """
    small = config.engine.draft_model
    if not rules(config).allowed:
        return loaded, drafting, NoPreparation()
    if setup.exact:  # required by this model's layers
        raise SetupError(NOT_EXACT)
    why = _why_not(loaded, setup.backend.patches)
    if why:
        raise SetupError(f"--sparse-prefill: {loaded.info.name} cannot skip tokens: {why}")
    draft = drafting.draft
    if draft is None:
        draft = speculation.open_draft(config, setup)
        nbytes = drafting.weights_nbytes + draft.model.info.weights_nbytes
        drafting = replace(drafting, weights_nbytes=nbytes, row_cost=draft.row_cost, draft=draft)
    try:
        scorer = AttentionScorer(
            draft.model.model,
            draft.model.info,
            make_layers=draft.model.make_layers,
            cache=draft.cache,
            owns_cache=not draft.is_drafter,
            prepare=prepare,
            buckets=buckets_of(draft.model),
            patches=setup.backend.patches,
        )
    except ValueError as e:
        raise SetupError(f"--draft-model {small} cannot score prompts: {e}") from e
    log.info("long prompts of %s may be read sparsely, as scored by %s", loaded.info.name, small)
    return (
        replace(loaded, arguments=ArgumentsByPosition(setup.backend.patches)),
        drafting,
        SparsePrefill(scorer),
    )


def _why_not(loaded: loader.LoadedModel, patches: Patches) -> str | None:
    if loaded.info.vision:
        return "its positions also encode pictures (--text-only serves it without them)"
    return why_not_sparse(loaded.model, loaded.make_layers, patches)
