"""A folder that does not exist yet, and tiers on it that share a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cache.tiers.folders import Clock
from tests.cache.tiers.records import Folder

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "firn"


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def opened(folder: Path, wall: Clock) -> Callable[..., Folder]:
    def open_folder(limit_nbytes: int = 64 * MIB, **more: Any) -> Folder:
        return Folder(folder, limit_nbytes, wall=wall, **more)

    return open_folder
