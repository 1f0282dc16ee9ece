"""The zoo holds what it promises: each model runs, listens to its context and uses its cache.

A few architectures, one per kind of layer, are tested on every run; `-m sweep` tests all of them,
and that mlx-lm's recorded faults are still there, so that an upgrade that fixes one is noticed.
"""

import copy
import pkgutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from tests import zoo
from tests.zoo import (
    CACHES,
    KNOWN_UPSTREAM,
    UNBUILDABLE,
    VOCAB_SIZE,
    ZOO,
    build,
    build_entry,
    facts,
    probe,
    write_folder,
)

# Rounding, amplified by sharp attention, stays below 6e-5; the smallest fault seen is 0.37.
TOLERANCE = 2e-3
# One early token changed must move the last logits far beyond the tolerance.
CONTEXT = 10 * TOLERANCE

FAST = (
    "llama",  # full attention
    "qwen3_moe",  # experts
    "deepseek_v3",  # latent attention
    "llama-sliding",  # window
    "gemma4_text",  # window, KV shared between layers
    "llama4",  # chunked attention
    "deepseek_v32",  # sparse index: two caches per layer
    "deepseek_v41",  # a cache class of its own
    "qwen3_5",  # gated delta
    "mamba2",  # state space only
    "falcon_h1",  # attention and state space in one layer
    "lfm2",  # short convolution
    "baichuan_m1",  # convolution and window in one layer
)


STATE_SIZES = {
    "mamba2": "state_size",
    "falcon_h1": "mamba_d_state",
    "granitemoehybrid": "mamba_d_state",
    "nemotron_h": "ssm_state_size",
    "plamo2": "mamba_d_state",
    "rwkv7": "head_dim",
    "qwen3_next": "linear_key_head_dim",
}


@pytest.mark.parametrize("name", STATE_SIZES)
def test_states_are_wide_enough_for_metal(name: str) -> None:
    """The kernels divide a state among 32 threads, without a remainder."""
    assert ZOO[name].config[STATE_SIZES[name]] % 32 == 0


def check_layout(name: str, model: nn.Module) -> None:
    expected = CACHES.get(name, f"KVCache*{len(model.layers)}")
    assert probe.layout(make_prompt_cache(model)) == expected


def check_context(model: nn.Module) -> None:
    assert probe.sensitivity(model) > CONTEXT
    first, second = (probe.greedy(model, probe.tokens(40, salt=s), 24) for s in (0, 3))
    assert len(set(first)) >= 8
    assert sum(a != b for a, b in zip(first, second, strict=True)) >= 12


def check_two_chunks_and_decode(model: nn.Module) -> None:
    """[0, 70) one chunk   [70, 112) another   [112, 120) token by token."""
    ids = probe.tokens(120)
    full = probe.run(model, ids, chunk=len(ids))
    assert bool(mx.all(mx.isfinite(full[..., :VOCAB_SIZE])).item())
    cache = make_prompt_cache(model)
    parts = [
        probe.feed(model, ids[:70], cache, chunk=70),
        probe.feed(model, ids[70:112], cache, chunk=42),
        probe.feed(model, ids[112:], cache, chunk=1),
    ]
    assert probe.difference(mx.concatenate(parts, axis=1), full) < TOLERANCE


def check_batch(name: str, model: nn.Module) -> None:
    assert probe.has_batch_methods(model) == (name not in facts.NO_BATCH_METHODS)
    if name in facts.NO_BATCH_METHODS:
        return
    # The second set puts every row beyond the window and beyond the sparse index's budget.
    for lengths in ((110, 28, 45), (160, 75, 90)):
        stages = probe.batch_stages(model, lengths)
        wrong = [s for s in stages if s.error or s.difference > TOLERANCE]
        assert bool(wrong) == (name in facts.WRONG_IN_BATCHES), wrong


def check_state_round_trip(model: nn.Module) -> None:
    """A cache rebuilt from `state` alone continues as the original does."""
    ids = probe.tokens(100)
    cache = make_prompt_cache(model)
    probe.feed(model, ids[:70], cache, chunk=70)
    probe.feed(model, ids[70:73], cache, chunk=1)
    rebuilt = [type(c).from_state(c.state) for c in copy.deepcopy(cache)]
    want = probe.feed(model, ids[73:], cache, chunk=27)
    assert probe.difference(probe.feed(model, ids[73:], rebuilt, chunk=27), want) == 0.0


def check_load(name: str, path: Path) -> None:
    write_folder(name, path)
    loaded, tokenizer = mlx_lm.load(str(path))
    ids = probe.tokens(60)
    want = probe.run(build(name), ids, chunk=60)
    assert probe.difference(probe.run(loaded, ids, chunk=60), want) < TOLERANCE
    assert len(tokenizer.get_vocab()) == VOCAB_SIZE


