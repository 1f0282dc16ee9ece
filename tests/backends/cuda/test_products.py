"""Which products the kernel computes on CUDA. The kernel itself is tested there at every start, and
by `benchmarks/products.py`; these tests cover what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx import nn

from firn.backends.contract import BackendOptions
from firn.backends.cuda import products
from firn.backends.cuda.device import CudaBackend
from firn.backends.cuda.products import MAX_TOKENS, suits
from firn.models.patches import Patches
from tests.backends.fakes import is_on_cuda


@pytest.fixture
def installed() -> Iterator[None]:
    patches, before = Patches(), nn.Linear.__call__
    products.install(patches)
    yield
    patches.undo()
    assert nn.Linear.__call__ is before


def x(n_tokens: int, n_inner: int = 64, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.zeros((1, n_tokens, n_inner), dtype=dtype)


def test_a_few_tokens_and_whole_blocks_of_bfloat16_are_for_the_kernel() -> None:
    weight = mx.zeros((32, 64), dtype=mx.bfloat16)
    assert [n for n in range(1, 200) if suits(x(n), weight)] == list(range(2, MAX_TOKENS + 1))
    for dtype in (mx.float16, mx.float32):
        assert not suits(x(8, dtype=dtype), weight.astype(dtype))
    assert not suits(x(8, dtype=mx.float32), weight), "of two kinds MLX makes a third"
    assert not suits(x(8), mx.zeros((48, 64), dtype=mx.bfloat16)), "a block has 32 columns"
    assert not suits(x(8, 60), mx.zeros((32, 60), dtype=mx.bfloat16))
    rows = mx.zeros((4, 2, 64), dtype=mx.bfloat16)
    assert suits(rows, weight), "rows count as tokens do"


@pytest.mark.skipif(is_on_cuda(), reason="there the kernel is right")
def test_a_wrong_kernel_leaves_mlx_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    attend, before = mx.fast.scaled_dot_product_attention, nn.Linear.__call__
    backend = CudaBackend()
    backend.install(BackendOptions())
    assert nn.Linear.__call__ is before
    of_mlx = [name for name in backend.patches.names if name.startswith("mlx.")]
    assert of_mlx == ["mlx.core.fast.scaled_dot_product_attention"]
    backend.uninstall()
    assert mx.fast.scaled_dot_product_attention is attend
    assert "products of a few tokens are left to MLX" in caplog.text


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("n_tokens", [1, MAX_TOKENS + 1])
def test_all_other_products_are_left_to_mlx(n_tokens: int) -> None:
    tokens = mx.random.normal((1, n_tokens, 64))
    for layer in (nn.Linear(64, 32), nn.Linear(64, 32, bias=False)):
        want = tokens @ layer.weight.T + (layer.bias if "bias" in layer else 0.0)
        assert mx.allclose(layer(tokens), want, atol=1e-5)
    table = nn.Embedding(32, 64)
    assert mx.allclose(table.as_linear(tokens), tokens @ table.weight.T, atol=1e-5)
