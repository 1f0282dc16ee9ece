"""What a front needs from the system: short paths for sockets, a share of the memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from firn.fleet.memory import usable_share
from firn.fleet.server import SOCKET_NAME_NBYTES, SOCKET_PATH_NBYTES, socket_base


def test_sockets_go_into_a_short_runtime_folder(tmp_path: Path) -> None:
    assert socket_base({"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path)
    assert socket_base({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) != str(tmp_path / "gone")


def test_sockets_do_not_go_into_a_long_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    base = socket_base({"XDG_RUNTIME_DIR": str(long)})
    assert len(base) + SOCKET_NAME_NBYTES <= SOCKET_PATH_NBYTES
    assert base == "/tmp"


def test_models_on_a_mac_share_what_its_gpu_may_use() -> None:
    """As long as no process has reported how much that is."""
    gib = 1 << 30
    assert usable_share(16 * gib, platform="darwin") == pytest.approx(2 / 3)
    assert usable_share(64 * gib, platform="darwin") == 0.75
    assert usable_share(64 * gib, platform="linux") == 0.9
