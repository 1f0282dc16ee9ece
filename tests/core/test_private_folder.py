"""Folders that only this user can open, those above them included."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from firn.core.private_folder import make_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_folder_that_is_made_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "a" / "b" / "c"
    make_private(folder)
    make_private(folder)
    assert [mode(path) for path in (folder, *folder.parents[:2])] == [0o700] * 3
    assert mode(tmp_path) == 0o755, "it was there before"


def test_a_file_in_the_way_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_private(path)
