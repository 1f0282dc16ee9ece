"""A backend's form of the gated delta rule in place of mlx-lm's and mlx-vlm's, for this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import gated_delta as mlx_lm_delta

from firn.models.patches import Patches

HOMES = (mlx_lm_delta.__name__, "mlx_vlm.models.gated_delta", "mlx_vlm.models.qwen3_5.gated_delta")
"""Modules with a form of their own. The layers of a model look it up there at each call."""
NAMES = ("gated_delta_ops", "gated_delta_chunked")
USED_AS = "gated_delta_update"
"""What a model's module imports to compute such layers."""


class DeltaRule(Protocol):
    """One form of the rule. The arguments are those of `delta.gated_delta`."""

    @property
    def identity(self) -> str:
        """What the bits of a result depend on."""

    def suits(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        """Whether to compute this call; otherwise it is left to the library."""

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]: ...


def replace(patches: Patches, rule: DeltaRule) -> None:
    """In every module of HOMES that is imported now. Calling it again replaces it in later ones."""
    for module in filter(None, map(sys.modules.get, HOMES)):
        for name in NAMES:
            plain = getattr(module, name, None)
            if plain is not None and not isinstance(plain, _Replaced):
                patches.replace(module, name, _Replaced(plain, rule))


def is_used_by(model: Any) -> bool:
    """Whether layers of this model compute the rule."""
    homes = {type(part).__module__ for part in model.modules()}
    return any(hasattr(sys.modules.get(home), USED_AS) for home in homes)


def _nothing() -> None:
    pass


class Recurrences:
    """A backend's forms of recurrent layers, in place of the libraries'. Owner: the backend."""

    def __init__(
        self, patches: Patches, rule: DeltaRule, replace_others: Callable[[], None] = _nothing
    ) -> None:
        """replace_others: replaces what is not the delta rule, except in exact mode."""
        self._patches = patches
        self.rule = rule
        self._replace_others = replace_others
        self.is_exact = self._is_installed = self._computes_delta = False

    @property
    def identity(self) -> str:
        """What the bits of a loaded model's layers depend on."""
        return self.rule.identity if self._computes_delta else ""

    def install(self, *, exact: bool) -> None:
        self.is_exact, self._is_installed = exact, True
        self._replace()

    def loaded(self, model: Any) -> None:
        """Replaced once more: a library's modules are imported with the first model that needs them."""
        if self._is_installed:
            self._replace()
        self._computes_delta |= is_used_by(model)

    def _replace(self) -> None:
        replace(self._patches, self.rule)
        if not self.is_exact:
            self._replace_others()


class _Replaced:
    """Called as the function that it replaces."""

    def __init__(self, plain: Callable[..., Any], rule: DeltaRule) -> None:
        self._plain = plain
        self._rule = rule

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        wants_states = any(a is not None for a in (*more, *named.values()))
        if wants_states or not self._rule.suits(q, v, g):
            return self._plain(q, k, v, g, beta, state, mask, *more, **named)
        return self._rule(q, k, v, g, beta, state, mask)
