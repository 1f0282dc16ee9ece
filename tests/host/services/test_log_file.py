"""A service's log is kept small in its place, for those who have it open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from firn.host.services.log_file import N_OLD, LogFile


def test_what_is_large_moves_aside_and_writers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("w") as ours, path.open("a") as another:  # ours does not append, as yet
        log = LogFile(path, descriptors=(ours.fileno(),), largest_nbytes=6)
        ours.write("first\n")
        ours.flush()
        assert not log.rotate()
        ours.write("lines\n")
        ours.flush()
        assert log.rotate()
        assert path.read_text() == ""
        ours.write("second\n")
        ours.flush()
        another.write("third\n")
        another.flush()
        assert path.read_text() == "second\nthird\n", "no hole where the first lines were"
        assert (tmp_path / "server.log.1").read_text() == "first\nlines\n"
        assert (tmp_path / "server.log.1").stat().st_mode & 0o077 == 0
        assert log.rotate()
        assert (tmp_path / "server.log.2").read_text() == "first\nlines\n"
        for _ in range(2 * N_OLD):
            os.write(ours.fileno(), b"another line\n")
            assert log.rotate()
        assert len(list(tmp_path.iterdir())) == 1 + N_OLD


def test_output_that_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "server.log", tmp_path / "other"
    path.write_text("of an older process\n")
    with other.open("w") as elsewhere:
        elsewhere.write("a long line of another file\n")
        elsewhere.flush()
        descriptors = (elsewhere.fileno(), 999)
        assert not LogFile(path, descriptors=descriptors, largest_nbytes=5).rotate()
    assert other.stat().st_size > 5
    assert path.read_text() == "of an older process\n"


def test_where_nothing_can_be_kept_the_disk_is_not_filled(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for n in (1, 2):
        (tmp_path / f"server.log.{n}" / "in the way").mkdir(parents=True)
    with path.open("a") as ours:
        ours.write("first\n")
        ours.flush()
        assert LogFile(path, descriptors=(ours.fileno(),), largest_nbytes=5).rotate()
    assert path.read_text() == ""


def test_a_service_watches_its_own_output(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    script = (
        "import pathlib, sys, threading\n"
        "from firn.host.services.log_file import LogFile\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "LogFile(path, largest_nbytes=5, look_s=0.01).watch()\n"
        "print('a line that is long', flush=True)\n"
        "while path.stat().st_size: threading.Event().wait(0.01)\n"
    )
    with path.open("a") as output:
        subprocess.run(
            [sys.executable, "-c", script, str(path)],
            stdout=output, stderr=output, timeout=60, check=True,
        )  # fmt: skip
    assert (tmp_path / "server.log.1").read_text() == "a line that is long\n"
