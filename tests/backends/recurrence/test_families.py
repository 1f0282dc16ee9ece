"""Forms of recurrences in the libraries' models: what the models' own code computes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from firn.backends.cuda.recurrence import KernelBuild, KernelBuilds, KernelLinear, Rule
from firn.backends.recurrence import families, replacements, scans, ssm
from firn.backends.recurrence.forms import Chunked, ChunkedLinear, ChunkedWkv
from firn.backends.recurrence.replacements import Replacement, homes_of
from firn.models.load.selfcheck import distance
from firn.models.patches import Patches
from tests.cache.tiny import tiny

CLOSE = 1e-3
"""In standard deviations of the logits."""
LINEAR, WKV = ChunkedLinear(Chunked(8)), ChunkedWkv(Chunked(8))
SUMS = families.recurrent_gemma(scans.gated_sum)
LIGHTNING = families.lightning(LINEAR, families.LING + families.LING_HYBRID)
CASES: list[tuple[str, Sequence[Replacement]]] = [
    ("bailing_moe_linear", LIGHTNING),
    ("bailing_hybrid", LIGHTNING),
    ("rwkv7", families.rwkv7(WKV)),
    ("recurrent_gemma", SUMS),
    ("mamba2", ssm.as_linear_attention(LINEAR)),
    ("granitemoehybrid", ssm.as_linear_attention(LINEAR)),
]


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Of a process where no backend is installed: another test may have left one."""
    for _, all_of_it in CASES:
        for replacement in all_of_it:
            *parents, name = replacement.path.split(".")
            owner: Any = sys.modules.get(replacement.home)
            for parent in parents:
                owner = getattr(owner, parent, None)
            now = getattr(owner, name, None)
            if hasattr(now, replacements.MARK):
                monkeypatch.setattr(owner, name, getattr(now, replacements.MARK))
    made = Patches()
    yield made
    made.undo()


def logits(model: Any, layers: list[Any], n_tokens: int) -> mx.array:
    ids = mx.array([[(7 * i) % 50 + 1 for i in range(n_tokens)]])
    out: mx.array = model(ids, cache=layers)[0]
    return out


@pytest.mark.parametrize(("name", "forms"), CASES, ids=[name for name, _ in CASES])
def test_models_say_the_same(name: str, forms: Sequence[Replacement], patches: Patches) -> None:
    """A prompt of several chunks, a token after it, and a few more; the types of states stay."""
    model, make_layers = tiny(name)()
    plain, layers = make_layers(), make_layers()
    want = [logits(model, plain, n) for n in (21, 1, 3)]
    mx.eval(want)
    for _ in range(2):
        replacements.install(patches, forms)
    assert patches.names
    for n, before in zip((21, 1, 3), want, strict=True):
        got = logits(model, layers, n)
        assert distance(before[-1], got[-1]) < CLOSE
        assert distance(before[0], got[0]) < CLOSE
    assert types(layers) == types(plain)


def types(layers: list[Any]) -> list[Any]:
    arrays = [layer.cache for layer in layers if hasattr(layer, "cache")]
    return [[a.dtype for a in each if a is not None] for each in arrays]


def test_states_have_the_model_s_type(patches: Patches) -> None:
    """As stored states have, which rows are filled with."""
    model, make_layers = tiny("rwkv7", dtype=mx.bfloat16)()
    plain, layers = make_layers(), make_layers()
    mx.eval(logits(model, plain, 9))
    replacements.install(patches, families.rwkv7(WKV))
    mx.eval(logits(model, layers, 9))
    assert types(layers) == types(plain)


@pytest.mark.parametrize("homes", [families.LING, families.LING_HYBRID])
def test_states_of_lightning_attention_have_the_library_s_type(
    homes: Sequence[str], patches: Patches
) -> None:
    home = importlib.import_module(homes[0])
    one = mx.ones((1, 2, 9, 8), dtype=mx.bfloat16)
    given: dict[str, Any] = {"scale": 0.5, "h": None}
    want = home.recurrent_gla(one, one, one, mx.array([-0.1, -0.2]), **given)
    replacements.install(patches, families.lightning(LINEAR, homes))
    got = home.recurrent_gla(one, one, one, mx.array([-0.1, -0.2]), **given)
    assert [a.dtype for a in got] == [a.dtype for a in want]
    assert [a.shape for a in got] == [a.shape for a in want]


class Unsuited(ChunkedLinear):
    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it does not suit")


def test_short_calls_are_left_to_the_library(patches: Patches) -> None:
    model, make_layers = tiny("bailing_moe_linear")()
    form = Unsuited(Chunked(8, min_tokens=4))
    replacements.install(patches, families.lightning(form, families.LING))
    layers = make_layers()
    mx.eval(logits(model, layers, 3))
    with pytest.raises(AssertionError):
        mx.eval(logits(model, layers, 4))


def test_slow_decays_of_16_bits_fade(patches: Patches) -> None:
    """mlx-lm rounds them to 16 bits, where the slowest are 1 and their sums grow for ever."""
    home = importlib.import_module(homes_of("bailing_moe_linear")[0])
    replacements.install(patches, families.lightning(LINEAR, families.LING))
    one = mx.ones((1, 1, 3000, 8), dtype=mx.bfloat16)
    y, _ = home.recurrent_gla(one, one, one, mx.array([-0.001]), 1.0)
    assert float(y[0, 0, -1, 0]) == pytest.approx(8 * 950, rel=0.05)


def lengths_of(form: Callable[..., Any], lengths: list[int]) -> tuple[mx.array, mx.array]:
    keys = iter(mx.random.split(mx.random.key(3), 8))

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    x, b, c = some(2, 20, 4, 8), some(2, 20, 2, 6), some(2, 20, 2, 6)
    mask = mx.arange(20)[None] < mx.array(lengths)[:, None]
    given = (x, some(4), b, c, some(4), some(2, 20, 4), some(4), some(2, 4, 8, 6), (0.0, 1e9))
    y, state = form(*given, mask=mask, lengths=mx.array(lengths))
    return mx.where(mask[..., None, None], y, 0), state


@pytest.mark.parametrize("lengths", [[20, 7], [1, 20]])
def test_padding_moves_no_state_of_mamba_2(lengths: list[int], patches: Patches) -> None:
    home = importlib.import_module(ssm.HOMES[0])
    want = lengths_of(home.ssm_attn, lengths)
    replacements.install(patches, ssm.as_linear_attention(LINEAR))
    for got, plain in zip(lengths_of(home.ssm_attn, lengths), want, strict=True):
        assert mx.allclose(got, plain, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_does_not_work_leaves_its_rules_to_chunks(patches: Patches) -> None:
    """Which widths have none is known without a GPU."""
    builds = KernelBuilds()
    form = KernelLinear(builds, LINEAR)
    builds.assume(KernelBuild(Rule.LINEAR, 8, 8, False), "there is no GPU")
    one = mx.ones((1, 5, 2, 8))
    y, state = form(one, one, one, mx.ones((1, 5, 2)), mx.zeros((1, 2, 8, 8)))
    assert mx.array_equal(state, mx.full((1, 2, 8, 8), 5.0))
    assert y.shape == one.shape
