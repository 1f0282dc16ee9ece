"""Selective scans, beside the models that they are computed for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import jamba, mamba

from firn.backends.recurrence import replacements, scans
from firn.models.load.selfcheck import distance
from firn.models.patches import Patches
from tests.cache.tiny import tiny

CLOSE = 1e-3
"""In standard deviations of the logits."""


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def _is_replaced(method: Any) -> bool:
    return hasattr(method, replacements.MARK)


def logits(model: Any, layers: list[Any], n_tokens: int) -> mx.array:
    ids = mx.array([[(7 * i) % 50 + 1 for i in range(n_tokens)]])
    return model(ids, cache=layers)[0]


@pytest.mark.parametrize(
    ("name", "in_use"),
    [
        ("jamba", lambda: _is_replaced(jamba.JambaMambaMixer.ssm_step)),
        ("mamba", lambda: _is_replaced(mamba.MambaBlock._process_sequence)),
        ("mamba-falcon", lambda: _is_replaced(mamba.MambaBlock._process_sequence)),
    ],
)
def test_models_say_the_same(
    name: str, in_use: Callable[[], bool], patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of several spans, a token after it, and a few more."""
    monkeypatch.setattr(scans, "SPAN", 8)
    model, make_layers = tiny(name)()
    plain, layers = make_layers(), make_layers()
    want = [logits(model, plain, n) for n in (21, 1, 3)]
    mx.eval(want)
    for _ in range(2):
        replacements.install(patches, scans.selective_scans(scans.selective))
    assert in_use()
    for n, before in zip((21, 1, 3), want, strict=True):
        got = logits(model, layers, n)
        assert distance(before[-1], got[-1]) < CLOSE
        assert distance(before[0], got[0]) < CLOSE


def test_a_scan_without_a_state_begins_with_the_first_token() -> None:
    decays, news = mx.random.uniform(shape=(1, 5, 3)), mx.random.normal((1, 5, 3))
    zeros = mx.zeros((1, 3))
    assert mx.array_equal(scans.scan(decays, news, None), scans.scan(decays, news, zeros))
