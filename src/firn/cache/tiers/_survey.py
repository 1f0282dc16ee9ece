"""Looking into record files: labels of many at a scan, all of one at a read. Changes nothing on disk."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from firn.cache.container import Label, Loaded, Tag, read_header, unpack
from firn.cache.faults import Damaged, Foreign, Missing, TierFault
from firn.cache.seal import Seal
from firn.cache.tiers import Name
from firn.cache.tiers._disk import SHELVES, SUFFIX, Disk, Listed, name_at

N_THREADS = 8
BATCH = 128
SLOW_S = 1e-4
"""A file that keeps one waiting longer than this comes from the disk."""
CHUNK_NBYTES = 2 << 20
"""Read and verified at a time: small enough for the bytes to be in the processor's cache still."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record file and what its first bytes say. `fault` or `tag` is given, never both."""

    listed: Listed
    tag: Tag | None = None
    fault: Damaged | Foreign | None = None

    @property
    def label(self) -> Label | None:
        """None: not readable here."""
        return self.tag if isinstance(self.tag, Label) else None


def record_paths(disk: Disk, shelves: Iterable[str] = SHELVES) -> list[str]:
    return [path for shelf in shelves for path in disk.names(shelf) if path.endswith(SUFFIX)]


def look_at_all(disk: Disk, paths: Sequence[str], *, seal: Seal | None) -> list[Found]:
    """Labels of many files; those that vanish meanwhile are left out.

    Files in the page cache are fastest read by one thread, for parsing holds the interpreter's lock;
    files on the disk by several. The first batch tells which it is.
    """

    def look_at_some(at: int) -> list[Found]:
        return [f for x in paths[at : at + BATCH] if (f := look_at(disk, x, seal=seal))]

    began, worked = time.perf_counter(), time.thread_time()
    first = look_at_some(0)
    waited = (time.perf_counter() - began) - (time.thread_time() - worked)
    starts = range(BATCH, len(paths), BATCH)
    if waited < BATCH * SLOW_S:
        return first + [found for at in starts for found in look_at_some(at)]
    with ThreadPoolExecutor(N_THREADS, thread_name_prefix="firn-scan") as pool:
        return first + [found for some in pool.map(look_at_some, starts) for found in some]


def look_at(disk: Disk, path: str, *, seal: Seal | None) -> Found | None:
    """None: it is gone."""
    try:
        fd = disk.open(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        there = disk.stat(path)
        return Found(there, fault=Foreign("unreadable", e.strerror or "")) if there else None
    try:
        listed = disk.stat_open(fd, path)
        try:
            name = name_at(path)
            if name is None:
                raise Foreign("a name of another format")
            tag = read_header(lambda n: disk.first(fd, n), listed.size, seal=seal)
            _check_name(tag, name)
            return Found(listed, tag)
        except (Damaged, Foreign) as e:
            return Found(listed, fault=e)
        except OSError as e:
            return Found(listed, fault=Damaged("read error", e.strerror or ""))
    finally:
        disk.close(fd)


def _check_name(tag: Tag, name: Name) -> None:
    if (tag.key, tag.part) != (name.key, name.part):
        raise Damaged("another record's bytes")


def load(disk: Disk, path: str, name: Name, *, seal: Seal | None) -> Loaded:
    """All of a record, verified while it is read. Raises Missing, Damaged, TierFault."""
    try:
        fd = disk.open(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise Missing from e
    except OSError as e:
        raise TierFault(reason_of(e), e.strerror or "") from e
    try:
        filler = _Filler(disk, fd, disk.stat_open(fd, path).size)
        loaded = unpack(filler.view, seal=seal, fill=filler)
        _check_name(loaded.header, name)
        return loaded
    except Foreign as e:
        raise Missing(e.reason) from e
    except OSError as e:
        raise Damaged("read error", e.strerror or "") from e
    finally:
        disk.close(fd)


class _Filler:
    """Reads a file into one buffer as far as it is asked for. Lives as long as one read."""

    def __init__(self, disk: Disk, fd: int, size: int) -> None:
        self._disk = disk
        self._fd = fd
        self._have = 0
        # Not a bytearray: that would be filled with zeros first.
        self.view = np.empty(size, dtype=np.uint8).data

    def __call__(self, upto: int) -> None:
        want = min(max(upto, self._have + CHUNK_NBYTES), len(self.view))
        while self._have < upto:
            n = self._disk.read(self._fd, self.view[self._have : want])
            if n == 0:
                raise Damaged("wrong length", f"the file ends at {self._have}")
            self._have += n


REASONS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk full",
    errno.EROFS: "read-only",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EIO: "I/O error",
    errno.ENOENT: "folder gone",
    errno.ENOTDIR: "folder gone",
}


def reason_of(error: OSError) -> str:
    return REASONS.get(error.errno or 0, "system error")
