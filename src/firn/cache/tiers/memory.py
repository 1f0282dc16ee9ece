"""The trivial tier: packed records in a dict. For tests, and the proof that the contract is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firn.cache.container import Header, Label, Loaded, pack, read_header, unpack
from firn.cache.faults import NO_PARENT, Damaged, Missing, Refused, TierError, TierFull
from firn.cache.tiers import Entry, Gone, Name, Stored, Usage, name_of
from firn.cache.tiers._catalog import Catalog, File, file_of, parent_of
from firn.cache.tiers._meter import Meter, Tally
from firn.core.keys import KeyTokens


class MemoryTier:
    """Implements tiers.Tier. Thread-safe."""

    def __init__(self, limit_nbytes: int, *, wall: Callable[[], float] = time.time) -> None:
        self._limit_nbytes = limit_nbytes
        self._wall = wall
        self._lock = threading.Lock()
        self._packed: dict[str, bytes] = {}
        self._catalog = Catalog()
        self._tally = Tally()
        self._meter = Meter()
        self._is_scanned = False

    def scan(self) -> Iterator[Entry | Gone]:
        with self._lock:
            again, self._is_scanned = self._is_scanned, True
            return iter([] if again else [self._entry(file) for file in self._catalog])

    def write(self, header: Header, buffers: Sequence[Any]) -> Stored:
        packed = pack(header, buffers)
        path = _path(name_of(header))
        with self._lock:
            if path in self._packed:
                return Stored(0, new=False)
            try:
                evicted = self._make_room(header, packed.nbytes)
            except TierError as e:
                self._tally.drop(e.reason)
                raise
            self._packed[path] = b"".join(packed.pieces)
            now = self._wall()
            self._catalog.add(
                file_of(path, tag=header, nbytes=packed.nbytes, last_use=now, readable=True)
            )
            self._tally.add(writes=1, bytes_written=packed.nbytes)
            return Stored(packed.nbytes, new=True, evicted=evicted)

    def read(self, name: Name, expect: KeyTokens | None = None) -> Loaded:
        path = _path(name)
        with self._lock:
            raw = self._packed.get(path)
        if raw is None:
            self._tally.add(missing=1)
            raise Missing
        try:
            with self._meter.read() as came:
                loaded = unpack(raw)
                came(len(raw))
            if name_of(loaded.header) != name:
                raise Damaged("another record's bytes")
            if expect is not None and not np.array_equal(loaded.header.tokens, expect):
                raise Damaged("another record's bytes", "tokens differ")
        except Damaged:
            self._tally.add(damaged=1)
            self._remove(path)
            raise
        self._tally.add(reads=1, bytes_read=sum(len(b) for b in loaded.buffers))
        return loaded

    def delete(self, name: Name) -> None:
        if self._remove(_path(name)):
            self._tally.add(deletes=1)

    def touch(self, names: Iterable[Name]) -> None:
        now = self._wall()
        with self._lock:
            for name in names:
                file = self._catalog.get(_path(name))
                if file is not None:
                    self._catalog.touch(file, now)

    def usage(self) -> Usage:
        catalog = self._catalog
        return Usage(
            nbytes=catalog.nbytes,
            limit_nbytes=self._limit_nbytes,
            n_files=dict(catalog.n_files),
            part_nbytes=dict(catalog.part_nbytes),
            n_orphans=catalog.n_orphans,
            read_nbytes_per_s=self._meter.nbytes_per_s,
            counts=self._tally.counts,
            drops=self._tally.drops,
        )

    def _make_room(self, header: Header, nbytes: int) -> tuple[Name, ...]:
        parent = parent_of(header)
        if parent is not None and not self._catalog.has_block(parent):
            raise Refused(NO_PARENT)
        kept = (header.key, header.parent)
        victims: list[File] = []
        while self._catalog.nbytes + nbytes > self._limit_nbytes:
            victim = self._catalog.pop_victim(
                lambda f: not (f.name and f.name.key in kept and self._catalog.holds_block(f))
            )
            if victim is None:
                for file in victims:
                    self._catalog.add(file)
                raise TierFull(f"{nbytes} bytes do not fit")
            victims.append(victim)
        for file in victims:
            del self._packed[file.path]
        self._tally.add(evictions=len(victims), bytes_evicted=sum(f.nbytes for f in victims))
        return tuple(f.name for f in victims if f.name is not None)

    def _remove(self, path: str) -> bool:
        with self._lock:
            self._packed.pop(path, None)
            return self._catalog.remove(path) is not None

    def _entry(self, file: File) -> Entry:
        raw = self._packed[file.path]
        label = read_header(lambda n: raw[:n], len(raw))
        assert isinstance(label, Label)
        return Entry(label, file.nbytes, file.last_use)


def _path(name: Name) -> str:
    return f"{name.key.hex()}.{name.part.value}"


def open_tier(folder: Path, limit_nbytes: int) -> MemoryTier:
    return MemoryTier(limit_nbytes)
