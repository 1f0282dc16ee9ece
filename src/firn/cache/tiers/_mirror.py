"""What the folder holds, as far as this process knows, and every change that is made to it.

Methods that take a Page are for the process that holds the folder's lock. The order of effects is:
announce on the page, change the folder, change the mirror. So a process that dies anywhere leaves
others with too much listed, never with too little; and the sum below counts bytes before they are
written and until after they are gone:

    records + folders + temp files at the size set aside for them + quarantine <= limit

Owner: the tier, under its mutex.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from firn.cache.container import Label, Tag
from firn.cache.faults import NO_PARENT, Damaged, Refused, TierFull
from firn.cache.seal import Seal
from firn.cache.tiers import Entry, Gone, Name
from firn.cache.tiers._catalog import Catalog, File, file_of, parent_of
from firn.cache.tiers._disk import (
    BLOCK_NBYTES,
    LOCK,
    MODELS,
    QUARANTINE,
    SHELVES,
    TAG_FILE,
    TMP,
    Disk,
    Listed,
    Shelf,
    allocated,
    path_of,
    reserved_nbytes,
    temp_path,
)
from firn.cache.tiers._meter import Tally
from firn.cache.tiers._shared import COUNTED, INDEX, Page
from firn.cache.tiers._survey import Found, look_at_all, record_paths
from firn.core.keys import Key

QUARANTINE_FILES = 32
QUARANTINE_SHARE = 16
"""At most this part of the limit."""
SLACK_NBYTES = 2 * BLOCK_NBYTES
"""What a new name may add to folders."""
NOTE_NBYTES = 3 * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class Temp:
    """A record being written: bytes are set aside, its own and those of what had to go."""

    fd: int
    path: str
    tag: Tag
    nbytes: int
    evicted: tuple[Name, ...]


class Mirror:
    def __init__(
        self,
        disk: Disk,
        tally: Tally,
        *,
        limit_nbytes: int,
        seal: Seal | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._tally = tally
        self._seal = seal
        self._wall = wall
        self._known = np.zeros(len(COUNTED), dtype=np.uint64)
        self._paths: defaultdict[str, set[str]] = defaultdict(set)
        self._shelves: dict[str, Shelf] = {}
        self._shelves_nbytes = 0
        self._quarantine: dict[str, Listed] = {}
        self._own: dict[str, Temp] = {}
        self._others: dict[str, int] = {}
        """Temp files of other processes, and what is set aside for each."""
        self._ahead: dict[str, Found] = {}
        self._fixed_nbytes = 0
        self._news: dict[str, Entry | Gone] = {}
        self._serial = count()
        self.catalog = Catalog()
        self.limit_nbytes = limit_nbytes
        """This process's own, or the folder's if that is lower: set when the lock is taken."""

    # --- what there is -----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return (
            self.catalog.nbytes
            + self._shelves_nbytes
            + sum(t.nbytes for t in list(self._own.values()))
            + sum(list(self._others.values()))
            + sum(x.nbytes for x in list(self._quarantine.values()))
            + self._fixed_nbytes
        )

    @property
    def n_quarantined(self) -> int:
        return len(self._quarantine)

    def knows(self, path: str) -> bool:
        return self.catalog.get(path) is not None or path in self._quarantine

    def take_news(self) -> list[Entry | Gone]:
        news, self._news = self._news, {}
        return list(news.values())

    def look_ahead(self) -> None:
        """Read the labels of unknown files, so that it need not be done while the lock is held."""
        if not len(self.catalog):
            found = look_at_all(self._disk, record_paths(self._disk), seal=self._seal)
            self._ahead = {f.listed.path: f for f in found}

    def refresh(self, page: Page | None, *, thorough: bool = False) -> None:
        """Learn what others changed. Without a page nothing is known, so all is listed.

        thorough: find also what no firn process did, such as a user with `rm`.
        """
        shelves = self._changed(page, thorough=thorough)
        if shelves:
            self._relist(shelves, page)
        if page is not None:
            self._relist_temps()
            self._known = page.counters.copy()
        if len(shelves) == len(COUNTED) or thorough:
            self._measure_fixed()
        self._ahead = {}

    def doubt(self, shelves: Iterable[str] = COUNTED) -> None:
        """List these again at the next chance."""
        for shelf in shelves:
            self._known[INDEX[shelf]] = 0

    def _changed(self, page: Page | None, *, thorough: bool) -> list[str]:
        if page is None:
            return list(COUNTED)
        if not thorough and np.array_equal(self._known, page.counters):
            return []
        differs = self._known != page.counters
        return [
            shelf
            for i, shelf in enumerate(COUNTED)
            if differs[i] or (thorough and self._disk.shelf(shelf) != self._shelves.get(shelf))
        ]

    def _relist(self, shelves: Sequence[str], page: Page | None) -> None:
        there = set(record_paths(self._disk, [s for s in shelves if s in _SHELVES]))
        for shelf in shelves:
            self._measure(shelf)
            for path in [p for p in self._paths[shelf] if p not in there or self._is_other(p)]:
                self._vanished(path)
        if QUARANTINE in shelves:
            self._quarantine = {x.path: x for x in self._disk.files(QUARANTINE)}
        self._take_in([p for p in there if self.catalog.get(p) is None], page)

    def _is_other(self, path: str) -> bool:
        """Whether someone put another file in the place of one that could not be read."""
        file = self.catalog.get(path)
        if file is None or file.readable:
            return False
        found = self._disk.stat(path)
        return found is not None and found.mtime != file.stamped

    def _take_in(self, new: Sequence[str], page: Page | None) -> None:
        unknown = [p for p in new if p not in self._ahead]
        found = [self._ahead[p] for p in new if p in self._ahead]
        for one in [*found, *look_at_all(self._disk, unknown, seal=self._seal)]:
            x = one.listed
            last_use = min(x.mtime, self._wall())
            if one.tag is not None:
                file = file_of(
                    x.path,
                    tag=one.tag,
                    nbytes=x.nbytes,
                    last_use=last_use,
                    readable=one.label is not None,
                )
                file.stamped = x.mtime
                self._put(file)
                if isinstance(one.tag, Label):
                    self._news[x.path] = Entry(one.tag, x.nbytes, last_use)
                continue
            self._put(File(x.path, x.nbytes, last_use, stamped=x.mtime))
            if isinstance(one.fault, Damaged) and page is not None:
                self._tally.add(damaged=1)
                self.quarantine(page, x.path)

    def _relist_temps(self) -> None:
        others: dict[str, int] = {}
        for x in self._disk.files(TMP):
            if x.path in self._own:
                continue
            if self._disk.is_abandoned(x.path):
                self._disk.unlink(x.path)
                self._tally.add(stale_temps=1)
            else:
                others[x.path] = max(reserved_nbytes(x.path), x.nbytes)
        self._others = others

    def add_note(self, page: Page, path: str, content: bytes) -> None:
        """A small file for people, within the limit like everything else."""
        self.shrink(page, self.limit_nbytes - NOTE_NBYTES)
        self._disk.put(path, content)
        self._measure_fixed()

    def _measure_fixed(self) -> None:
        files = [self._disk.stat(LOCK), self._disk.stat(TAG_FILE), *self._disk.files(MODELS)]
        self._fixed_nbytes = sum(x.nbytes for x in files if x is not None) + sum(
            self._disk.shelf(name).nbytes for name in (".", TMP, MODELS)
        )

    def _measure(self, shelf: str) -> None:
        before, now = self._shelves.get(shelf, Shelf()), self._disk.shelf(shelf)
        self._shelves[shelf] = now
        self._shelves_nbytes += now.nbytes - before.nbytes

    # --- making room -------------------------------------------------------------------------

    def make_room(
        self, page: Page, nbytes: int, *, pinned: Collection[Key] = ()
    ) -> tuple[Name, ...]:
        """Evict until `nbytes` more fit. Raises TierFull, and evicts nothing, when they cannot.

        pinned: blocks that are about to get something below them or beside them.
        """
        old, victims, is_enough = self._choose(self.nbytes + nbytes - self.limit_nbytes, pinned)
        if not is_enough:
            for file in victims:
                self.catalog.add(file)
            raise TierFull(f"{nbytes} bytes more do not fit into {self.limit_nbytes}")
        return self._evict(page, old, victims)

    def shrink(self, page: Page, to_nbytes: int) -> None:
        """Evict until that much is left, or nothing that may go. The next scan tells."""
        old, victims, _ = self._choose(self.nbytes - to_nbytes)
        self._tell_gone(self._evict(page, old, victims))

    def _choose(
        self, over: int, pinned: Collection[Key] = ()
    ) -> tuple[list[str], list[File], bool]:
        """What goes if `over` bytes must: quarantine, then records, taken out of the catalog."""
        old: list[str] = []
        for x in sorted(self._quarantine.values(), key=lambda x: x.mtime):
            if over > 0:
                old.append(x.path)
                over -= x.nbytes
        kept = {*pinned, *(k for t in self._own.values() for k in (t.tag.key, t.tag.parent))}
        victims: list[File] = []
        while over > 0:
            victim = self.catalog.pop_victim(lambda file: self._may_go(file, kept))
            if victim is None:
                return old, victims, False
            victims.append(victim)
            over -= victim.nbytes
        return old, victims, True

    def _evict(self, page: Page, old: list[str], victims: list[File]) -> tuple[Name, ...]:
        self.unlink(page, [*old, *(f.path for f in victims)])
        if victims:
            self._tally.add(evictions=len(victims), bytes_evicted=sum(f.nbytes for f in victims))
        return tuple(f.name for f in victims if f.name is not None)

    def _may_go(self, file: File, kept: Collection[Key]) -> bool:
        if file.name is not None and file.name.key in kept and self.catalog.holds_block(file):
            return False
        found = self._disk.stat(file.path)
        if found is not None and found.mtime > file.stamped:
            # Another process has used it since.
            file.stamped = found.mtime
            if found.mtime > file.last_use:
                self.catalog.touch(file, min(found.mtime, self._wall()))
                return False
        return True

    def unlink(self, page: Page, paths: Sequence[str]) -> None:
        shelves = {_shelf_of(p) for p in paths}
        if not shelves:
            return
        page.announce(shelves)
        for path in paths:
            self._disk.unlink(path)
            self._forget(path)
            self._quarantine.pop(path, None)
        for shelf in shelves - {QUARANTINE}:
            if not self._paths[shelf]:
                self._disk.rmdir(shelf)
            self._measure(shelf)
        self._in_step(page, shelves)

    # --- writing -----------------------------------------------------------------------------

    def reserve(self, page: Page, tag: Tag, nbytes: int) -> Temp | None:
        """Set the bytes aside and begin a file. None: the record is there, or on its way.

        Raises Refused, TierFull.
        """
        name = Name(tag.key, tag.part)
        file = self.catalog.get(path_of(name))
        on_its_way = {_stem(p) for p in (*self._own, *self._others)}
        if (
            file is not None and file.readable
        ) or f"{tag.key.hex()}.{tag.part.value}" in on_its_way:
            return None
        parent = parent_of(tag)
        if parent is not None and not self.catalog.has_block(parent):
            coming = {stem.partition(".")[0] for stem in on_its_way}
            if parent.hex() not in coming:
                raise Refused(NO_PARENT)
        need = allocated(nbytes) + SLACK_NBYTES
        evicted = self.make_room(page, need, pinned=(tag.key, tag.parent))
        path = temp_path(name, next(self._serial), nbytes=need)
        temp = Temp(self._disk.create(path), path, tag, need, evicted)
        self._own[path] = temp
        return temp

    def commit(self, page: Page, temp: Temp) -> int:
        """Give a complete file its name; returns the bytes it takes up."""
        name = Name(temp.tag.key, temp.tag.part)
        path = path_of(name)
        shelf = _shelf_of(path)
        now = self._wall()
        self._disk.set_mtime(temp.path, now)
        page.announce([shelf])
        self._disk.rename(temp.path, path)
        self._own.pop(temp.path)
        listed = self._disk.stat(path)
        nbytes = temp.nbytes if listed is None else listed.nbytes
        self._forget(path)
        self._put(file_of(path, tag=temp.tag, nbytes=nbytes, last_use=now, readable=True))
        self._measure(shelf)
        self._in_step(page, [shelf])
        return nbytes

    def abandon(self, temp: Temp) -> None:
        """Needs no lock: for others the file only looks larger than it is for a while."""
        if self._own.pop(temp.path, None) is not None:
            self._tell_gone(temp.evicted)  # no Stored will
            self._disk.unlink(temp.path)

    # --- bad bytes ---------------------------------------------------------------------------

    def quarantine(self, page: Page, path: str) -> None:
        """Move a file out of the way, for people to look at. It is never read again."""
        found = self._disk.stat(path)
        if found is None:
            self._forget(path)
            return
        shelf = _shelf_of(path)
        target = f"{QUARANTINE}/{path.rpartition('/')[2]}.{int(self._wall() * 1e6)}"
        page.announce([shelf, QUARANTINE])
        self._disk.rename(path, target)
        self._forget(path)
        self._quarantine[target] = Listed(target, found.size, found.nbytes, self._wall())
        self._tally.add(quarantined=1)
        for name in (shelf, QUARANTINE):
            self._measure(name)
        self._in_step(page, [shelf, QUARANTINE])
        self.unlink(page, [x.path for x in self._too_much_quarantined()])

    def mark_unreadable(self, path: str) -> None:
        """It is there, but not for us."""
        file = self.catalog.get(path)
        if file is not None:
            self.catalog.set_unreadable(file)

    def _too_much_quarantined(self) -> list[Listed]:
        held = sorted(self._quarantine.values(), key=lambda x: x.mtime)
        nbytes = sum(x.nbytes for x in held)
        surplus: list[Listed] = []
        for x in held:
            left = len(held) - len(surplus)
            if left <= QUARANTINE_FILES and nbytes <= self.limit_nbytes // QUARANTINE_SHARE:
                break
            surplus.append(x)
            nbytes -= x.nbytes
        return surplus

    # --- the mirror itself -------------------------------------------------------------------

    def _put(self, file: File) -> None:
        self.catalog.add(file)
        self._paths[_shelf_of(file.path)].add(file.path)

    def _forget(self, path: str) -> File | None:
        self._paths[_shelf_of(path)].discard(path)
        self._news.pop(path, None)
        return self.catalog.remove(path)

    def _vanished(self, path: str) -> None:
        file = self._forget(path)
        if file is not None and file.name is not None:
            self._news[path] = Gone(file.name)

    def _tell_gone(self, names: Iterable[Name]) -> None:
        for name in names:
            if self.catalog.get(path_of(name)) is None:
                self._news[path_of(name)] = Gone(name)

    def _in_step(self, page: Page, shelves: Iterable[str]) -> None:
        """The change that was announced is in the mirror: no need to list these again."""
        for shelf in shelves:
            i = INDEX[shelf]
            self._known[i] = page.counters[i]


_SHELVES = frozenset(SHELVES)


def _shelf_of(path: str) -> str:
    return path.partition("/")[0]


def _stem(path: str) -> str:
    """key.part of a temp file."""
    return ".".join(path.rpartition("/")[2].split(".", 2)[:2])
