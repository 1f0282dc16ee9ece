"""`firn cache` on a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from firn.cli import make_cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FIRN_SSD_CACHE_DIR", raising=False)

    def run(*arguments: object, **more: Any) -> Result:
        command, *rest = map(str, arguments)
        words = ["cache", command, "--ssd-cache-dir", str(folder), *rest]
        return CliRunner().invoke(make_cli(), words, **more)

    return run
