"""Compiled kernels are kept in firn's own folder, and several processes compile them ahead."""

from __future__ import annotations

import os
import shutil
import stat
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from firn.backends.cuda import kernels
from firn.backends.cuda.kernels import FOLDER, KNOWN, OPERATIONS, keep, main, move, note


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "NVIDIA H200/X"})


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_can_be_computed(name: str) -> None:
    mx.eval(OPERATIONS[name]())


def visible(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name != ".lock")


def test_processes_compile_ahead_once(tmp_path: Path) -> None:
    keep(tmp_path)
    (place,) = tmp_path.iterdir()
    assert place.name == f"{version('mlx')}-NVIDIA-H200-X"
    assert os.environ[FOLDER] == str(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert visible(place) == [KNOWN], "and nobody's own folder"


def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def compile_all(place: Path) -> bool:
        compiled.append(place)
        return len(compiled) > 1

    monkeypatch.setattr(kernels, "_compile", compile_all)
    for _ in range(3):
        monkeypatch.setenv(FOLDER, "")
        keep(tmp_path)
    assert len(compiled) == 2, "the first time something failed"


def test_a_start_keeps_what_was_used_and_drops_what_a_crash_may_have_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda place: True)
    keep(tmp_path)
    place = Path(os.environ[FOLDER])
    for name in ("used.ptx", "used.txt", "changed.ptx", "changed.txt", "torn.ptx"):
        (place / name).write_text("whole")
    note(tmp_path)
    (place / "changed.ptx").write_text("wh")
    for name in ("late.ptx", "late.txt"):
        (place / name).write_text("who knows")
    (place / ".123").mkdir()  # left by a process that was killed
    monkeypatch.setenv(FOLDER, "")
    keep(tmp_path)
    assert visible(place) == ["changed.txt", KNOWN, "used.ptx", "used.txt"]


def test_a_folder_that_has_gone_meanwhile_is_said_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda place: True)
    keep(tmp_path)
    shutil.rmtree(os.environ[FOLDER])
    note(tmp_path)
    assert "will be recompiled at the next start" in caplog.text


@pytest.mark.parametrize("content", ["", "no json", "[1]"])
def test_a_note_that_cannot_be_read_is_no_note(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(kernels, "_compile", lambda place: bool(compiled.append(place)) or True)
    keep(tmp_path)
    place = Path(os.environ[FOLDER])
    (place / "a.ptx").write_text("who knows")
    (place / KNOWN).write_text(content)
    monkeypatch.setenv(FOLDER, "")
    keep(tmp_path)
    assert len(compiled) == 2
    assert visible(place) == [KNOWN]


def test_a_process_that_fails_is_noticed(tmp_path: Path) -> None:
    process = kernels._process(tmp_path, ["no such operation"])
    assert process.wait() != 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_the_user_has_chosen_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "a.ptx").write_text("theirs")
    monkeypatch.setenv(FOLDER, str(own))
    keep(tmp_path / "firn")
    note(tmp_path / "firn")
    assert os.environ[FOLDER] == str(own)
    assert visible(own) == ["a.ptx"]
    assert not (tmp_path / "firn").exists()


def test_a_folder_that_cannot_be_written_is_said_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "below")
    assert "temporary folder" in caplog.text
    assert os.environ[FOLDER] == ""


def test_what_mlx_reads_first_is_moved_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, place = tmp_path / "own", tmp_path / "place"
    own.mkdir(), place.mkdir()
    for name in ("a.ptx", "a.txt", "b.ptx", "b.txt"):
        (own / name).write_text(name)
    moved: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (moved.append(self.name), replace(self, to))[1]
    )
    move(own, place)
    assert {p.suffix for p in map(Path, moved[:2])} == {".txt"}
    assert sorted(p.name for p in place.iterdir()) == ["a.ptx", "a.txt", "b.ptx", "b.txt"]


def test_a_process_writes_to_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may read the shared folder at any moment."""
    seen: list[Path] = []

    def operation() -> mx.array:
        own = Path(os.environ[FOLDER])
        seen.append(own)
        (own / "gather.ptx").write_text("compiled")
        return mx.array(1)

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setitem(OPERATIONS, "a", operation)
    main(["a"])
    assert seen[0].parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["gather.ptx"]
