"""What a server sets up for MLX on CUDA other than kernels."""

from __future__ import annotations

import os

import pytest
from mlx import nn

from firn.models import cuda


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    return environ


def test_many_shapes_are_no_mistake(environ: dict[str, str]) -> None:
    before = nn.Linear.__call__
    cuda.tune(kernels=False)
    assert environ[cuda.CHECK] == "0"
    assert nn.Linear.__call__ is before, "exact mode computes with MLX's own kernels"


def test_what_the_user_has_set_stays(environ: dict[str, str]) -> None:
    environ[cuda.CHECK] = "1"
    cuda.tune(kernels=False)
    assert environ[cuda.CHECK] == "1"
