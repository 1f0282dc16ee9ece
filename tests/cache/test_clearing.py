"""What was cleared stays cleared: whatever becomes of the process, the disk and the clocks."""

from __future__ import annotations

import errno
import glob
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firn.cache.admin.control import CacheAdmin, Json
from firn.cache.admin.transfer import export, import_file
from firn.cache.storage.catalogue import name_of
from firn.cache.storage.container import load
from firn.cache.storage.faults import NotForgotten
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers._folder import Disk
from firn.cache.tiers.ssd import SsdTier
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import DENSE, LabEngine, nodes_of, records_of, tree
from tests.cache.test_decisions import Patient, admission, ask, settle
from tests.hash_runner import prompt_of as words
from tests.waiting import wait_until

BLOCK, GIB, WAIT_S = 8, 1 << 30, 30
ALICE, BOB, EVERYONE = Namespace("alice"), Namespace("bob"), Namespace("")
READ_ONLY = CacheControl(write=False)


class Sick(Disk):
    """A disk that may refuse to delete, or to note a clearing."""

    refuses_deletes = refuses_notes = False

    def unlink(self, path: str) -> None:
        if self.refuses_deletes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().unlink(path)

    def bury(self, root: str, at: float) -> None:
        if self.refuses_notes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().bury(root, at)


class Server(LabEngine):
    """An engine over a folder, and what its operator may ask of it."""

    def __init__(self, folder: Path, *, wall: Callable[[], float] = time.time) -> None:
        self.disk, self.folder = Sick(folder), folder
        cache = tree(DENSE, block=BLOCK, clock=time.monotonic, wall=wall)
        cache.records.estimates = Patient()
        super().__init__(DENSE, cache=cache)
        tier = SsdTier(TierOptions(str(folder), GIB), disk=self.disk)
        self.worker = TierWorker(tier, wake=self.engine.wake)
        self.between_steps(
            lambda: cache.add_tier("ssd", self.worker, namespaces=[ALICE, BOB, EVERYONE])
        )
        self.admin = CacheAdmin(self.tree, self._run, pin_cap_nbytes=0)

    def _run(self, function: Callable[[Json], Any], /) -> Future[Any]:
        return self.engine.call(lambda _: function({}))

    def clear(self, namespace: Namespace | None = None) -> Json:
        return self.admin.clear(namespace).result(WAIT_S)

    def forget(self, node: str) -> None:
        forgetting = self.admin.forget_node(None, node)
        while not forgetting.step().result(WAIT_S):
            pass

    @property
    def top(self) -> str:
        """The first block of what is stored."""
        return next(n.key.hex() for n in nodes_of(self.tree.records.tree) if not n.start)

    def n_cached(self, ids: list[int], namespace: Namespace = EVERYONE) -> int:
        return admission(ask(self, ids, control=READ_ONLY, namespace=namespace)).n_cached

    def rescan(self) -> None:
        (tier,) = self.tree.records.tiers
        wait_until(lambda: not tier.scanning)
        self.between_steps(tier.scan)
        self.tick_until(lambda: not tier.scanning)

    def tick_until(self, is_so: Callable[[], bool]) -> None:
        def tick() -> bool:
            self.tree.tick(EngineLoad.NONE)
            return is_so()

        wait_until(lambda: self.between_steps(tick))

    @property
    def files(self) -> list[str]:
        return glob.glob(f"{self.folder}/??/*.safetensors")  # a Path's fails if a folder vanishes


@contextmanager
def server(folder: Path, **options: Any) -> Iterator[Server]:
    with Server(folder, **options) as made:
        yield made
        if not made.disk.refuses_deletes:
            settle(made)


@contextmanager
def killed(folder: Path) -> Iterator[Server]:
    """A server that dies before it has deleted anything."""
    with Server(folder) as made:
        yield made
        made.disk.refuses_deletes = True


def test_what_was_cleared_is_not_found_after_a_kill(tmp_path: Path) -> None:
    ids = words(1, 100)
    with killed(tmp_path) as first:
        ask(first, ids)
        settle(first)
        first.disk.refuses_deletes = True
        assert first.clear()["freed_bytes"] > 0
        assert first.files
    with server(tmp_path) as second:
        assert second.n_cached(ids) == 0
        second.tick_until(lambda: not second.files)


def test_what_is_computed_after_a_clearing_is_found_after_a_kill(tmp_path: Path) -> None:
    """Its files may have the names of those that were cleared and not deleted yet."""
    ids = words(1, 100)
    with server(tmp_path) as first:
        ask(first, ids)
        settle(first)
        first.clear()
        ask(first, ids)
        settle(first)
    with server(tmp_path) as second:
        assert second.n_cached(ids) == 99


