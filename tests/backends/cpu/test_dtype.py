"""Widening weights to float32 loses nothing: the model computes the same, more precisely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from firn.backends.cpu import CpuBackend, CpuWeights, dtype
from firn.backends.cpu.dtype import apply, is_narrow, widen, widened_nbytes
from firn.config import WeightsDtype
from firn.host.machine import SystemMemory
from firn.models.load import loader
from tests.zoo import ZOO, build, folder, probe
from tests.zoo.test_zoo import FAST


def widening(choice: WeightsDtype) -> CpuWeights:
    weights = CpuWeights(CpuBackend().recurrences)
    weights.dtype = choice
    return weights


class Nest(nn.Module):
    """Every kind of quantised layer, in lists and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = [nn.Linear(128, 128), nn.Linear(128, 128, bias=False)]
        self.experts = SwitchLinear(128, 64, 3)
        self.norm = nn.RMSNorm(128)
        self.spread = [mx.ones(4, dtype=mx.bfloat16)]
        self.steps = mx.arange(3)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.embed.as_linear(x)


@pytest.mark.parametrize("narrow", [mx.float16, mx.bfloat16], ids=str)
def test_widening_16_bits_loses_nothing(narrow: mx.Dtype) -> None:
    model = Nest()
    model.set_dtype(narrow)
    before = dict(tree_flatten(model.parameters()))
    assert is_narrow(model)
    widen(model)
    after = dict(tree_flatten(model.parameters()))
    assert not is_narrow(model)
    for name, was in before.items():
        now = after[name]
        assert now.dtype == (was.dtype if was.dtype == mx.int32 else mx.float32), name
        assert mx.array_equal(now.astype(was.dtype), was), name


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 4, 32), ("affine", 8, 64), ("affine", 3, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16)],
)
@pytest.mark.parametrize("narrow", [mx.float32, mx.bfloat16], ids=str)
def test_quantised_weights_are_unpacked(mode: str, bits: int, group: int, narrow: mx.Dtype) -> None:
    mx.random.seed(7)
    model = Nest()
    model.set_dtype(narrow)
    nn.quantize(model, group_size=group, bits=bits, mode=mode)
    ids = mx.array([[1, 5, 63]])
    want = model(ids)
    mx.eval(want)
    expected = widened_nbytes(model)
    widen(model)
    kinds = {type(m).__name__ for _, m in model.named_modules()}
    assert not [kind for kind in kinds if kind.startswith("Quantized")]
    assert {w.dtype for _, w in tree_flatten(model.parameters())} == {mx.float32, mx.int32}
    nbytes = sum(w.nbytes for _, w in tree_flatten(model.parameters())) - model.steps.nbytes
    assert nbytes <= expected <= 1.3 * nbytes  # scales are counted, too
    got = model(ids)
    far = mx.abs(got - want).max() / mx.std(want)
    # MLX looks embeddings up in bfloat16 where the scales are not floats.
    assert far < (0.1 if narrow == mx.bfloat16 or mode != "affine" else 1e-3)


@pytest.mark.parametrize(
    ("choice", "available", "widened"),
    [
        ("auto", 1 << 30, True),
        ("auto", 1 << 10, False),
        ("auto", None, True),
        ("float32", 1 << 10, True),
        ("model", 1 << 30, False),
    ],
)
def test_weights_are_widened_only_if_memory_allows(
    monkeypatch: pytest.MonkeyPatch, choice: Any, available: int | None, widened: bool
) -> None:
    monkeypatch.setattr(dtype, "memory", lambda: SystemMemory(1 << 40, available))
    model = Nest()
    model.set_dtype(mx.bfloat16)
    assert apply(model, choice) is widened
    assert is_narrow(model) is not widened


def test_float32_weights_are_left_alone() -> None:
    assert apply(Nest(), "float32") is False


def check(name: str) -> None:
    """A widened model computes what a float32 model with the same weights does, to the last bit."""
    narrow, wide = build(name, dtype=mx.bfloat16), build(name)
    wide.update(
        tree_unflatten(
            [
                (n, w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w)
                for n, w in tree_flatten(narrow.parameters())
            ]
        )
    )
    widen(narrow)
    ids = probe.tokens(40)
    want, got = (probe.run(model, ids, chunk=16) for model in (wide, narrow))
    assert mx.array_equal(got, want, equal_nan=True)
    if "float32" not in str(got.dtype):
        pytest.fail(f"{name} computes in {got.dtype} with weights of float32")


@pytest.mark.parametrize("name", FAST)
def test_a_widened_model_computes_what_a_float32_one_does(name: str) -> None:
    check(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(FAST)))
def test_every_widened_model_computes_what_a_float32_one_does(name: str) -> None:
    check(name)


def test_narrow_and_widened_weights_do_not_share_records(tmp_path: Path) -> None:
    folder.write(build("llama", dtype=mx.bfloat16), ZOO["llama"].config, tmp_path)
    infos = {
        choice: loader.load(tmp_path, served_name="m", form=widening(choice)).info
        for choice in ("model", "float32", "auto")
    }
    assert infos["model"].fingerprint != infos["float32"].fingerprint
    assert infos["float32"].fingerprint == infos["auto"].fingerprint
    assert (infos["model"].dtype, infos["float32"].dtype) == ("bfloat16", "float32")
