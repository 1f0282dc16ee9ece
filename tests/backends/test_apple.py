"""What an Apple GPU's results and speed depend on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from firn.backends import apple
from firn.backends.apple import AppleKernels
from firn.backends.contract import BackendOptions
from tests.backends.fakes import FakeMetal

M5 = {"architecture": "applegpu_g17s"}
WHEEL = """Wheel-Version: 1.0
Generator: setuptools (80.9.0)
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


def install_wheel(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(read_text=lambda name: WHEEL.format(platform=platform))
    monkeypatch.setattr(apple, "distribution", lambda name: package)


@pytest.fixture
def tahoe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apple.mac, "version", lambda: "26.1")
    monkeypatch.setattr(apple.mac, "build", lambda: "25B78")
    for name in list(os.environ):
        if name.startswith(apple.CHOICES):
            monkeypatch.delenv(name)
    install_wheel("macosx_26_0_arm64", monkeypatch)


def test_exact_records_hold_for_one_system_and_its_kernels(
    tahoe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = FakeMetal()
    metal.install(BackendOptions(exact=True))
    seen = {metal.arithmetic}
    assert metal.arithmetic == "macos 25B78 macosx_26_0_arm64"
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    seen.add(metal.arithmetic)
    monkeypatch.setenv("MLX_SDPA_BLOCKS", "64")
    seen.add(metal.arithmetic)
    monkeypatch.setattr(apple.mac, "build", lambda: "25C56")
    seen.add(metal.arithmetic)
    install_wheel("macosx_15_0_arm64", monkeypatch)
    seen.add(metal.arithmetic)
    assert len(seen) == 5
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    assert metal.arithmetic in seen, "changes no bits"


def test_other_records_stay_readable(tahoe: None) -> None:
    metal = FakeMetal()
    assert metal.arithmetic == ""
    metal.install(BackendOptions(exact=False))
    assert metal.arithmetic == ""


def test_kernels_of_an_older_system_are_noticed(
    tahoe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that calls macOS 26 16.0 is given the wheel for 15."""
    new = AppleKernels.here(M5)
    assert new.generation == 17
    assert not any(is_odd for _, _, is_odd in new.findings())
    assert "M5" in str(list(new.findings()))
    old = replace(new, wheel="macosx_15_0_arm64")
    ((_, text, _),) = [f for f in old.findings() if f[2]]
    assert "macosx_15_0_arm64" in text
    assert "newer Python" in text
    for other in (replace(old, generation=16), replace(old, system="15.6")):
        assert not other.lacks_new_products, "which has no such units, or no such kernels"
    install_wheel("", monkeypatch)
    assert "unknown" in str(list(FakeMetal().describe(tmp_path)))


def test_the_wheel_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apple.wheel_platform("mlx").partition("_")[0] in {"manylinux", "linux", "macosx"}
    assert apple.wheel_platform("no-such-package") == ""
    nothing = SimpleNamespace(read_text=lambda name: None)
    monkeypatch.setattr(apple, "distribution", lambda name: nothing)
    assert apple.wheel_platform() == ""
