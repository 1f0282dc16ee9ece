"""What a process knows of the folder's record files: names, stamps, and what the next scan is to tell.

Kept small, for there may be 100,000: a stamp each, in its subfolder's dict, and an entry of the heap.
Stamps there may be too low, never too high: files are used, by other processes too, without a word here.

Owner: the tier, under its mutex.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
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
    Listed,
    key_of,
    path_of,
)

FIRST = -inf
"""The stamp of what goes before everything else: foreign files, and those that cannot be read."""
UNLISTED = -1
HEAP_SLACK = 1024
"""Entries of deleted files that do not matter."""


@dataclass(eq=False, slots=True)
class Subfolder:
    """One subfolder of records."""

    changed_ns: int = 0
    """When names in it last changed."""
    stamps: dict[str, float] = field(default_factory=dict)
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Files and bytes by what follows the dot in their names; '' for foreign files."""

    def count(self, key: str, nbytes: int, *, n: int = 1) -> None:
        part = "" if is_foreign(key) else key[65:]
        n_files, total = self.parts.get(part, (0, 0))
        self.parts[part] = n_files + n, total + n * nbytes


def is_foreign(key: str) -> bool:
    return "/" in key


class KnownFiles:
    def __init__(self, disk: Disk, wall: Callable[[], float]) -> None:
        self._disk = disk
        self._wall = wall
        self._subfolders = {sub: Subfolder() for sub in SUBFOLDERS}
        self._heap: list[tuple[float, str]] = []
        self._news: dict[str, bool] = {}
        """Where the caller believes something else: whether the record is there."""
        self.unreadable: dict[str, float] = {}
        """Files that are not to be read, with their mtime: another one may take their place."""
        self.listed_at: npt.NDArray[np.int64] = np.full(len(COUNTED), UNLISTED, dtype=np.int64)
        """The page's counters when the subfolders were last listed."""
        self.n_quarantined = 0

    # --- learning ----------------------------------------------------------------------------

    def is_changed(self, sub: str, counter: int) -> bool:
        """By a process, says the page's counter; or by a user with `rm`, says the subfolder."""
        if sub == QUARANTINE or counter == UNLISTED or self.listed_at[INDEX[sub]] != counter:
            return True
        return self._disk.subfolder(sub)[1] != self._subfolders[sub].changed_ns

    def relist(self, sub: str, counter: int) -> int:
        """List a subfolder; returns the bytes it takes up. What is new, or gone, becomes news."""
        total, changed_ns = self._disk.subfolder(sub)  # first: what changes meanwhile is seen later
        files = self._disk.quarantined() if sub == QUARANTINE else self._disk.files(sub)
        self.listed_at[INDEX[sub]] = counter
        if sub == QUARANTINE:
            self.n_quarantined = len(files)
            return total + sum(x.nbytes for x in files)
        subfolder, known = Subfolder(changed_ns), self._subfolders[sub].stamps
        for x in files:
            if x.name.endswith(SUFFIX):
                total += x.nbytes
                self._learn(subfolder, key_of(sub, x.name), x, known)
        for key in known.keys() - subfolder.stamps.keys():
            self.unreadable.pop(key, None)
            self.tell(key, is_there=False)
        self._subfolders[sub] = subfolder
        return total

    def _learn(self, subfolder: Subfolder, key: str, x: Listed, known: Mapping[str, float]) -> None:
        subfolder.count(key, x.nbytes)
        is_other = self.unreadable.get(key, x.mtime) != x.mtime
        if is_other:
            del self.unreadable[key]
        is_usable = not is_foreign(key) and key not in self.unreadable
        subfolder.stamps[key] = stamp = self._stamp(x.mtime) if is_usable else FIRST
        if key not in known or stamp < known[key]:
            heapq.heappush(self._heap, (stamp, key))
        if is_usable and (is_other or key not in known):
            self.tell(key, is_there=True)

    def _stamp(self, mtime: float) -> float:
        """Times that no clock can have given go first, in their order."""
        return mtime if mtime <= self._wall() + AHEAD_S else mtime - 1e11

    def add(self, name: str, x: Listed) -> None:
        """A file that this process has written."""
        subfolder = self._subfolders[name[:2]]
        subfolder.count(name, x.nbytes)
        subfolder.stamps[name] = x.mtime
        heapq.heappush(self._heap, (x.mtime, name))
        if len(self._heap) > HEAP_SLACK + 2 * sum(len(s.stamps) for s in self._subfolders.values()):
            self._tidy_heap()

    def forget(self, key: str, nbytes: int) -> None:
        subfolder = self._subfolders[key[:2]]
        self.unreadable.pop(key, None)
        if subfolder.stamps.pop(key, None) is not None:
            subfolder.count(key, nbytes, n=-1)

    def mark_unreadable(self, name: str, mtime: float) -> None:
        self.unreadable[name] = mtime
        self._subfolders[name[:2]].stamps[name] = FIRST
        heapq.heappush(self._heap, (FIRST, name))

    def doubt(self, sub: str) -> None:
        """List it again at the next chance."""
        self.listed_at[INDEX[sub]] = UNLISTED

    def set_changed(self, sub: str, counter: int, changed_ns: int) -> None:
        """This process has changed the subfolder, and knows how."""
        self.listed_at[INDEX[sub]] = counter
        if sub != QUARANTINE:
            self._subfolders[sub].changed_ns = changed_ns

    # --- telling -----------------------------------------------------------------------------

    def is_empty(self, sub: str) -> bool:
        return not self._subfolders[sub].stamps

    def tell(self, key: str, *, is_there: bool) -> None:
        """The next scan does, unless the caller believes it: a record may come and go in between."""
        if self._news.get(key) == (not is_there):
            del self._news[key]
        elif not is_foreign(key):
            self._news[key] = is_there

    def told(self, names: Iterable[str]) -> None:
        """The caller knows."""
        for name in names:
            self._news.pop(name, None)

    def believe(self, name: str, x: Listed | None) -> None:
        """The caller was just told that it is there, which no listing has shown yet."""
        self.told([name])
        if x is not None and name not in self._subfolders[name[:2]].stamps:
            self.add(name, x)

    def take_news(self) -> tuple[list[str], list[str]]:
        """Records that are gone, and those that are new, the highest stamps first."""
        news, self._news = self._news, {}
        gone = [name for name, is_there in news.items() if not is_there]
        new = [name for name, is_there in news.items() if is_there]
        found = (self._subfolders[name[:2]].stamps.get(name, FIRST) for name in new)
        stamps = np.fromiter(found, np.float64, len(new))  # bit by bit: others may run meanwhile
        return gone, [new[i] for i in np.argsort(-stamps, kind="stable")]

    def by_part(self) -> dict[str, tuple[int, int]]:
        """Files and bytes. From any thread."""
        n_files: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for subfolder in self._subfolders.values():
            for part, (n, total) in list(subfolder.parts.items()):
                n_files[part] += n
                nbytes[part] += total
        return {part: (n, nbytes[part]) for part, n in n_files.items() if n}

    # --- the order of eviction ---------------------------------------------------------------

    def oldest(self, *, used_at: float, but: Collection[str]) -> Listed | None:
        """The next file to go, by its key; None when none is as old as `used_at`.

        It leaves the heap: `put_back` those that stay after all.
        """
        while self._heap:
            stamp, key = self._heap[0]
            known = self._subfolders[key[:2]].stamps.get(key)
            x = None if known is None or key in but else self._disk.stat(path_of(key))
            if known is None or x is None:
                heapq.heappop(self._heap)  # gone, or here twice
                if known is not None and key not in but:
                    del self._subfolders[key[:2]].stamps[key]
                    self.tell(key, is_there=False)
                    self.doubt(key[:2])
                continue
            if known > FIRST:  # another process may have used it
                self._subfolders[key[:2]].stamps[key] = known = self._stamp(x.mtime)
            if known > stamp:
                heapq.heapreplace(self._heap, (known, key))
                continue
            if stamp > used_at:
                return None
            heapq.heappop(self._heap)
            return x._replace(name=key)
        return None

    def _tidy_heap(self) -> None:
        """Leave out what was deleted. Sorted by NumPy, which lets other threads run meanwhile."""
        live = [
            item for subfolder in self._subfolders.values() for item in subfolder.stamps.items()
        ]
        order = np.argsort(np.fromiter((stamp for _, stamp in live), np.float64, len(live)))
        self._heap = [(live[i][1], live[i][0]) for i in order]

    def put_back(self, keys: Iterable[str]) -> None:
        for key in keys:
            stamp = self._subfolders[key[:2]].stamps.get(key)
            if stamp is not None:
                heapq.heappush(self._heap, (stamp, key))
