"""Prediction heads on tiny random models: the text is the same, and right drafts are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from firn.models.decode.batch import Group
from firn.models.load import loader
from firn.models.speculation.drafters import Draft
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.mtp import MtpModel, PredictionHead, with_head_layer
from firn.models.speculation.mtp_load import FAMILIES, has_head, read_head
from firn.models.speculation.speculator import DraftPlan
from tests.harness import GREEDY, running
from tests.models.alone import Built, plain, prompt_of
from tests.models.speculation.drafters.test_model import AsksWhenReady, assert_all_equal
from tests.models.speculation.drafting import Tireless
from tests.models.speculation.test_speculation import SAMPLINGS, story, tell
from tests.zoo import ZOO, build, weights
from tests.zoo.folder import write

NAMES = ("qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_5")


def random_head(model: Any, name: str, *, seed: int = 1) -> PredictionHead:
    """A random head with a layer like the model's own attention layers."""
    inner = build(name, seed=seed).model
    layer = next(x for x in inner.layers[::-1] if hasattr(x, "self_attn"))
    size = int(inner.embed_tokens.weight.shape[-1])
    head = PredictionHead(layer, hidden_size=size, eps=1e-5)
    weights.fill(head, seed=seed, dtype=mx.float32, gains={})
    return head


def without_mixing(model: Any) -> None:
    """Make its output depend on the last token alone: its layers add nothing to the embedding."""
    ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    names = [n for n, _ in tree_flatten(model.parameters()) if n.endswith(ends)]
    flat = dict(tree_flatten(model.parameters()))
    model.load_weights([(n, mx.zeros_like(flat[n])) for n in names], strict=False)


def agreeing_head(model: Any, name: str) -> PredictionHead:
    """A head that predicts the same next token as the model."""
    head = random_head(model, name)
    without_mixing(head)
    size = head.norm.weight.shape[0]
    head.join.weight = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    head.embed_norm.weight = mx.ones(size)
    head.norm.weight = model.model.norm.weight
    return head


def built(name: str, *, agrees: bool = False) -> tuple[Callable[[], Built], list[MtpModel]]:
    made: list[MtpModel] = []

    def make() -> Built:
        base = build(name)
        if agrees:
            without_mixing(base)
        head = agreeing_head(base, name) if agrees else random_head(base, name)
        model = MtpModel(base, head)
        made.append(model)
        return model, with_head_layer(lambda: list(make_prompt_cache(base)))

    return make, made


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_the_same_whatever_the_head_says(name: str) -> None:
    requests = story(5, samplings=[GREEDY, SAMPLINGS["penalised"]], n_requests=4, longest=24)
    with running(plain(name), chunk=32, max_rows=4) as harness:
        want = tell(harness, requests)
    make, made = built(name)
    speculation: list[AsksWhenReady] = []

    def speculate() -> AsksWhenReady:
        speculation.append(AsksWhenReady(MtpDrafter(made[0])))
        return speculation[0]

    with running(make, chunk=32, max_rows=4, speculation=speculate) as harness:
        assert_all_equal(tell(harness, requests), want)
        again = tell(harness, requests)
        assert_all_equal(again, want)
        assert all(r.n_cached for r, (p, *_) in zip(again, requests, strict=True) if len(p) > 40)
    assert speculation[0].totals.n_drafted > 50


@pytest.mark.parametrize("name", NAMES)
def test_all_drafts_of_a_head_that_agrees_are_accepted(name: str) -> None:
    make, made = built(name, agrees=True)
    speculation: list[AsksWhenReady] = []

    def speculate() -> AsksWhenReady:
        speculation.append(AsksWhenReady(MtpDrafter(made[0])))
        return speculation[0]

    requests = story(6, samplings=[GREEDY], n_requests=5, longest=24)
    with running(make, chunk=32, max_rows=3, speculation=speculate) as harness:
        for result in tell(harness, requests):
            assert result.error is None
    totals = speculation[0].totals
    assert totals.n_drafted > 40
    assert totals.n_accepted == totals.n_drafted


