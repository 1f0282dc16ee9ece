"""The cache folder and Time Machine, with a fake tmutil."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from firn.host.backups import exclude_from_backups


class Tmutil:
    def __init__(self, *, fails: bool = False) -> None:
        self.excluded: set[str] = set()
        self.calls: list[str] = []
        self.fails = fails

    def __call__(self, command: Sequence[str]) -> str:
        _, verb, path = command
        self.calls.append(verb)
        if self.fails:
            raise subprocess.CalledProcessError(1, list(command))
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


def test_a_fault_costs_a_warning(tmp_path: Path) -> None:
    assert not exclude_from_backups(tmp_path, platform="darwin", run=Tmutil(fails=True))


def test_elsewhere_nothing_is_run(tmp_path: Path) -> None:
    tmutil = Tmutil()
    assert not exclude_from_backups(tmp_path, platform="linux", run=tmutil)
    assert tmutil.calls == []