def test_one_namespace_is_cleared_and_no_other(tmp_path: Path) -> None:
    ids = words(1, 100)
    with killed(tmp_path) as first:
        for namespace in (ALICE, BOB):
            ask(first, ids, namespace=namespace)
        settle(first)
        first.disk.refuses_deletes = True
        first.clear(ALICE)
    with server(tmp_path) as second:
        assert second.n_cached(ids, ALICE) == 0
        assert second.n_cached(ids, BOB) == 99


def test_other_servers_of_the_folder_follow(tmp_path: Path) -> None:
    """Their memory has it, too."""
    ids = words(1, 100)
    with server(tmp_path) as first:
        ask(first, ids)
        settle(first)
        with server(tmp_path) as second:
            assert second.n_cached(ids) == 99
            first.clear()
            second.rescan()
            assert second.n_cached(ids) == 0


def test_what_cannot_be_deleted_is_tried_again(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
        settle(lab)
        lab.disk.refuses_deletes = True
        lab.clear()
        lab.tick_until(lambda: len(lab.worker.records._undeleted) == len(lab.files))
        lab.disk.refuses_deletes = False
        lab.rescan()
        lab.tick_until(lambda: not lab.files)
        assert lab.n_cached(ids) == 0


def test_a_name_that_could_not_be_deleted_is_written_anew(tmp_path: Path) -> None:
    """The old file goes first; else the next try would delete the new one."""
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
        settle(lab)
        lab.disk.refuses_deletes = True
        lab.clear()
        lab.tick_until(lambda: len(lab.worker.records._undeleted) == len(lab.files))
        lab.disk.refuses_deletes = False
        ask(lab, ids)
        settle(lab)
        lab.rescan()
        settle(lab)
    with server(tmp_path) as lab:
        assert lab.n_cached(ids) == 99


def test_a_clearing_that_cannot_be_kept_is_no_success(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
        settle(lab)
        lab.disk.refuses_notes = True
        with pytest.raises(NotForgotten, match="disk full"):
            lab.clear()
        assert lab.n_cached(ids) == 0, "this server has forgotten it all the same"
        lab.disk.refuses_notes = False
        lab.rescan()
        assert lab.worker.records.tier.buried(), "the next scan has noted it"  # type: ignore[attr-defined]
        assert lab.clear() == {"freed_bytes": 0}


def test_a_clock_that_was_set_back_keeps_nothing(tmp_path: Path) -> None:
    ids, now = words(1, 100), time.time()
    with killed(tmp_path) as first:
        first.tree.records.catalogue._wall = lambda: now + 3600.0
        ask(first, ids)
        settle(first)
        first.tree.records.catalogue._wall = lambda: now
        first.disk.refuses_deletes = True
        first.clear()
    with server(tmp_path) as second:
        assert second.n_cached(ids) == 0
        ask(second, ids)
        settle(second)
    with server(tmp_path) as third:
        assert third.n_cached(ids) == 99, "what was computed since is kept"


def test_what_is_imported_after_a_clearing_is_found(tmp_path: Path) -> None:
    ids, archive, folder = words(1, 100), tmp_path / "prefix.tar", tmp_path / "cache"
    with server(folder) as first:
        ask(first, ids)
        settle(first)
        tier = first.worker.records.tier
        names = [name_of(r) for r in sorted(records_of(first.tree), key=lambda r: r.node.start)]
        export(names, partial(load, tier), archive)
        first.clear()
        first.tick_until(lambda: not first.files)
    import_file(archive, SsdTier(TierOptions(str(folder), GIB)))
    with server(folder) as second:
        assert second.n_cached(ids) == 99


def test_a_prefix_is_forgotten_when_its_files_are_gone(tmp_path: Path) -> None:
    ids = words(1, 100)
    with server(tmp_path) as lab:
        ask(lab, ids)
        settle(lab)
        lab.forget(lab.top)
        assert lab.files == []
        ask(lab, ids)
        settle(lab)
        lab.disk.refuses_deletes = True
        with pytest.raises(NotForgotten, match="I/O error"):
            lab.forget(lab.top)
        lab.disk.refuses_deletes = False


def test_a_note_without_a_time_promises_nothing(tmp_path: Path) -> None:
    """Its writer was killed before it answered; an older time is never lowered."""
    tier = SsdTier(TierOptions(str(tmp_path), GIB))
    tier.bury("ab" * 32, 2.0)
    tier.bury("ab" * 32, 1.0)
    (tmp_path / "cleared" / ("cd" * 32)).touch()
    assert {root: at for root, at in tier.buried().items() if at > 0} == {"ab" * 32: 2.0}