class NotesDrafts(Tireless):
    """Asks for four tokens after every step, and records them."""

    def __init__(self, drafter: Any) -> None:
        super().__init__(drafter)
        self.told: list[Draft] = []

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        return DraftPlan(5, tuple(group.rows))

    def _ask(self, best: DraftPlan) -> None:
        super()._ask(best)
        self.told += [self._rows[row].next for row in best.asks]


@pytest.mark.parametrize("name", NAMES)
def test_the_state_that_a_head_continues_from_survives_a_hit(name: str) -> None:
    """After a restored prefix it drafts the same as after a prompt that it has read."""
    rng = random.Random(8)
    prompt = prompt_of(rng, 97)
    make, made = built(name)

    def speculate() -> NotesDrafts:
        return NotesDrafts(MtpDrafter(made[-1]))

    with running(make, chunk=32, block=32, speculation=speculate) as harness:
        cold = harness.ask(prompt, 6)
        assert not cold.n_cached
        told = harness.runner.speculator.told  # type: ignore[union-attr]
        first, told[:] = list(told), []
        warm = harness.ask(prompt, 6)
        assert warm.n_cached
        assert_all_equal([warm], [cold])
        assert told == first


class DraftsEvery(NotesDrafts):
    """Asks for drafts at every `every`th token, and records them by position."""

    def __init__(self, drafter: Any, *, every: int) -> None:
        super().__init__(drafter)
        self._every = every
        self.drafts_at: dict[int, tuple[int, ...]] = {}

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        asks = (group.rows[0].n_tokens + len(group.rows[0].pending)) % self._every == 0
        return super()._plan(group, step_in_flight=step_in_flight) if asks else DraftPlan(1)

    def _ask(self, best: DraftPlan) -> None:
        super()._ask(best)
        for row in best.asks:
            self.drafts_at[row.n_tokens + len(row.pending)] = self._rows[row].next.tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_leaves_nothing_behind_for_the_next(name: str) -> None:
    """What the head drafts after a text does not depend on what it has drafted before."""
    prompt = prompt_of(random.Random(9), 40)
    drafts = []
    for every in (1, 3):
        make, made = built(name)

        def speculate(made: list[MtpModel] = made, every: int = every) -> DraftsEvery:
            return DraftsEvery(MtpDrafter(made[-1]), every=every)

        with running(make, chunk=32, cache_nbytes=None, speculation=speculate) as harness:
            harness.ask(prompt, 24)
            drafts.append(harness.runner.speculator.drafts_at)  # type: ignore[union-attr]
    often, seldom = drafts
    common = often.keys() & seldom.keys()
    assert len(common) >= 4
    for place in common:
        assert often[place] == seldom[place]


# --- reading it from files -----------------------------------------------------------------


