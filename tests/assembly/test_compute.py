"""What a server sets up for its device."""

from __future__ import annotations

from typing import Literal

import pytest

from firn.assembly.compute import compute_settings
from firn.config import CacheConfig, Config
from firn.models import cuda
from firn.models import device as devices
from firn.models.device import Device


@pytest.mark.parametrize(("reuse", "kernels"), [("exact", False), ("full", True)])
def test_exact_mode_computes_with_the_devices_own_kernels(
    reuse: Literal["exact", "full"], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[bool] = []
    monkeypatch.setattr(devices, "device", lambda: Device("cuda", 1 << 36))
    monkeypatch.setattr(cuda, "tune", lambda *, kernels, folder: tuned.append(kernels))
    settings = compute_settings(Config(cache=CacheConfig(reuse=reuse)), "qwen3", "a-model")
    assert tuned == [kernels]
    assert settings.exact is not kernels
