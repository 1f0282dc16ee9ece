"""What the engine thread is given, for each kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.assembly import parts
from firn.assembly.model import ServerSpec
from firn.backends import metal
from firn.backends.cuda import device
from firn.backends.warm_up import WarmUpSpeculation
from firn.config import CacheConfig, Config
from firn.models.decode.runner import Runner
from tests.backends.fakes import pretend
from tests.zoo import write_folder


@pytest.mark.parametrize(("kind", "n_warm_ups"), [("cuda", 1), ("metal", 1), ("cpu", 0)])
def test_a_gpu_warms_up_before_it_serves(
    kind: str, n_warm_ups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a runner and a speculation that serve nobody."""
    warmed: list[Runner] = []
    pretend(kind, monkeypatch)
    for module in (device, metal):
        monkeypatch.setattr(module, "warm_up", warmed.append)
    write_folder("qwen3", tmp_path)
    config = Config(cache=CacheConfig(no_ssd_cache=True))
    built = parts.build_parts(ServerSpec(config, tmp_path, "a-model", ()), lambda: None)
    assert len(warmed) == n_warm_ups
    for runner in warmed:
        assert isinstance(runner.speculator, WarmUpSpeculation)
        assert runner.speculator is not built.speculator
    built.cache.close()
