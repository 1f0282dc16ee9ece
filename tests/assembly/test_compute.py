"""What a server sets up for its device."""

from __future__ import annotations

from typing import Literal

import pytest

from firn.assembly.compute import compute_settings
from firn.backends.contract import BackendOptions
from firn.config import CacheConfig, Config, EngineConfig
from tests.backends.fakes import pretend


@pytest.mark.parametrize(("reuse", "is_exact"), [("exact", True), ("full", False)])
def test_exact_mode_is_the_backends_affair(
    reuse: Literal["exact", "full"], is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BackendOptions] = []
    backend = pretend("cuda", monkeypatch)
    monkeypatch.setattr(backend, "install", asked.append)
    settings = compute_settings(Config(cache=CacheConfig(reuse=reuse)), "qwen3", "a-model")
    assert [options.exact for options in asked] == [is_exact]
    assert settings.exact is is_exact
    assert asked[0].kernels_folder is not None


@pytest.mark.parametrize(
    ("kind", "step_ms", "usual", "largest"),
    [("metal", 0, 512, 2048), ("cuda", 0, 2048, 8192), ("cpu", 0, 256, 0), ("cpu", 50, 256, 256)],
)
def test_chunks_are_the_devices(
    kind: str, step_ms: int, usual: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(kind, monkeypatch)
    config = Config(engine=EngineConfig(max_step_ms=step_ms))
    limits = compute_settings(config, "qwen3", "a-model").limits
    assert (limits.prefill_chunk, limits.largest_chunk) == (usual, largest)
