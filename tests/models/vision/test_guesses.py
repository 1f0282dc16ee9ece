"""Several tokens a step on vision models: even after pictures, the text stays the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from firn.backends import named
from firn.models.decode.ragged import ALL_COLUMNS
from firn.models.decode.raggedcheck import ragged_fault, rewind_fault
from firn.models.load import loader
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.mtp import MtpModel, PredictionHead, with_head_layer
from firn.models.speculation.mtp_load import has_head, read_head
from tests.harness import running
from tests.models.speculation.drafters.test_model import AsksWhenReady
from tests.models.speculation.drafters.test_mtp import as_published
from tests.models.speculation.drafting import AnyWidth, KnownReplies
from tests.models.vision import gallery
from tests.models.vision.test_mixed_batches import KINDS, chats
from tests.zoo import weights


@pytest.mark.parametrize("name", KINDS)
def test_text_after_pictures_is_that_of_one_token_a_step(name: str) -> None:
    rng = random.Random(4)
    wanted = [(c, rng.randint(10, 24)) for c in chats(rng, 5)]
    prompts = [gallery.prompt_of(name, *c) for c, _ in wanted]
    expected = [gallery.reference(name, chat, n) for chat, n in wanted]
    known = {
        (tuple(prompt.ids.tolist()), 0): tokens
        for prompt, (_, tokens, _) in zip(prompts, expected, strict=True)
    }
    speculation = AnyWidth(KnownReplies(known, right=0.8, vocab_size=200))
    model, make_layers = gallery.build(name)()
    assert rewind_fault(model, make_layers) is None
    speculation.in_groups = ragged_fault(model, make_layers) is None
    with running(
        gallery.build(name), chunk=16, block=16, max_rows=3, speculation=lambda: speculation
    ) as h:
        results = [h.submit(p, n) for p, (_, n) in zip(prompts, wanted, strict=True)]
        for result, (_, tokens, margins) in zip(results, expected, strict=True):
            result.wait()
            assert gallery.agree(result.reply, tokens, margins)
        assert not h.cache.stats.faults
    assert speculation.totals.n_accepted > 20 or not speculation.in_groups


@pytest.mark.parametrize(
    ("name", "takes_blocks"), [("qwen3_5", False), ("qwen3_vl", True), ("gemma4", True)]
)
def test_steps_see_blocks_of_columns_where_the_model_can(name: str, takes_blocks: bool) -> None:
    """mlx-vlm's Qwen 3.5 cuts a mask to its tokens, but not the keys."""
    profile = named("cuda").step_profile(*gallery.build(name)())
    assert (profile.columns == ALL_COLUMNS) is not takes_blocks


def test_text_stays_the_same_with_a_prediction_head_of_the_text_part(tmp_path: Path) -> None:
    """The head is read from the weight files and drafts after pictures."""
    name, rng = "qwen3_5", random.Random(5)
    config = json.loads((gallery.folder(name) / "config.json").read_text())
    blind = loader.load(gallery.folder(name), served_name="tiny").model
    layer = next(x for x in blind.model.layers[::-1] if hasattr(x, "self_attn"))
    size = int(blind.model.embed_tokens.weight.shape[-1])
    head = PredictionHead(layer, hidden_size=size, eps=1e-5)
    weights.fill(head, seed=1, dtype=mx.float32, gains={})
    published = as_published(head, "qwen3_5", config=config)
    mx.save_safetensors(str(tmp_path / "model-00002.safetensors"), published)
    assert has_head(tmp_path, config)
    made: list[MtpModel] = []

    def make() -> tuple[MtpModel, Callable[[], list[Any]]]:
        model, make_layers = gallery.build(name)()
        made.append(MtpModel(model, read_head(tmp_path, config)))
        return made[0], with_head_layer(make_layers)

    speculation: list[AsksWhenReady] = []

    def speculate() -> AsksWhenReady:
        speculation.append(AsksWhenReady(MtpDrafter(made[0])))
        return speculation[0]

    wanted = [(c, rng.randint(10, 24)) for c in chats(rng, 5)]
    prompts = [gallery.prompt_of(name, *c) for c, _ in wanted]
    expected = [gallery.reference(name, chat, n) for chat, n in wanted]
    with running(make, chunk=16, block=16, max_rows=3, speculation=speculate) as h:
        for _ in range(2):
            results = [h.submit(p, n) for p, (_, n) in zip(prompts, wanted, strict=True)]
            for result, (_, tokens, margins) in zip(results, expected, strict=True):
                result.wait()
                assert gallery.agree(result.reply, tokens, margins)
        assert all(r.n_cached for r, p in zip(results, prompts, strict=True) if len(p) > 32)
        assert not h.cache.stats.faults
    assert speculation[0].totals.n_drafted > 40
