"""The SSD tier: a folder of record files under one limit, shared by any number of processes.

The folder is the index; there is no database to disagree with it. A file is written under another name
and renamed, so a name stands for a whole file. It is not fsynced: the page cache outlives a killed
process, and what a power cut tears the checksums find. A record is named by its content, so it is
written once in its life and never changed.

Reads take no lock. Everything that changes the folder happens under its lock (see _shared.py), except
for the long part, writing the bytes: those were set aside under the lock before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firn.cache.container import Header, Loaded, Packed, pack
from firn.cache.faults import Damaged, Missing, Refused, TierError, TierFault
from firn.cache.seal import Seal
from firn.cache.tiers import Entry, Gone, Name, Stored, Usage
from firn.cache.tiers._disk import MODELS, SHELVES, Disk, path_of
from firn.cache.tiers._meter import Meter, Tally
from firn.cache.tiers._mirror import Mirror, Temp
from firn.cache.tiers._pause import Pause
from firn.cache.tiers._shared import FolderLock, Page
from firn.cache.tiers._survey import load, reason_of
from firn.core.keys import KeyTokens

log = logging.getLogger("firn.cache")

DEFAULT_LIMIT_NBYTES = 10 << 30
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class ModelNote:
    """What people call a model; kept in the folder for `firn cache`, used for nothing else."""

    fingerprint: bytes
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class SsdSettings:
    folder: Path
    limit_nbytes: int
    write_budget_nbytes: int | None = None
    """Bytes that all processes together may write to the folder in 24 hours."""
    seal: Seal | None = None
    """Encrypts what is written; what another key encrypted is a miss."""
    model: ModelNote | None = None
    guest: bool = False
    """Keep to the limit that the folder's servers have; `limit_nbytes` is for a folder without."""
    touch_every_s: float = 60.0
    lock_timeout_s: float = 10.0
    retry_s: float = 1.0
    max_retry_s: float = 60.0


