"""Dispatching a step's first layers while the others are built."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.models.decode.early_dispatch import dispatch, dispatched_early


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    evaluate = mx.async_eval

    def async_eval(*arrays: Any) -> None:
        seen.append(arrays)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", async_eval)
    return seen


def run(layers: list[Any]) -> list[Any]:
    """As a model would: every attention layer adds two tokens."""
    new = mx.ones((1, 2, 2, 4))
    return [c.update_and_fetch(new, 2 * new) for c in layers if isinstance(c, KVCache)]


@pytest.mark.parametrize(("n_layers", "n_dispatched"), [(0, 0), (1, 7), (3, 2), (7, 1), (8, 0)])
def test_every_few_layers_are_dispatched(
    n_layers: int, n_dispatched: int, dispatched: list[Any]
) -> None:
    layers = [KVCache() for _ in range(7)]
    with dispatched_early(layers, n_layers=n_layers):
        got = run(layers)
    assert len(dispatched) == n_dispatched
    want = run([KVCache() for _ in range(7)])
    assert all(
        mx.array_equal(a, b)
        for x, y in zip(got, want, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert [c.offset for c in layers] == [2] * 7


def test_afterwards_the_caches_are_as_before_even_if_the_model_fails(dispatched: list[Any]) -> None:
    layers: list[Any] = [KVCache(), ArraysCache(2), KVCache()]
    with pytest.raises(ZeroDivisionError), dispatched_early(layers, n_layers=1):
        1 / len(run(layers)[2:])
    assert len(dispatched) == 2, "recurrent layers have nothing to dispatch"
    assert not any("update_and_fetch" in vars(c) for c in layers)
    run(layers)
    assert len(dispatched) == 2


@pytest.mark.parametrize(
    ("n_layers", "ends"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (3, [2, 5]), (7, [])]
)
def test_a_step_that_is_built_is_dispatched_from_its_first_layers_on(
    n_layers: int, ends: list[int], dispatched: list[Any]
) -> None:
    layers = [KVCache() for _ in range(7)]
    logits = sum((keys.sum() for keys, _ in run(layers)), mx.array(0.0))
    dispatch(logits, layers, n_layers=n_layers)
    assert [arrays[0] is layers[i].keys for i, arrays in zip(ends, dispatched, strict=False)] == [
        True
    ] * len(ends)
    assert len(dispatched) == len(ends) + 1, "the last layer is dispatched with the logits"
    assert dispatched[-1][0] is logits
