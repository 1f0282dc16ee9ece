"""The cache folder and Time Machine, with a fake tmutil."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from firn.host.backups import exclude_from_backups


class Tmutil:
    def __init__(self, *, fault: Exception | None = None) -> None:
        self.excluded: set[str] = set()
        self.calls: list[str] = []
        self.fault = fault

    def __call__(self, command: Sequence[str]) -> str:
        _, verb, path = command
        self.calls.append(verb)
        if self.fault is not None:
            raise self.fault
        if verb == "addexclusion":
            self.excluded.add(path)
        return f"{'[Excluded]' if path in self.excluded else '[Included]'}    {path}\n"


def test_a_folder_is_marked_once(tmp_path: Path) -> None:
    tmutil = Tmutil()
    folder = tmp_path / "not" / "there yet"
    assert exclude_from_backups(folder, platform="darwin", run=tmutil)
    assert exclude_from_backups(folder, platform="darwin", run=tmutil)
    assert tmutil.calls == ["isexcluded", "addexclusion", "isexcluded"]
    assert str(folder) in tmutil.excluded


@pytest.mark.parametrize(
    "fault",
    [
        subprocess.CalledProcessError(1, "tmutil"),
        subprocess.TimeoutExpired("tmutil", 10),
        PermissionError("tmutil"),
    ],
)
def test_a_fault_costs_a_warning(
    tmp_path: Path, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert not exclude_from_backups(tmp_path, platform="darwin", run=Tmutil(fault=fault))
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("firn", "WARNING")
    assert str(tmp_path) in warning.getMessage()
    assert str(fault) in warning.getMessage()


def test_elsewhere_nothing_is_run(tmp_path: Path) -> None:
    tmutil = Tmutil()
    assert not exclude_from_backups(tmp_path, platform="linux", run=tmutil)
    assert tmutil.calls == []
