"""--sparse-prefill: of long prompts, only the part that matters is read."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from firn.api.services import Services
from firn.assembly import speculation
from firn.assembly.extras import Decoder, Extra
from firn.assembly.model import ServerSpec
from firn.config import Config
from firn.core.errors import SetupError
from firn.engine import Engine
from firn.sparse.rules import SparseRules

log = logging.getLogger("firn")

NOT_EXACT = "--sparse-prefill is approximate: it cannot be used where reuse is exact"
HAS_PICTURES = "its positions also encode pictures (--text-only serves it without them)"


class SparseReading(Extra):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = config.sparse
        self.needs_draft_model = options.sparse_prefill
        keep, over = round(options.sparse_prefill_keep, 2), options.sparse_prefill_over
        self.rules = SparseRules(options.sparse_prefill, keep, over=over)

    def check(self) -> None:
        if self.rules.over and not self.rules.allowed:
            raise SetupError("--sparse-prefill-over needs --sparse-prefill")
        if self.rules.allowed and self.config.engine.draft_model is None:
            raise SetupError(
                "--sparse-prefill needs --draft-model: a small model that scores prompts"
            )
        if self.rules.allowed and self.config.cache.reuse == "exact":
            raise SetupError(NOT_EXACT)

    def change(self, decoder: Decoder) -> Decoder:
        """The model with its arguments by position, the drafting with the draft model's memory, and the
        engine's preparer. The draft model is loaded only once, whether it drafts, scores or both."""
        if not self.rules.allowed:
            return decoder
        if decoder.setup.exact:  # required by this model's layers
            raise SetupError(NOT_EXACT)
        from firn.sparse.attention import AttentionScorer
        from firn.sparse.placing import ArgumentsByPosition, why_not_sparse
        from firn.sparse.prefill import SparsePrefill

        loaded, patches = decoder.loaded, decoder.setup.backend.patches
        info, small = loaded.info, self.config.engine.draft_model
        pictures = HAS_PICTURES if info.vision else None
        why = pictures or why_not_sparse(loaded.model, loaded.make_layers, patches)
        if why:
            raise SetupError(f"--sparse-prefill: {info.name} cannot skip tokens: {why}")
        drafting = decoder.drafting
        draft = drafting.draft
        if draft is None:
            draft = speculation.open_draft(self.config, decoder.setup)
            nbytes = drafting.weights_nbytes + draft.model.info.weights_nbytes
            drafting = replace(
                drafting, weights_nbytes=nbytes, row_cost=draft.row_cost, draft=draft
            )
        try:
            scorer = AttentionScorer(
                draft.model.model,
                draft.model.info,
                make_layers=draft.model.make_layers,
                cache=draft.cache,
                owns_cache=not draft.is_drafter,
                prepare=decoder.prepare,
                buckets=decoder.setup.backend.buckets(draft.model),
                patches=patches,
            )
        except ValueError as e:
            raise SetupError(f"--draft-model {small} cannot score prompts: {e}") from e
        log.info("long prompts of %s may be read sparsely, as scored by %s", info.name, small)
        return replace(
            decoder,
            loaded=replace(loaded, arguments=ArgumentsByPosition(patches)),
            drafting=drafting,
            preparer=SparsePrefill(scorer),
        )

    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        return replace(services, preparations=self.rules)


EXTRA = SparseReading