def test_every_model_module_is_covered() -> None:
    found = {m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)} - facts.HELPERS
    built = {entry.module for entry in ZOO.values()}
    assert built | set(UNBUILDABLE) == found
    assert not built & set(UNBUILDABLE)


def test_facts_name_entries_of_the_zoo() -> None:
    named = (
        set(CACHES)
        | set(KNOWN_UPSTREAM)
        | facts.WRONG_IN_CHUNKS
        | facts.WRONG_IN_BATCHES
        | facts.NO_BATCH_METHODS
        | facts.NO_STATE_ROUND_TRIP
        | facts.UNLOADABLE
    )
    assert named <= set(ZOO)
    assert set(facts.ATTEMPTS) == set(UNBUILDABLE)


def test_weights_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen2", "mamba2"):  # both have biases, which mlx.nn draws from a global state
        drawn = []
        for state in (1, 2):
            monkeypatch.setattr(zoo, "_drawn", {})  # without the weights that were drawn before
            mx.random.seed(state)
            drawn.append(dict(tree_flatten(build(name).parameters())))
        one, two = drawn
        copied = dict(tree_flatten(build(name).parameters()))
        other = dict(tree_flatten(build(name, seed=1).parameters()))
        assert all(mx.array_equal(one[k], two[k]) for k in one)
        assert all(mx.array_equal(one[k], copied[k]) for k in one)
        assert not any(mx.array_equal(one[k], other[k]) for k in one)


def test_building_leaves_the_config_alone() -> None:
    before = copy.deepcopy(ZOO["qwen3_5"].config)
    build("qwen3_5")
    assert ZOO["qwen3_5"].config == before


def test_parameters_take_the_dtype() -> None:
    model = build("llama", dtype=mx.bfloat16)
    assert {v.dtype for _, v in tree_flatten(model.parameters())} == {mx.bfloat16}
    assert not model.training


@pytest.mark.parametrize("name", FAST)
def test_model(name: str) -> None:
    model = build(name)
    check_layout(name, model)
    check_two_chunks_and_decode(model)
    check_context(model)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_folder_loads(name: str, tmp_path: Path) -> None:
    check_load(name, tmp_path)


def test_tokenizer_renders_chat_and_round_trips(tmp_path: Path) -> None:
    write_folder("llama", tmp_path)
    _, tokenizer = mlx_lm.load(str(tmp_path))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Où est la névé? 雪"}], add_generation_prompt=True
    )
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nOù est la névé? 雪<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(ZOO))
def test_sweep_single(name: str) -> None:
    model = build(name)
    check_layout(name, model)
    check_context(model)
    ids = probe.tokens(160)
    full = probe.run(model, ids, chunk=160)
    assert bool(mx.all(mx.isfinite(full[..., :VOCAB_SIZE])).item())
    worst = max(probe.difference(probe.run(model, ids, chunk=c), full) for c in (1, 16, 50, 64))
    assert (worst > TOLERANCE) == (name in facts.WRONG_IN_CHUNKS), worst


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(ZOO))
def test_sweep_batch(name: str) -> None:
    check_batch(name, build(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(ZOO) - facts.NO_STATE_ROUND_TRIP))
def test_sweep_state_round_trip(name: str) -> None:
    check_state_round_trip(build(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(ZOO) - facts.UNLOADABLE))
def test_sweep_folder_loads(name: str, tmp_path: Path) -> None:
    check_load(name, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(ZOO))
def test_sweep_bfloat16(name: str) -> None:
    model = build(name, dtype=mx.bfloat16)
    # MLX multiplies by gathered experts on the CPU in float32 only.
    experts = any(isinstance(module, SwitchLinear) for _, module in model.named_modules())
    if experts and mx.default_device() == mx.Device(mx.cpu):
        with pytest.raises(RuntimeError, match="only supports float32"):
            probe.run(model, probe.tokens(64), chunk=40)
        return
    logits = probe.run(model, probe.tokens(64), chunk=40)
    assert bool(mx.all(mx.isfinite(logits[..., :VOCAB_SIZE])).item())


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(facts.UNLOADABLE))
def test_sweep_unloadable_weights_still_load(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    with pytest.raises(Exception, match="layer_types"):
        mlx_lm.load(str(tmp_path))
    model, _ = load_model(tmp_path)
    ids = probe.tokens(60)
    want = probe.run(build(name), ids, chunk=60)
    assert probe.difference(probe.run(model, ids, chunk=60), want) < TOLERANCE


@pytest.mark.sweep
@pytest.mark.skipif(mx.metal.is_available(), reason="these fail for want of Metal")
@pytest.mark.parametrize("name", ["bitnet", "muse_spark"])
def test_sweep_needs_metal(name: str) -> None:
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(build_entry(facts.ATTEMPTS[name])(mx.array([[1, 2, 3]])))


@pytest.mark.sweep
def test_sweep_olmo_ends_the_process() -> None:
    with pytest.raises(SystemExit):
        build_entry(facts.ATTEMPTS["olmo"])