def as_published(
    head: PredictionHead, name: str, *, config: dict[str, Any] | None = None
) -> dict[str, mx.array]:
    """The head's tensors as the model's authors name and shape them."""
    config = config or ZOO[name].config
    text = config.get("text_config", config)
    family = FAMILIES[config["model_type"]]
    prefix = family.prefix.format(n=text["num_hidden_layers"])
    ours = {own: theirs for theirs, own in family.parts.items()}
    out: dict[str, mx.array] = {}
    for path, value in tree_flatten(head.parameters()):
        stem, _, kind = path.rpartition(".")
        if family.centred and value.ndim == 1 and "norm" in path:
            value = value - 1.0
        if stem in ours:
            out[f"{prefix}{ours[stem]}.{kind}"] = value
            continue
        path = path.removeprefix("layer.")
        if "switch_mlp" in path and config["model_type"] != "qwen3_5_moe":
            for e in range(value.shape[0]):
                out[f"{prefix}{family.layer}{path.replace('switch_mlp', f'experts.{e}')}"] = value[
                    e
                ]
        else:
            out[f"{prefix}{family.layer}{path}"] = value
    start = f"{prefix}{family.layer}self_attn."
    if f"{start}embed_q.weight" in out:
        keys = out.pop(f"{start}embed_q.weight").swapaxes(-1, -2)
        both = mx.concatenate([keys, out.pop(f"{start}unembed_out.weight")], axis=1)
        out[f"{start}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    if family.centred:
        out["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((8, 1, 4))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_read_from_the_weight_files(name: str, tmp_path: Path) -> None:
    base = build(name)
    head = random_head(base, name)
    config = ZOO[name].config
    assert not has_head(tmp_path, config)
    mx.save_safetensors(str(tmp_path / "model-00001.safetensors"), as_published(head, name))
    assert has_head(tmp_path, config)
    restored = read_head(tmp_path, config)
    want = dict(tree_flatten(head.parameters()))
    got = dict(tree_flatten(restored.parameters()))
    assert set(got) == set(want)
    for path, value in want.items():
        assert mx.allclose(got[path], value, atol=1e-6), path


def as_converted(head: PredictionHead, name: str) -> dict[str, mx.array]:
    """The head's tensors as a converter names them that has MLX's shapes."""
    config = ZOO[name].config
    family = FAMILIES[config["model_type"]]
    n_layers = config.get("text_config", config)["num_hidden_layers"]
    prefix = family.prefix.format(n=n_layers)
    ours = {own: theirs for theirs, own in family.parts.items()}
    out: dict[str, mx.array] = {}
    for path, value in tree_flatten(head.parameters()):
        stem, _, kind = path.rpartition(".")
        inner = f"{family.layer}{path.removeprefix('layer.')}"
        out[f"{prefix}{ours[stem]}.{kind}" if stem in ours else f"{prefix}{inner}"] = value
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_with_a_head_is_loaded(name: str, tmp_path: Path) -> None:
    """mlx-lm's own classes refuse some of them: the head's tensors are not the model's."""
    base = build(name)
    head = random_head(base, name)
    write(base, ZOO[name].config, tmp_path)
    mx.save_safetensors(str(tmp_path / "model-head.safetensors"), as_converted(head, name))
    loaded = loader.load(tmp_path, served_name=name)
    want = dict(tree_flatten(base.parameters()))
    got = dict(tree_flatten(loaded.model.parameters()))
    assert set(got) == set(want)
    assert all(bool(mx.allclose(got[path], want[path])) for path in want)
    restored = dict(tree_flatten(read_head(tmp_path, ZOO[name].config).parameters()))
    for path, value in tree_flatten(head.parameters()):
        assert mx.allclose(restored[path], value), path


def test_each_part_of_a_head_is_quantised_as_its_file_says(tmp_path: Path) -> None:
    """Converters keep some layers at 8 bits where the model has 4, and some not quantised."""
    name = "qwen3_next"
    head = random_head(build(name), name)

    def how(path: str, part: Any) -> dict[str, Any] | bool:
        if not hasattr(part, "to_quantized") or part.weight.shape[-1] % 32 or path == "join":
            return False
        return {"group_size": 32, "bits": 8 if "self_attn" in path else 4}

    nn.quantize(head, class_predicate=how)
    want = dict(tree_flatten(head.parameters()))
    widths = {path: value.dtype for path, value in want.items() if path.endswith("proj.weight")}
    assert mx.uint32 in widths.values()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), as_converted(head, name))
    config = {**ZOO[name].config, "quantization": {"group_size": 64, "bits": 4}}
    restored = read_head(tmp_path, config)
    got = dict(tree_flatten(restored.parameters()))
    assert set(got) == set(want)
    assert all(bool(mx.array_equal(got[path], want[path])) for path in want)

    def stored(head: PredictionHead) -> dict[str, tuple[int, int]]:
        quantised = [(path, part) for path, part in head.named_modules() if "scales" in part]
        return {path: (part.bits, part.group_size) for path, part in quantised}

    assert set(stored(head).values()) == {(4, 32), (8, 32)}
    assert stored(restored) == stored(head)


def test_a_head_with_a_part_missing_is_refused(tmp_path: Path) -> None:
    base = build("glm4_moe")
    tensors = as_published(random_head(base, "glm4_moe"), "glm4_moe")
    del tensors[next(name for name in tensors if "hnorm" in name)]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(ValueError, match="lack hidden_norm"):
        read_head(tmp_path, ZOO["glm4_moe"].config)
