"""For every test: none fails because the machine is busy, or because another one went before it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from firn.models import cpu
from firn.models.cpu import rope, softmax
from tests import one_blas

settings.register_profile("firn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("firn")

# Newer Apple GPUs, and NVIDIA's, multiply float32 with 10 bits of it otherwise, and tests compare logits
# of batched and single rows. MLX reads this with its first product.
os.environ.setdefault("MLX_ENABLE_TF32", "0")


@pytest.fixture(autouse=True, scope="session")
def _one_mlx_for_all() -> Iterator[None]:
    """What a server puts in MLX's place is for its whole process; this one has many servers.

    So all tests of a process share a fast BLAS, and none puts functions of ours into MLX.
    """
    blas = one_blas.attach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "attach", lambda choice, *, memo: blas)
        patch.setattr(softmax, "install_if_faster", lambda: False)
        patch.setattr(rope, "install", lambda: None)
        yield
