"""The SSD tier: a folder of record files under one limit, shared by any number of processes.

A file's mtime is its stamp: foreign files are evicted first, then the lowest stamp. Nothing is
fsynced: the page cache outlives a killed process, and checksums detect what a power failure tears.
Reads take no lock. The folder is changed under its lock (see _folder.py), except that bytes are
written without it, to a temp file whose size was reserved before. So at every moment

    records + folders + temp files at their reserved size + quarantine <= limit

On a full disk, the limit is what the folder has at that moment (see _space.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from math import inf
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from firn.cache.storage.faults import Damaged, Missing, TierError, TierFault, TierFull, Unusable
from firn.cache.storage.tally import Tally
from firn.cache.tiers import (
    AHEAD_S,
    PEEK_NBYTES,
    Buffer,
    Gone,
    ScannedRecord,
    TierOptions,
    TierUsage,
    WriteResult,
)
from firn.cache.tiers._backoff import Backoff
from firn.cache.tiers._folder import (
    BLOCK_NBYTES,
    COUNTED,
    DEFAULT_LIMIT_NBYTES,
    INDEX,
    QUARANTINE,
    TMP,
    Disk,
    FileStat,
    FolderLock,
    Page,
    allocated,
    fault_of,
    path_of,
    quarantine_surplus,
    raised_limit,
)
from firn.cache.tiers._known import UNLISTED, KnownFiles, is_foreign
from firn.cache.tiers._space import FULL, DiskSpace
from firn.core.clock import SYSTEM_CLOCK, Clock

SLACK_NBYTES = 2 * BLOCK_NBYTES
"""How much a new name may add to the size of folders."""
HOUR_S = 3600
T = TypeVar("T")
SCAN_BATCH = 128
SCAN_THREADS = 4
SLOW_S = 3e-4
"""A file for which a scan waits longer than this comes from the disk, not from the page cache."""


class SsdTier:
    """Implements tiers.Tombstones. Thread-safe; its methods block and belong on I/O threads.

    The mutex guards what is known of the folder. It is never held while a record is read or written.
    """

    def __init__(
        self,
        options: TierOptions,
        *,
        guest: bool = False,
        lock_timeout_s: float = 10.0,
        retry_s: float = 1.0,
        max_retry_s: float = 60.0,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """guest: keep to the limit that the folder's servers have set, if there were any."""
        folder = Path(options.location)
        self._has_auto_limit = options.limit_nbytes is None
        self._own_limit = options.limit_nbytes or 0
        self._budget_nbytes = options.write_budget_nbytes
        self._guest = guest
        self._clock = clock
        self._disk = disk or Disk(folder)
        self._lock = FolderLock(self._disk, timeout_s=lock_timeout_s)
        self._lock_timeout_s = lock_timeout_s
        self._mutex = threading.Lock()
        self._known = KnownFiles(self._disk, clock)
        self._backoff = Backoff(
            paused=f"the SSD cache pauses writing to {folder}",
            resumed=f"the SSD cache writes to {folder} again",
            first_s=retry_s,
            max_s=max_retry_s,
            clock=clock,
        )
        self._reading = Backoff(
            paused=f"the SSD cache cannot read a record in {folder}, which costs a miss",
            resumed=f"the SSD cache reads from {folder} again",
            clock=clock,
        )
        """Only for the log: each record has its own pause."""
        self._space = DiskSpace(folder, clock, first_s=retry_s, max_s=max_retry_s)
        self._tally = Tally()
        self._serial = count()
        self._has_joined = False
        self._nbytes = self._day_nbytes = 0
        self._limit_nbytes = DEFAULT_LIMIT_NBYTES if self._has_auto_limit else self._own_limit

    # --- the contract ------------------------------------------------------------------------

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        """A folder that cannot be locked or changed is still read."""
        counters = None
        try:
            with self._locked() as page:
                counters = page.counters.copy()
        except (OSError, TierFault) as e:
            self._failed(e)
        measured = self._list_changed(counters)
        try:
            if counters is not None:
                with self._locked() as page:
                    for i, nbytes in measured.items():  # users may have moved files, too
                        if page.counters[i] == counters[i]:
                            page.nbytes[i] = nbytes
                    page.save()
                    self._sweep_temps()
                    self._shrink(page, self._limit_nbytes)
        except (OSError, TierFault) as e:
            self._failed(e)
        with self._exclusive():
            self._known.report_again(self._clock.elapsed())
            gone, new = self._known.take_reports()
        yield from map(Gone, gone)
        yield from self._heads(new)

    def read(self, name: str, n: int | None = None) -> memoryview:
        if name in self._known.unreadable:
            self._tally.add(read_faults=1)
            raise Unusable("unreadable")
        try:
            fd = self._disk.open(path_of(name))
        except (FileNotFoundError, NotADirectoryError) as e:
            self._known.relist_later(name[:2])
            self._tally.add(missing=1)
            raise Missing from e
        except OSError as e:
            raise self._cannot_read(name, e) from e
        try:
            size = self._disk.stat_open(fd).size
            view = self._disk.read_first(fd, size if n is None else min(n, size))
        except OSError as e:
            raise self._cannot_read(name, e) from e
        except EOFError as e:
            raise Damaged("truncated", str(e)) from e
        finally:
            self._disk.close(fd)
        self._tally.add(reads=1, bytes_read=len(view))
        self._known.was_read(name)
        if self._reading.is_paused:
            self._reading.worked()
        return view

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        try:
            self._backoff.check()
            stored = self._with_room(lambda: self._write(name, pieces, used_at), need=_need(pieces))
        except (OSError, TierError) as e:
            fault = self._failed(e)
            self._tally.drop(fault.reason)
            raise fault from e
        if stored.new:
            self._tally.add(writes=1, bytes_written=sum(map(len, pieces)))
            self._backoff.worked()
        return stored

    def touch(self, stamps: Mapping[str, float]) -> None:
        """The highest stamps first, so that other processes always see the right order."""
        latest = self._clock.wall() + AHEAD_S
        for name, stamp in sorted(stamps.items(), key=lambda item: -item[1]):
            # Reads and scans notice files that are read-only or deleted.
            with contextlib.suppress(OSError):
                file = self._disk.stat(path_of(name))
                if file is not None and not stamp <= file.mtime <= latest:
                    self._disk.set_mtime(path_of(name), stamp)
                    self._tally.add(touches=1)

    def delete(self, name: str, *, keep: bool = False) -> None:
        try:
            with self._locked() as page:
                file = self._disk.stat(path_of(name))
                if file is None:
                    self._known.forget(name, 0)
                elif keep:
                    self._set_aside(page, name, file.nbytes)
                else:
                    self._remove(page, name, file.nbytes)
                    self._tally.add(deletes=1)
                    self._nbytes -= file.nbytes  # recounting would take longer than deleting
                self._known.set_reported([name])
        except (OSError, TierFault) as e:
            if keep:
                self._mark_unreadable(name)
            raise fault_of(e) if isinstance(e, OSError) else e from e

    def bury(self, root: str, at: float) -> None:
        try:
            self._with_room(lambda: self._bury(root, at), need=BLOCK_NBYTES)
        except OSError as e:
            raise fault_of(e) from e

    def buried(self) -> Mapping[str, float]:
        try:
            return self._disk.buried()
        except OSError as e:
            raise fault_of(e) from e

    def usage(self) -> TierUsage:
        """Takes no lock: numbers that change together may be a moment apart."""
        by_part = self._known.by_part()
        n_foreign, _ = by_part.pop("", (0, 0))
        return TierUsage(
            nbytes=self._nbytes,
            limit_nbytes=self._limit_nbytes,
            status=self._backoff.status,
            n_files={part: n for part, (n, _) in by_part.items()},
            part_nbytes={part: nbytes for part, (_, nbytes) in by_part.items()},
            n_foreign=n_foreign + len(self._known.unreadable),
            n_quarantined=self._known.n_quarantined,
            counts=self._tally.counts,
            drops=self._tally.drops,
            day_nbytes=self._day_nbytes,
            day_limit_nbytes=self._budget_nbytes,
        )

    def evict_to(self, nbytes: int) -> int:
        """Shrink the folder to `nbytes`, or as far as possible; returns the bytes that were freed."""
        try:
            with self._locked() as page:
                before = self._count(page)
                self._shrink(page, nbytes)
                return before - self._nbytes
        except OSError as e:
            raise fault_of(e) from e

    def close(self) -> None:
        with self._exclusive():
            self._lock.close()

    # --- reading -----------------------------------------------------------------------------

    def _cannot_read(self, name: str, error: OSError) -> TierFault:
        """The disk may well read it later: a scan reports it again, each time after a longer while."""
        fault = TierFault(fault_of(error).reason, f"{error.strerror} ({path_of(name)})")
        self._tally.add(read_faults=1)
        self._reading.failed(fault)
        self._known.report_later(name, self._clock.elapsed())
        return fault

    def _list_changed(self, counters: npt.NDArray[np.int64] | None) -> dict[int, int]:
        """List what others changed, a subfolder at a time; returns the bytes of each one listed."""
        measured: dict[int, int] = {}
        for i, sub in enumerate(COUNTED):
            counter = UNLISTED if counters is None else int(counters[i])
            try:
                with self._exclusive():
                    if self._known.is_changed(sub, counter):
                        measured[i] = self._known.relist(sub, counter)
            except OSError as e:
                raise fault_of(e) from e
        return measured

    def _heads(self, names: Sequence[str]) -> Iterator[ScannedRecord]:
        """One thread is fastest for files in the page cache, several for all others."""
        is_slow = False
        with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="firn-scan") as pool:
            for at in range(0, len(names), SCAN_BATCH):
                some = names[at : at + SCAN_BATCH]
                began, worked = time.perf_counter(), time.thread_time()
                heads = list(pool.map(self._head, some) if is_slow else map(self._head, some))
                waited = (time.perf_counter() - began) - (time.thread_time() - worked)
                is_slow = is_slow or waited > SLOW_S * len(some)
                yield from (head for head in heads if head is not None)

    def _head(self, name: str) -> ScannedRecord | None:
        """None: it is gone, or may not be read, or is tried again in the next scan."""
        try:
            fd = self._disk.open(path_of(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            self._mark_unreadable(name)
            return None
        except OSError as e:
            self._cannot_read(name, e)
            return None
        try:
            file = self._disk.stat_open(fd)
            head = self._disk.read_first(fd, min(file.size, PEEK_NBYTES))
            return ScannedRecord(name, head, file.size, file.mtime)
        except EOFError:
            return ScannedRecord(name, b"", 0, 0.0)  # it has no head
        except OSError as e:
            self._cannot_read(name, e)
            return None
        finally:
            self._disk.close(fd)

    def _mark_unreadable(self, name: str) -> None:
        with contextlib.suppress(TierFault, OSError), self._exclusive():
            file = self._disk.stat(path_of(name))
            if file is not None:
                self._known.mark_unreadable(name, file.mtime)

    # --- writing -----------------------------------------------------------------------------

    def _with_room(self, write: Callable[[], T], *, need: int) -> T:
        """Write; on a full disk, within what the folder has already, evicting its oldest records."""
        try:
            return self._with_folder(write)
        except OSError as e:
            if e.errno not in FULL:
                raise
            full = e
        with self._locked() as page:
            self._space.ran_out(self._count(page))
        try:
            return self._with_folder(write)
        except (OSError, TierFull) as e:
            evictable = sum(nbytes for _, nbytes in self._known.by_part().values())
            if (
                isinstance(e, OSError) or evictable < need
            ):  # when the pause is over, all of the limit is tried again
                self._space.forget()
                raise full from None
            raise

    def _with_folder(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except FileNotFoundError:  # someone deleted the folder: make it again
            return write()

    def _bury(self, root: str, at: float) -> None:
        with self._locked() as page:
            if self._space.is_full:
                self._evict(page, BLOCK_NBYTES, used_at=inf, must=False)
            self._disk.bury(root, at)

    def _write(self, name: str, pieces: Sequence[Buffer], used_at: float) -> WriteResult[str]:
        nbytes, need = sum(map(len, pieces)), _need(pieces)
        hour = int(self._clock.wall()) // HOUR_S
        with self._locked() as page:
            page.check_budget(self._budget_nbytes, hour, nbytes)
            if self._is_stored(name):
                self._known.set_present(name, self._disk.stat(path_of(name)))
                return WriteResult(0, new=False)
            evicted = self._make_room(page, need, used_at)
            temp = f"{TMP}/{name}.{os.getpid()}.{next(self._serial)}.{need}.tmp"
            fd = self._disk.create(temp)
            self._nbytes += need
        try:
            self._disk.write(fd, pieces)
            self._disk.set_mtime(temp, used_at)
            with self._locked() as page:
                page.add_written(hour, nbytes)
                taken = self._commit(page, name, temp)
                self._known.set_reported([name, *evicted])
                self._count(page)
        except BaseException:
            with contextlib.suppress(OSError):  # else it stays until the next scan
                self._disk.unlink(temp)
            raise
        finally:
            self._disk.close(fd)
        return WriteResult(taken, new=True, evicted=tuple(evicted))

    def _is_stored(self, name: str) -> bool:
        """Whether the record is there, as far as it can be read, or being written."""
        if self._known.is_readable(name) and self._disk.stat(path_of(name)) is not None:
            return True
        return any(
            temp.name.startswith(f"{name}.") and not self._sweep(temp)
            for temp in self._disk.temps()
        )

    def _commit(self, page: Page, name: str, temp: str) -> int:
        """Give a complete file its name; returns the bytes it takes up."""
        sub, path = name[:2], path_of(name)
        replaced = self._disk.stat(path)
        n_before = 0 if replaced is None else replaced.nbytes
        with self._change(page, sub):
            self._disk.rename(temp, path)
            file = self._disk.stat(path)
            if file is None:
                raise FileNotFoundError(path)
            page.nbytes[INDEX[sub]] += file.nbytes - n_before
            self._known.forget(name, n_before)
            self._known.add(name, file)
        return file.nbytes

    def _sweep_temps(self) -> None:
        for temp in self._disk.temps():
            self._tally.add(stale_temps=self._sweep(temp))

    def _sweep(self, temp: FileStat) -> bool:
        """Remove a temp file if its writer is dead; returns whether it was."""
        path = f"{TMP}/{temp.name}"
        is_dead = self._disk.is_abandoned(path, self._clock.wall() - temp.mtime)
        if is_dead:
            self._disk.unlink(path)
        return is_dead

    # --- making room -------------------------------------------------------------------------

    def _make_room(self, page: Page, nbytes: int, used_at: float) -> list[str]:
        """Evict until `nbytes` more fit; returns the names. Raises TierFull before evicting any."""
        over = self._count(page) + nbytes - self._limit_nbytes
        return self._evict(page, over, used_at=used_at, must=True)

    def _shrink(self, page: Page, to_nbytes: int) -> None:
        """Evict down to `to_nbytes`, or as far as possible. The next scan reports the evictions."""
        self._evict(page, self._count(page) - to_nbytes, used_at=inf, must=False)
        self._count(page)

    def _evict(self, page: Page, over: int, *, used_at: float, must: bool) -> list[str]:
        if over <= 0:
            return []
        for i in np.flatnonzero(page.counters != self._known.listed_at):
            self._known.relist(COUNTED[i], int(page.counters[i]))
        old: list[FileStat] = []
        for file in self._disk.quarantined():
            if over > 0:
                old.append(file)
                over -= file.nbytes
        victims: dict[str, int] = {}
        try:
            while over > 0 and (oldest := self._known.oldest(used_at=used_at, victims=victims)):
                victims[oldest.name] = oldest.nbytes
                over -= oldest.nbytes
            if over > 0 and must:
                raise TierFull(f"{over} bytes over the limit of {self._limit_nbytes}")
            self._drop_quarantined(page, old)
            for key, nbytes in victims.items():
                self._remove(page, key, nbytes)
                self._known.report(key, is_there=False)
                self._tally.add(evictions=1, bytes_evicted=nbytes)
        finally:
            self._known.put_back(victims)  # those that are still there
        return [key for key in victims if not is_foreign(key)]

    def _remove(self, page: Page, key: str, nbytes: int) -> None:
        sub = key[:2]
        with self._change(page, sub):
            self._disk.unlink(path_of(key))
            page.nbytes[INDEX[sub]] -= nbytes
            self._known.forget(key, nbytes)
            if self._known.is_empty(sub):
                self._disk.rmdir(sub)

    # --- quarantine --------------------------------------------------------------------------

    def _set_aside(self, page: Page, name: str, nbytes: int) -> None:
        sub = name[:2]
        with self._change(page, sub), self._change(page, QUARANTINE):
            self._disk.rename(path_of(name), f"{QUARANTINE}/{name}.{int(self._clock.wall() * 1e6)}")
            page.nbytes[INDEX[sub]] -= nbytes
            page.nbytes[INDEX[QUARANTINE]] += nbytes
            self._known.forget(name, nbytes)
        self._tally.add(quarantined=1)
        files = self._disk.quarantined()
        n_surplus = quarantine_surplus(files, limit_nbytes=self._limit_nbytes)
        self._drop_quarantined(page, files[:n_surplus])
        self._known.n_quarantined = len(files) - n_surplus

    def _drop_quarantined(self, page: Page, files: Sequence[FileStat]) -> None:
        if files:
            with self._change(page, QUARANTINE):
                for file in files:
                    self._disk.unlink(f"{QUARANTINE}/{file.name}")
                    page.nbytes[INDEX[QUARANTINE]] -= file.nbytes
            self._known.n_quarantined -= len(files)

    # --- the lock and the page ---------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep out all other threads of this process."""
        if not self._mutex.acquire(timeout=self._lock_timeout_s):
            raise TierFault("locked", "timed out waiting for another thread to release the folder")
        try:
            yield
        finally:
            self._mutex.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Page]:
        """Keep out all other threads and processes; yields a page whose numbers are right."""
        with self._exclusive(), self._lock.hold() as page:
            doubtful = np.flatnonzero(page.counters & 1)
            for i in doubtful:
                page.nbytes[i] = self._known.relist(COUNTED[i], int(page.counters[i]) + 1)
                page.counters[i] += 1
            own = before = self._own_limit
            if self._has_auto_limit and own < DEFAULT_LIMIT_NBYTES:
                free, used = self._disk.free_nbytes(), int(page.nbytes.sum())
                own = self._own_limit = raised_limit(own, free_nbytes=free, used_nbytes=used)
            is_ours = page.limit_nbytes in (0, before) and own != page.limit_nbytes
            is_new_limit = not self._guest and (is_ours or not self._has_joined)
            if is_new_limit:
                page.limit_nbytes = own
            if is_new_limit or len(doubtful):
                page.save()
            self._has_joined = True
            # Never above the limit of this process, nor that of the one that started last.
            last = page.limit_nbytes or own
            self._limit_nbytes = self._space.limited(
                last if self._guest else min(own, last),
                used=lambda: self._count(page),
                free=self._disk.free_nbytes,
            )
            yield page
            self._day_nbytes = page.day_nbytes(int(self._clock.wall()) // HOUR_S)

    @contextlib.contextmanager
    def _change(self, page: Page, sub: str) -> Iterator[None]:
        """Wraps a change to a subfolder: dying or failing inside leaves its counter odd."""
        i = INDEX[sub]
        is_known = self._known.listed_at[i] == page.counters[i]
        before, _ = self._disk.subfolder(sub)
        page.counters[i] += 1
        page.save()
        yield
        after, changed_ns = self._disk.subfolder(sub)
        page.nbytes[i] += after - before
        page.counters[i] += 1
        page.save()
        if is_known:
            self._known.set_changed(sub, int(page.counters[i]), changed_ns)

    def _count(self, page: Page) -> int:
        """Count all bytes of the folder."""
        self._nbytes = int(page.nbytes.sum()) + self._disk.other_nbytes()
        return self._nbytes

    def _failed(self, error: OSError | TierError) -> TierError:
        """A fault of the disk pauses writing; a refusal does not."""
        if isinstance(error, OSError):
            error = fault_of(error)
        if isinstance(error, TierFault) and error.reason != "paused":
            self._backoff.failed(error)
        return error


def _need(pieces: Sequence[Buffer]) -> int:
    """How many bytes of the folder writing these may take."""
    return allocated(sum(map(len, pieces))) + SLACK_NBYTES


def open_tier(options: TierOptions) -> SsdTier:
    return SsdTier(options)
