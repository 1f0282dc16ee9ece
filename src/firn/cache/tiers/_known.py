"""What this process knows of the folder's record files: their stamps, and what the next scan reports.

Compact, because there may be 100,000 files: each has its stamp in its subfolder's dict, and an
entry in a heap. A stamp here may be lower than the file's, never higher: other processes use files
without telling this one.

A key is a record's name, or the path of a foreign file (see `key_of`).

Owner: the tier, under its mutex.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from firn.cache.tiers import AHEAD_S
from firn.cache.tiers._folder import (
    COUNTED,
    INDEX,
    QUARANTINE,
    SUBFOLDERS,
    SUFFIX,
    Disk,
    FileStat,
    key_of,
    path_of,
)
from firn.core.clock import Clock

FIRST = -inf
"""The stamp of files that are evicted before all others: foreign ones, and those that cannot be read."""
UNLISTED = -1
FIRST_PAUSE_S, MAX_PAUSE_S = 8.0, 3600.0
"""Pauses before a file is tried again that the disk has failed to read."""
HEAP_SLACK = 1024
"""The heap is tidied when it has this many entries more than twice the number of files."""


@dataclass(eq=False, slots=True)
class Subfolder:
    """What is known of one subfolder of records."""

    changed_ns: int = 0
    """When names in it last changed."""
    stamps: dict[str, float] = field(default_factory=dict)
    """By key."""
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of files and bytes by part, which follows the dot in names; '': foreign files."""

    def count(self, key: str, nbytes: int, *, n: int = 1) -> None:
        part = "" if is_foreign(key) else key[65:]
        n_files, total = self.parts.get(part, (0, 0))
        self.parts[part] = n_files + n, total + n * nbytes


def is_foreign(key: str) -> bool:
    return "/" in key


