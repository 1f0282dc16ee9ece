"""What a server sets up for MLX on CUDA other than kernels."""

from __future__ import annotations

import os

import pytest
from mlx import nn

from firn.backends.contract import BackendOptions
from firn.backends.cuda.device import CHECK, CudaBackend

EXACT = BackendOptions(exact=True)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    return environ


def test_many_shapes_are_no_mistake(environ: dict[str, str]) -> None:
    before, backend = nn.Linear.__call__, CudaBackend()
    backend.install(EXACT)
    assert environ[CHECK] == "0"
    assert nn.Linear.__call__ is before, "exact mode computes with MLX's own kernels"
    assert backend.patches.names == []


def test_what_the_user_has_set_stays(environ: dict[str, str]) -> None:
    environ[CHECK] = "1"
    CudaBackend().install(EXACT)
    assert environ[CHECK] == "1"
