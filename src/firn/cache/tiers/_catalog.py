"""Which records a tier holds, and which may go next. A mirror of what is stored; knows no files.

Order of eviction: what nobody can use first (foreign files, orphans), then by last use, where value
counts as time: a file that was read again after it was written has proved itself and counts as used a
day later; a window or state in the midst of a chain, which only a branch asks for, as used a day earlier
(but for states at places that many share). A chain goes from its end: pages go only when nothing below
them is stored and nothing else of their block is. A window or state may go any time, but a block that
has others below it keeps at least one record, for its tokens are what the others are found by.

Owner: the tier, under its mutex.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from firn.cache.container import Tag
from firn.cache.parts import Part
from firn.cache.tiers import Name
from firn.cache.tree import Mark
from firn.core.keys import Key

UNUSABLE, USABLE = 0, 1
DAY_S = 86_400.0
SETTLED_S = 60.0
"""A use so soon after the writing is the same request's."""
Rank = tuple[int, float]


@dataclass(eq=False, slots=True)
class File:
    """One stored record. `path` is how the tier finds it; nothing here looks into it."""

    path: str
    nbytes: int
    last_use: float
    name: Name | None = None
    """None: foreign, so neither its name nor its place in a chain is known."""
    parent: Key | None = None
    """None: it begins a chain."""
    readable: bool = False
    stamped: float = 0.0
    """The last use that the store itself remembers; at most a little older than `last_use`."""
    created: float = math.inf
    is_shared: bool = False
    """A state at a place that many prompts go through."""
    rank: Rank = (UNUSABLE, 0.0)


def file_of(path: str, *, tag: Tag, nbytes: int, last_use: float, readable: bool) -> File:
    return File(
        path=path,
        nbytes=nbytes,
        last_use=last_use,
        name=Name(tag.key, tag.part),
        parent=parent_of(tag),
        readable=readable,
        stamped=last_use,
        created=tag.created,
        is_shared=tag.mark >= Mark.LATTICE,
    )


def parent_of(tag: Tag) -> Key | None:
    """The block that must be there for this one to be found; None at the beginning of a chain."""
    return None if tag.start == 0 or tag.parent == tag.root else tag.parent


@dataclass(eq=False, slots=True)
class _Block:
    parent: Key | None = None
    files: dict[Part, File] = field(default_factory=dict)
    children: set[Key] = field(default_factory=set)
    """Blocks with files that name this one as their parent."""


class Catalog:
    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._blocks: dict[Key, _Block] = {}
        self._heap: list[tuple[Rank, int, File]] = []
        self._tie = count()
        self._orphans: set[Key] = set()
        self.nbytes = 0
        self.n_files = dict.fromkeys(Part, 0)
        self.part_nbytes = dict.fromkeys(Part, 0)
        self.n_unreadable = 0

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[File]:
        return iter(self._files.values())

    @property
    def n_orphans(self) -> int:
        """Blocks whose parent is not stored."""
        return len(self._orphans)

    def get(self, path: str) -> File | None:
        return self._files.get(path)

    def has_block(self, key: Key) -> bool:
        block = self._blocks.get(key)
        return block is not None and bool(block.files)

    def add(self, file: File) -> None:
        assert file.path not in self._files
        self._files[file.path] = file
        self._count(file, +1)
        if file.name is None:
            self._push(file)
            return
        key = file.name.key
        block = self._blocks.setdefault(key, _Block())
        is_first = not block.files
        block.files[file.name.part] = file
        if is_first:
            block.parent = file.parent
            if file.parent is not None:
                self._blocks.setdefault(file.parent, _Block()).children.add(key)
                if not self.has_block(file.parent):
                    self._orphans.add(key)
                self._wake(file.parent)
            self._orphans -= block.children
            self._wake_children(block)
        self._wake(key)

    def remove(self, path: str) -> File | None:
        file = self._files.pop(path, None)
        if file is None:
            return None
        self._count(file, -1)
        if file.name is None:
            return file
        key = file.name.key
        block = self._blocks[key]
        del block.files[file.name.part]
        if block.files:
            self._wake(key)
            return file
        self._orphans.discard(key)
        self._orphans |= block.children
        self._wake_children(block)
        if block.parent is not None:
            self._blocks[block.parent].children.discard(key)
            self._wake(block.parent)
            self._drop_if_empty(block.parent)
        self._drop_if_empty(key)
        return file

    def set_unreadable(self, file: File) -> None:
        self.n_unreadable += file.readable
        file.readable = False

    def touch(self, file: File, at: float) -> None:
        if at > file.last_use:
            file.last_use = at
            self._push(file)

    def pop_victim(self, may_go: Callable[[File], bool] = lambda file: True) -> File | None:
        """Take out the next file to go; None when nothing that is left may go."""
        kept: list[File] = []
        found: File | None = None
        while self._heap and found is None:
            rank, _, file = heapq.heappop(self._heap)
            if self._files.get(file.path) is not file or rank != file.rank:
                continue
            if not self._at_end(file):
                continue  # pushed again when what keeps it is gone
            if may_go(file):
                found = file
            elif rank == file.rank:
                kept.append(file)
        for file in kept:
            self._push(file)
        if found is not None:
            self.remove(found.path)
        return found

    def is_orphan(self, file: File) -> bool:
        return file.parent is not None and not self.has_block(file.parent)

    def holds_block(self, file: File) -> bool:
        """Whether what is below it, or beside it, would be of no use without this file."""
        if file.name is None:
            return False
        return file.name.part is Part.PAGES or len(self._blocks[file.name.key].files) == 1

    def _at_end(self, file: File) -> bool:
        if file.name is None or self.is_orphan(file):
            return True
        block = self._blocks[file.name.key]
        if file.name.part is Part.PAGES and len(block.files) > 1:
            return False
        return not block.children or not self.holds_block(file)

    def _count(self, file: File, sign: int) -> None:
        self.nbytes += sign * file.nbytes
        self.n_unreadable += sign * (not file.readable)
        if file.name is not None:
            self.n_files[file.name.part] += sign
            self.part_nbytes[file.name.part] += sign * file.nbytes

    def _wake(self, key: Key) -> None:
        """Something around this block changed: its files may be next."""
        for file in self._blocks[key].files.values():
            self._push(file)

    def _wake_children(self, block: _Block) -> None:
        for key in block.children:
            self._wake(key)

    def _drop_if_empty(self, key: Key) -> None:
        block = self._blocks[key]
        if not block.files and not block.children:
            del self._blocks[key]

    def _value_s(self, file: File) -> float:
        value = DAY_S if file.last_use > file.created + SETTLED_S else 0.0
        if file.name is not None and file.name.part is not Part.PAGES and not file.is_shared:
            value -= DAY_S if self._blocks[file.name.key].children else 0.0
        return value

    def _push(self, file: File) -> None:
        usable = file.name is not None and not self.is_orphan(file)
        file.rank = (USABLE if usable else UNUSABLE, file.last_use + self._value_s(file))
        heapq.heappush(self._heap, (file.rank, next(self._tie), file))
        if len(self._heap) > 64 + 8 * len(self._files):
            live = list(self._files.values())
            self._heap = [(f.rank, next(self._tie), f) for f in live]
            heapq.heapify(self._heap)