def default_limit(free_nbytes: int, used_nbytes: int = 0) -> int:
    """10 GiB, but never more than a quarter of what is free or used by the cache already."""
    return max(min(DEFAULT_LIMIT_NBYTES, (free_nbytes + used_nbytes) // 4), 0)


def suggested_limit(folder: Path) -> int:
    """The default limit for a folder that may not be there yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    stats = os.statvfs(there)
    used = sum(x.nbytes for shelf in SHELVES for x in Disk(folder).files(shelf))
    return default_limit(stats.f_bavail * stats.f_frsize, used)


class SsdTier:
    """Implements tiers.Tier. Thread-safe; its methods block and belong on I/O threads.

    The mutex guards the mirror and is never held while a record is read or written.
    """

    def __init__(
        self,
        settings: SsdSettings,
        *,
        disk: Disk | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._disk = disk or Disk(settings.folder)
        self._wall = wall
        self._tally = Tally()
        self._meter = Meter()
        self._mutex = threading.Lock()
        self._lock = FolderLock(self._disk, timeout_s=settings.lock_timeout_s)
        self._mirror = Mirror(
            self._disk,
            self._tally,
            limit_nbytes=settings.limit_nbytes,
            seal=settings.seal,
            wall=wall,
        )
        self._pause = Pause(
            first_s=settings.retry_s, max_s=settings.max_retry_s, clock=clock, wall=wall
        )
        self._is_announced = False

    # --- the contract ------------------------------------------------------------------------

    def scan(self) -> Iterator[Entry | Gone]:
        """As the contract says. A folder that cannot be locked or changed is still read."""
        try:
            with self._alone():
                self._mirror.look_ahead()
            with self._held(thorough=True) as page:
                self._mirror.shrink(page, self._mirror.limit_nbytes)
        except (OSError, TierFault) as e:
            self._failed(e)
            self._look_only()
        with self._alone():
            return iter(self._mirror.take_news())

    def write(self, header: Header, buffers: Sequence[Any]) -> Stored:
        try:
            with self._alone():
                self._pause.check()
            packed = pack(header, buffers, seal=self.settings.seal)
            try:
                stored = self._write(header, packed)
            except FileNotFoundError:
                stored = self._write(header, packed)  # someone deleted the folder: make it again
        except TierError as e:
            self._tally.drop(e.reason)
            if isinstance(e, TierFault) and e.reason != "paused":
                self._failed(e)
            raise
        except OSError as e:
            fault = self._failed(e)
            self._tally.drop(fault.reason)
            raise fault from e
        if stored.new:
            self._tally.add(writes=1, bytes_written=packed.nbytes)
            with self._alone():
                self._pause.worked()
        return stored

    def read(self, name: Name, expect: KeyTokens | None = None) -> Loaded:
        path = path_of(name)
        file = self._mirror.catalog.get(path)
        try:
            if file is not None and not file.readable:
                raise Missing("unreadable")
            with self._meter.read() as came:
                loaded = load(self._disk, path, name, seal=self.settings.seal)
                nbytes = sum(len(b) for b in loaded.buffers)
                came(nbytes)
            if expect is not None and not np.array_equal(loaded.header.tokens, expect):
                raise Damaged("another record's bytes", "tokens differ")
        except Missing as e:
            self._tally.add(missing=1)
            self._note_missing(path, e)
            raise
        except Damaged as e:
            self._tally.add(damaged=1)
            log.warning("a damaged record goes to quarantine: %s (%s)", path, e.message)
            self._quarantine(path, known=file is not None)
            raise
        except TierFault:
            self._tally.add(read_faults=1)
            raise
        self._tally.add(reads=1, bytes_read=nbytes)
        return loaded

    def delete(self, name: Name) -> None:
        path = path_of(name)
        try:
            with self._held() as page:
                if self._mirror.catalog.get(path) is not None:
                    self._mirror.unlink(page, [path])
                    self._tally.add(deletes=1)
        except OSError as e:
            raise TierFault(reason_of(e), e.strerror or "") from e

    def touch(self, names: Iterable[Name]) -> None:
        now = self._wall()
        with self._alone():
            for name in names:
                file = self._mirror.catalog.get(path_of(name))
                if file is None:
                    continue
                self._mirror.catalog.touch(file, now)
                if now - file.stamped >= self.settings.touch_every_s:
                    file.stamped = now
                    # A read-only or deleted file is found out about elsewhere.
                    with contextlib.suppress(OSError):
                        self._disk.set_mtime(file.path, now)
                        self._tally.add(touches=1)

    def usage(self) -> Usage:
        """Takes no lock either: numbers that change together may be a moment apart."""
        mirror, catalog = self._mirror, self._mirror.catalog
        return Usage(
            nbytes=mirror.nbytes,
            limit_nbytes=mirror.limit_nbytes,
            status=self._pause.status,
            n_files=dict(catalog.n_files),
            part_nbytes=dict(catalog.part_nbytes),
            n_foreign=catalog.n_unreadable,
            n_orphans=catalog.n_orphans,
            n_quarantined=mirror.n_quarantined,
            read_nbytes_per_s=self._meter.nbytes_per_s,
            counts=self._tally.counts,
            drops=self._tally.drops,
        )

    # --- beyond the contract: for people -----------------------------------------------------

    def evict_to(self, nbytes: int) -> int:
        """Shrink the folder to `nbytes`, as far as it can be; returns what was let go."""
        try:
            with self._held(thorough=True) as page:
                before = self._mirror.nbytes
                self._mirror.shrink(page, nbytes)
                return before - self._mirror.nbytes
        except OSError as e:
            raise TierFault(reason_of(e), e.strerror or "") from e

    def delete_all(self, paths: Iterable[str]) -> int:
        """Remove these files of the folder, foreign ones too; returns the bytes let go."""
        try:
            with self._held(thorough=True) as page:
                before = self._mirror.nbytes
                self._mirror.unlink(page, [p for p in paths if self._mirror.knows(p)])
                return before - self._mirror.nbytes
        except OSError as e:
            raise TierFault(reason_of(e), e.strerror or "") from e

    def quarantine(self, path: str) -> None:
        """Move a file out of the way. Raises TierFault."""
        try:
            with self._held() as page:
                self._mirror.quarantine(page, path)
        except OSError as e:
            raise TierFault(reason_of(e), e.strerror or "") from e

    def close(self) -> None:
        with self._alone():
            self._lock.close()

    # --- inside ------------------------------------------------------------------------------

    def _look_only(self) -> None:
        try:
            with self._alone():
                self._mirror.refresh(None)
        except OSError as e:
            raise TierFault(reason_of(e), e.strerror or "") from e

    def _write(self, header: Header, packed: Packed) -> Stored:
        with self._held() as page:
            hour = int(self._wall()) // HOUR_S
            budget = self.settings.write_budget_nbytes
            if budget is not None and page.day_nbytes(hour) + packed.nbytes > budget:
                raise Refused("write budget")
            temp = self._mirror.reserve(page, header, packed.nbytes)
        if temp is None:
            return Stored(0, new=False)
        try:
            self._disk.write(temp.fd, packed.pieces)
            with self._held() as page:
                page.add_written(hour, packed.nbytes)
                nbytes = self._mirror.commit(page, temp)
        finally:
            self._finish(temp)
        return Stored(nbytes, new=True, evicted=temp.evicted)

    def _finish(self, temp: Temp) -> None:
        """Closing lets go of the file's own lock; what is not committed by now goes."""
        try:
            with self._alone():
                self._mirror.abandon(temp)
        except (OSError, TierFault) as e:
            log.debug("%s stays until the next scan: %s", temp.path, e)
        finally:
            self._disk.close(temp.fd)

    def _note_missing(self, path: str, why: Missing) -> None:
        with contextlib.suppress(TierFault), self._alone():
            self._mirror.doubt([path[:2]])
            if why.reason != Missing().reason:
                self._mirror.mark_unreadable(path)

    def _quarantine(self, path: str, *, known: bool) -> None:
        try:
            with self._held() as page:
                if self._mirror.knows(path) or not known:
                    self._mirror.quarantine(page, path)
        except (OSError, TierFault) as e:
            log.warning("%s cannot be moved, and is not read again: %s", path, e)
            with self._alone():
                self._mirror.mark_unreadable(path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Among this process's threads."""
        if not self._mutex.acquire(timeout=self.settings.lock_timeout_s):
            raise TierFault("locked", "another thread has held the folder for long")
        try:
            yield
        finally:
            self._mutex.release()

    @contextlib.contextmanager
    def _held(self, *, thorough: bool = False) -> Iterator[Page]:
        """Alone among all processes, with a mirror that is up to date."""
        with self._alone(), self._lock.hold() as page:
            try:
                self._mirror.limit_nbytes = self._limit(page)
                self._mirror.refresh(page, thorough=thorough)
                if not self._is_announced or not page.limit_nbytes:
                    self._announce(page)
                yield page
            except OSError:
                self._mirror.doubt()  # a change may have been made in part
                raise

    def _announce(self, page: Page) -> None:
        self._is_announced = True
        if self.settings.guest:
            return
        page.set_limit(self.settings.limit_nbytes)
        self._mirror.limit_nbytes = self._limit(page)
        model = self.settings.model
        if model is not None:
            text = json.dumps({"name": model.name, "path": model.path})
            path = f"{MODELS}/{model.fingerprint.hex()}.json"
            self._mirror.add_note(page, path, text.encode())

    def _limit(self, page: Page) -> int:
        """Never above what this process was told, nor what the one that started last was told."""
        own = self.settings.limit_nbytes
        if not page.limit_nbytes:
            return own
        return page.limit_nbytes if self.settings.guest else min(own, page.limit_nbytes)

    def _failed(self, error: OSError | TierFault) -> TierFault:
        fault = error
        if isinstance(fault, OSError):
            fault = TierFault(reason_of(fault), fault.strerror or str(fault))
        with contextlib.suppress(TierFault), self._alone():
            self._pause.failed(fault)
        return fault


def open_tier(folder: Path, limit_nbytes: int) -> SsdTier:
    return SsdTier(SsdSettings(folder, limit_nbytes))
