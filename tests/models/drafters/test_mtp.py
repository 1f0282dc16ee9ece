"""Prediction heads on tiny random models: the text is the same, and a head that agrees is believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from firn.models.drafters.mtp import MtpDrafter
from firn.models.mtp import Head, MtpModel, with_head_layer
from firn.models.mtp_load import FAMILIES, has_head, read_head
from tests.harness import GREEDY, running
from tests.models.alone import Built, plain
from tests.models.drafters.test_model import Asking, assert_all_equal
from tests.models.test_speculation import SAMPLINGS, story, tell
from tests.zoo import ZOO, build, weights

NAMES = ("qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_5")


def random_head(model: Any, name: str, *, seed: int = 1) -> Head:
    """With a layer such as the model's own attention layers are."""
    inner = build(name, seed=seed).model
    layer = next(x for x in inner.layers[::-1] if hasattr(x, "self_attn"))
    size = int(inner.embed_tokens.weight.shape[-1])
    head = Head(layer, hidden_size=size, eps=1e-5)
    weights.fill(head, seed=seed, dtype=mx.float32, gains={})
    return head


class Agreeing(Head):
    """Knows what the model would say: its layers are the model itself, over the text so far."""

    def __init__(self, model: Any, size: int) -> None:
        super().__init__(nn.Identity(), hidden_size=size, eps=1e-5)
        self._model = [model]


def built(name: str, *, seed: int = 1) -> tuple[Callable[[], Built], list[MtpModel]]:
    made: list[MtpModel] = []

    def make() -> Built:
        base = build(name)
        model = MtpModel(base, random_head(base, name, seed=seed))
        made.append(model)
        return model, with_head_layer(lambda: list(make_prompt_cache(base)))

    return make, made


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_the_same_whatever_the_head_says(name: str) -> None:
    requests = story(5, samplings=[GREEDY, SAMPLINGS["penalised"]])
    with running(plain(name), chunk=32, max_rows=4) as harness:
        want = tell(harness, requests)
    make, made = built(name)
    speculation: list[Asking] = []

    def speculate() -> Asking:
        speculation.append(Asking(MtpDrafter(made[0])))
        return speculation[0]

    with running(make, chunk=32, max_rows=4, speculation=speculate) as harness:
        assert_all_equal(tell(harness, requests), want)
        again = tell(harness, requests)
        assert_all_equal(again, want)
        assert all(r.n_cached for r, (p, *_) in zip(again, requests, strict=True) if len(p) > 40)
    assert speculation[0].totals.n_drafted > 50
