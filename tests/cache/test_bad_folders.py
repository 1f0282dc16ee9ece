"""Folders that are unreadable, slow or without locks: one line in the log, and the server serves."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from firn.cache.storage import desk
from firn.cache.tiers._folder import Disk, FileStat
from tests.cache.test_decisions import admission, ask, server, settle
from tests.cache.tiers.folders import Lockless
from tests.hash_runner import prompt_of as words


class Unreadable(Disk):
    """Like another user's folder: nothing in it can be read."""

    def _refuse(self) -> OSError:
        return OSError(errno.EACCES, os.strerror(errno.EACCES))

    def make_folder(self) -> None:
        raise self._refuse()

    def files(self, sub: str) -> list[FileStat]:
        raise self._refuse()

    def subfolder(self, sub: str) -> tuple[int, int]:
        raise self._refuse()

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        raise self._refuse()


class Waiting(Disk):
    """Listing blocks until `go` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go = threading.Event()

    def files(self, sub: str) -> list[FileStat]:
        self.go.wait()
        return super().files(sub)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "firn.cache"]


def test_a_folder_that_may_not_be_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = words(1, 60)
    with server(tmp_path, disk=Unreadable(tmp_path)) as lab:
        assert admission(ask(lab, ids)).why == "cold"
        assert dict(admission(ask(lab, ids)).tiers) == {"memory": 59}
        (tier,) = lab.tree.records.tiers
        assert tier.usage().status.state == "paused"
        assert "no permission" in tier.usage().status.reason
    assert len(lines(caplog)) == 1
    assert "no permission" in lines(caplog)[0]
    assert f"pauses writing to {tmp_path}:" in lines(caplog)[0]


def test_a_folder_that_takes_long_to_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(desk, "FIRST_SCAN_S", 0.01)
    ids = words(1, 60)
    with server(tmp_path) as lab:
        ask(lab, ids)
    caplog.clear()
    disk = Waiting(tmp_path)
    with server(tmp_path, disk=disk) as lab:
        assert admission(ask(lab, words(2, 60))).why == "cold", "served meanwhile"
        assert sum("continues in the background" in line for line in lines(caplog)) == 1
        disk.go.set()
        (tier,) = lab.tree.records.tiers
        while lab.between_steps(lambda: tier.scanning):
            settle(lab)
        assert admission(ask(lab, ids)).n_cached == 59, "hits come with what it finds"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_without_locks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    ids = words(1, 60)
    with server(tmp_path, disk=Lockless(tmp_path, number)) as lab:
        ask(lab, ids)
    assert len(lines(caplog)) == 1
    assert "do not share this folder with another server" in lines(caplog)[0]
    with server(tmp_path, disk=Lockless(tmp_path, number)) as lab:
        assert dict(admission(ask(lab, ids)).tiers) == {"ssd": 59}