class KnownFiles:
    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._subfolders = {sub: Subfolder() for sub in SUBFOLDERS}
        self._heap: list[tuple[float, str]] = []
        self._highest = FIRST
        """No stamp is higher."""
        self._unreported: dict[str, bool] = {}
        """Records about which the caller is wrong: whether each is actually there."""
        self._faulty: dict[str, tuple[int, float]] = {}
        """Files that the disk has failed to read: how often, and when they are reported again."""
        self.unreadable: dict[str, float] = {}
        """Files that must not be read, with their mtime: a new file may take over the name."""
        self.listed_at: npt.NDArray[np.int64] = np.full(len(COUNTED), UNLISTED, dtype=np.int64)
        """The page's counters when the subfolders were last listed."""
        self.n_quarantined = 0

    # --- learning ----------------------------------------------------------------------------

    def is_changed(self, sub: str, counter: int) -> bool:
        """Whether to list a subfolder again.

        The page's counter shows a change by a firn process, the mtime one by a user, as with `rm`.
        """
        if sub == QUARANTINE or counter == UNLISTED or self.listed_at[INDEX[sub]] != counter:
            return True
        return self._disk.subfolder(sub)[1] != self._subfolders[sub].changed_ns

    def relist(self, sub: str, counter: int) -> int:
        """List a subfolder; returns the bytes it takes up. The next scan reports what changed."""
        total, changed_ns = self._disk.subfolder(sub)  # first: changes made meanwhile show later
        files = self._disk.quarantined() if sub == QUARANTINE else self._disk.files(sub)
        self.listed_at[INDEX[sub]] = counter
        if sub == QUARANTINE:
            self.n_quarantined = len(files)
            return total + sum(file.nbytes for file in files)
        subfolder, known = Subfolder(changed_ns), self._subfolders[sub].stamps
        for file in files:
            if file.name.endswith(SUFFIX):
                total += file.nbytes
                self._learn(subfolder, key_of(sub, file.name), file, known)
        for key in known.keys() - subfolder.stamps.keys():
            self.unreadable.pop(key, None)
            self._faulty.pop(key, None)
            self.report(key, is_there=False)
        self._subfolders[sub] = subfolder
        return total

    def _learn(
        self, subfolder: Subfolder, key: str, file: FileStat, known: Mapping[str, float]
    ) -> None:
        subfolder.count(key, file.nbytes)
        is_other = self.unreadable.get(key, file.mtime) != file.mtime
        if is_other:
            del self.unreadable[key]
        is_usable = not is_foreign(key) and key not in self.unreadable
        subfolder.stamps[key] = stamp = self._stamp(file.mtime) if is_usable else FIRST
        self._highest = max(self._highest, stamp)
        if key not in known or stamp < known[key]:
            heapq.heappush(self._heap, (stamp, key))
        if is_usable and (is_other or key not in known):
            self.report(key, is_there=True)

    def _stamp(self, mtime: float) -> float:
        """An mtime far in the future is moved far into the past; such files keep their order."""
        return mtime if mtime <= self._clock.wall() + AHEAD_S else mtime - 1e11

    def add(self, name: str, file: FileStat) -> None:
        """A file that this process has written."""
        subfolder = self._subfolders[name[:2]]
        subfolder.count(name, file.nbytes)
        subfolder.stamps[name] = file.mtime
        self._highest = max(self._highest, file.mtime)
        heapq.heappush(self._heap, (file.mtime, name))
        if len(self._heap) > HEAP_SLACK + 2 * sum(len(s.stamps) for s in self._subfolders.values()):
            self._tidy_heap()

    def forget(self, key: str, nbytes: int) -> None:
        subfolder = self._subfolders[key[:2]]
        self.unreadable.pop(key, None)
        self._faulty.pop(key, None)
        if subfolder.stamps.pop(key, None) is not None:
            subfolder.count(key, nbytes, n=-1)

    def mark_unreadable(self, name: str, mtime: float) -> None:
        self.unreadable[name] = mtime
        self._subfolders[name[:2]].stamps[name] = FIRST
        heapq.heappush(self._heap, (FIRST, name))

    def relist_later(self, sub: str) -> None:
        """What is known of the subfolder is wrong: list it again at the next chance."""
        self.listed_at[INDEX[sub]] = UNLISTED

    def set_changed(self, sub: str, counter: int, changed_ns: int) -> None:
        """This process has changed the subfolder, and knows how."""
        self.listed_at[INDEX[sub]] = counter
        if sub != QUARANTINE:
            self._subfolders[sub].changed_ns = changed_ns

    # --- reporting ---------------------------------------------------------------------------

    def is_empty(self, sub: str) -> bool:
        return not self._subfolders[sub].stamps

    def report(self, key: str, *, is_there: bool) -> None:
        """Have the next scan report that a record appeared or disappeared.

        One that does both between two scans is not reported: the caller is right again.
        """
        if self._unreported.get(key) == (not is_there):
            del self._unreported[key]
        elif not is_foreign(key):
            self._unreported[key] = is_there

    def report_later(self, name: str, now: float) -> None:
        """The disk has failed to read it, and the caller takes it for gone: report it again after a
        pause, which doubles with each failure. Any thread."""
        n_failures, _ = self._faulty.get(name, (0, 0.0))
        pause_s = min(FIRST_PAUSE_S * 2**n_failures, MAX_PAUSE_S)
        self._faulty[name] = n_failures + 1, now + pause_s

    def report_again(self, now: float) -> None:
        """Report what may be readable again by now, if it is still there."""
        for name, (n_failures, at) in list(self._faulty.items()):
            if at <= now and name in self._subfolders[name[:2]].stamps:
                self.report(name, is_there=True)
                self._faulty[name] = n_failures, inf

    def was_read(self, name: str) -> None:
        """The disk can read it again. Any thread."""
        self._faulty.pop(name, None)

    def is_readable(self, name: str) -> bool:
        """Whether nothing is known that speaks against it. Any thread."""
        return name not in self.unreadable and name not in self._faulty

    def set_reported(self, names: Iterable[str]) -> None:
        """The caller has learned of these by other means."""
        for name in names:
            self._unreported.pop(name, None)

    def set_present(self, name: str, file: FileStat | None) -> None:
        """A write has found the record there already, and the caller knows it."""
        self.set_reported([name])
        if file is not None and name not in self._subfolders[name[:2]].stamps:
            self.add(name, file)

    def take_reports(self) -> tuple[list[str], list[str]]:
        """Names of records that are gone, and of those that are new, the highest stamps first."""
        reports, self._unreported = self._unreported, {}
        gone = [name for name, is_there in reports.items() if not is_there]
        new = [name for name, is_there in reports.items() if is_there]
        lookups = (self._subfolders[name[:2]].stamps.get(name, FIRST) for name in new)
        # NumPy's sort lets other threads run, and a generator lets them run between two items.
        stamps = np.fromiter(lookups, np.float64, len(new))
        return gone, [new[i] for i in np.argsort(-stamps, kind="stable")]

    def by_part(self) -> dict[str, tuple[int, int]]:
        """Numbers of files and bytes by part. Any thread."""
        n_files: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for subfolder in self._subfolders.values():
            for part, (n, total) in list(subfolder.parts.items()):
                n_files[part] += n
                nbytes[part] += total
        return {part: (n, nbytes[part]) for part, n in n_files.items() if n}

    # --- the order of eviction ---------------------------------------------------------------

    def oldest(self, *, used_at: float, victims: Collection[str]) -> FileStat | None:
        """The next file to evict other than the victims, with its key as its name.

        None: all others were used later than `used_at`. The file is removed from the heap;
        `put_back` those that are kept after all.
        """
        self._believe_clock()
        while self._heap:
            stamp, key = self._heap[0]
            known = self._subfolders[key[:2]].stamps.get(key)
            file = None if known is None or key in victims else self._disk.stat(path_of(key))
            if known is None or file is None:
                heapq.heappop(self._heap)  # deleted, or a second entry of a victim
                if known is not None and key not in victims:
                    del self._subfolders[key[:2]].stamps[key]
                    self.report(key, is_there=False)
                    self.relist_later(key[:2])
                continue
            if known > FIRST:  # another process may have used it
                self._subfolders[key[:2]].stamps[key] = known = self._stamp(file.mtime)
                self._highest = max(self._highest, known)
            if known > stamp:
                heapq.heapreplace(self._heap, (known, key))
                continue
            if stamp > used_at:
                return None
            heapq.heappop(self._heap)
            return file._replace(name=key)
        return None

    def _believe_clock(self) -> None:
        """After the wall clock went back, what was written while it was far ahead goes first."""
        if self._stamp(self._highest) == self._highest:
            return
        self._highest = FIRST
        for subfolder in self._subfolders.values():
            subfolder.stamps = {key: self._stamp(at) for key, at in subfolder.stamps.items()}
            self._highest = max(self._highest, *subfolder.stamps.values(), FIRST)
        self._tidy_heap()

    def _tidy_heap(self) -> None:
        """Drop the entries of deleted files. NumPy sorts, which lets other threads run meanwhile."""
        live = [
            item for subfolder in self._subfolders.values() for item in subfolder.stamps.items()
        ]
        order = np.argsort(np.fromiter((stamp for _, stamp in live), np.float64, len(live)))
        self._heap = [(live[i][1], live[i][0]) for i in order]

    def put_back(self, keys: Iterable[str]) -> None:
        """Put those that are still there back on the heap."""
        for key in keys:
            stamp = self._subfolders[key[:2]].stamps.get(key)
            if stamp is not None:
                heapq.heappush(self._heap, (stamp, key))
