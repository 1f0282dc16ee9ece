"""Servers of one user know how much memory the others have reserved."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from firn.host.reservations import Reservation, Reserved, others
from tests.locked import as_a_user, locked

HOLD = """
import sys
from pathlib import Path
from firn.host.reservations import Reservation, Reserved
mine = Reservation(Path(sys.argv[1]))
mine.put(Reserved("metal", 77, 1000, 10))
mine.put(Reserved("metal", 77, 1000, 400))
print("held", flush=True)
sys.stdin.read()
"""

LOOK = """
import sys
from pathlib import Path
from firn.host.reservations import others
print(others(Path(sys.argv[1]), device="cpu", group=1))
"""


def test_a_living_server_counts_and_a_dead_one_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "reservations"
    assert others(folder, device="metal", group=1) == []
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        (other,) = others(folder, device="metal", group=1)
        assert (other.reserved_nbytes, other.unclaimed_nbytes) == (1000, 600)
        assert others(folder, device="cuda", group=1) == [], "another device"
        assert others(folder, device="metal", group=77) == [], "they share one budget"
        child.kill()
        child.wait()
        assert others(folder, device="metal", group=1) == []
        assert list(folder.iterdir()) == [], "the file of the dead is gone"


def test_ones_own_does_not_count_and_goes_at_the_end(tmp_path: Path) -> None:
    mine = Reservation(tmp_path)
    mine.put(Reserved("cpu", 1, 5, 9))
    assert others(tmp_path, device="cpu", group=2) == []
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server looks at that moment, and takes it for a dead server's file."""
    path, n_removed = tmp_path / "4711.json", 0
    flock = fcntl.flock

    def look_first(file: IO[bytes], operation: int) -> None:
        nonlocal n_removed
        if n_removed < 3:
            n_removed += 1
            with path.open() as theirs:
                flock(theirs, operation)
                if n_removed == 1:  # it is removed while this process fails to lock it
                    path.unlink()
                    flock(file, operation)
            path.unlink(missing_ok=True)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", look_first)
    mine = Reservation(tmp_path, pid=4711)
    mine.put(Reserved("cpu", 1, 5, 3))
    monkeypatch.undo()
    assert n_removed == 3
    (seen,) = others(tmp_path, device="cpu", group=2)
    assert seen.reserved_nbytes == 5
    mine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_new_servers_file_is_not_removed_for_a_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with the dead one's pid starts between the opening and the removal of its file."""
    path = tmp_path / "4711.json"
    path.write_text("{}")
    mine = Reservation(tmp_path, pid=4711)
    flock = fcntl.flock

    def start_first(file: IO[bytes], operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        mine.put(Reserved("cpu", 1, 5, 3))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", start_first)
    others(tmp_path, device="cpu", group=2)
    (seen,) = others(tmp_path, device="cpu", group=2)
    assert seen.reserved_nbytes == 5
    mine.close()


def test_a_folder_that_may_not_be_looked_into_is_no_fault(tmp_path: Path) -> None:
    with locked(tmp_path / "home") as home:
        run = subprocess.run(
            [*as_a_user(), sys.executable, "-c", LOOK, str(home / "reservations")],
            capture_output=True,
            text=True,
        )
    assert run.stdout == "[]\n", run.stderr


def test_rubbish_and_a_folder_that_cannot_be_written_are_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "12.json").write_text("{")
    (tmp_path / "13.json").mkdir()
    assert others(tmp_path, device="cpu", group=1) == []
    (tmp_path / "file").write_text("")
    mine = Reservation(tmp_path / "file" / "below")
    for _ in range(3):
        mine.put(Reserved("cpu", 1, 1, 1))
    told = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1, "a server tries again every few seconds, and says so once"
