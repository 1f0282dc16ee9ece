"""A backend's form of the rule in place of the libraries', and taken out again."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import gated_delta, llama, qwen3_next

from firn.backends.recurrence import forms, replaced
from firn.backends.recurrence.forms import Chunked, ChunkedDelta
from firn.models.patches import Patches
from tests.backends.recurrence.reference import Arguments, Shape

VLM = replaced.HOMES[1]


class Recorded(ChunkedDelta):
    """Remembers how many tokens it was called with."""

    def __init__(self, *, min_work: int = 0) -> None:
        super().__init__(Chunked(16, min_work=min_work), channel_chunk=16)
        object.__setattr__(self, "calls", [])

    def __call__(self, q: mx.array, *more: Any) -> Any:
        self.calls.append(q.shape[1])  # type: ignore[attr-defined]
        return super().__call__(q, *more)


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a process where no backend is installed: another test may have left one."""
    name = replaced.NAMES[0]
    installed = getattr(gated_delta, name)
    monkeypatch.setattr(gated_delta, name, getattr(installed, "_plain", installed))
    made = Patches()
    yield made
    made.undo()


def update(n_tokens: int, **more: Any) -> Any:
    given = Arguments.random(Shape(n_tokens), np.random.default_rng(0)).on_device
    zeros = mx.zeros(4)
    return gated_delta.gated_delta_update(*given[:5], zeros, zeros, given[5], **more)


def test_models_compute_by_the_backend_s_form_until_it_is_taken_out(patches: Patches) -> None:
    plain, (want, _) = gated_delta.gated_delta_ops, update(20)
    rule = Recorded()
    replaced.replace(patches, rule)
    replaced.replace(patches, rule)  # another model is loaded
    got, _ = update(20)
    assert rule.calls == [20]  # type: ignore[attr-defined]
    assert float(mx.abs(got - want).max()) < 1e-5
    patches.undo()
    assert gated_delta.gated_delta_ops is plain


def test_short_calls_are_left_to_the_library(patches: Patches) -> None:
    shape = Shape(1)
    rule = Recorded(min_work=5 * shape.n_heads * shape.width * shape.n_values)
    replaced.replace(patches, rule)
    for n_tokens in (1, 4, 5, 6):
        update(n_tokens)
    assert rule.calls == [5, 6]  # type: ignore[attr-defined]


def test_states_of_each_token_are_left_to_the_library(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-vlm's form can return them, for drafts that are taken back."""
    asked: list[Any] = []
    module = ModuleType(VLM)
    module.gated_delta_ops = lambda *a, **named: asked.append((len(a), named))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, VLM, module)
    rule = Recorded()
    replaced.replace(patches, rule)
    given = Arguments.random(Shape(8), np.random.default_rng(0)).on_device
    module.gated_delta_ops(*given, None, 3)  # type: ignore[attr-defined]
    module.gated_delta_ops(*given, state_steps=3)  # type: ignore[attr-defined]
    assert asked == [(8, {}), (7, {"state_steps": 3})]
    module.gated_delta_ops(*given, None, None)  # type: ignore[attr-defined]
    assert rule.calls == [8]  # type: ignore[attr-defined]


def test_a_large_product_makes_chunks_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(forms, "gated_delta", lambda *_, chunk, **__: sizes.append(chunk))
    rule = ChunkedDelta(Chunked(32, max_product=1 << 18), channel_chunk=16)
    for width in (32, 64, 128, 192, 256, 1024):
        q, g = mx.zeros((1, 1, 1, width)), mx.zeros((1, 1, 1))
        rule(q, q, q, g, g)
        rule(q, q, q, mx.zeros((1, 1, 1, width)), g)
    assert sizes == [32, 16, 32, 16, 16, 16, 4, 4, 4, 4, 1, 1]


def test_it_is_known_which_models_use_it() -> None:
    assert replaced.is_used_by(_of(qwen3_next.Qwen3NextGatedDeltaNet))
    assert not replaced.is_used_by(_of(llama.MLP))


def _of(kind: type[nn.Module]) -> Any:
    layer = kind.__new__(kind)
    return SimpleNamespace(modules=lambda: [nn.Module(), layer])
