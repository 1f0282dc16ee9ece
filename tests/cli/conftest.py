"""`firn cache` on the test's own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli import command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FIRN_SSD_CACHE_DIR", raising=False)

    def run(*arguments: object, **more: Any) -> Result:
        name, *rest = map(str, arguments)
        words = ["cache", name, "--ssd-cache-dir", str(folder), *rest]
        return command.invoke(*words, **more)

    return run
