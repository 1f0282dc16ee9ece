"""The SSD tier's folder: its layout, every system call, and the numbers that its processes share.

    <2 hex>/<name>.safetensors            records, complete from the moment they have this name
    tmp/<name>.<pid>.<n>.<nbytes>.tmp     being written; the name contains the reserved size
    quarantine/<name>.<time>              damaged records, kept for people to look at
    firn.lock                             the lock, and the page: numbers that only its holder changes
    cleared/<root>                        when its records were last cleared: older ones are dead
    models/, CACHEDIR.TAG                 for people, and for backup programs

The folder is the truth: the page may be lost at any time. Holds no state except an open lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from firn.cache.storage.faults import Refused, TierFault
from firn.cache.tiers import PEEK_NBYTES, Buffer, ScannedRecord
from firn.core.private_folder import make_private

log = logging.getLogger("firn.cache")

LOCK, TMP, QUARANTINE, MODELS, TAG_FILE = "firn.lock", "tmp", "quarantine", "models", "CACHEDIR.TAG"
CLEARED = "cleared"
TAG_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# The prefix cache of firn; safe to delete.\n"
)
SUFFIX = ".safetensors"
SUBFOLDERS = tuple(f"{i:02x}" for i in range(256))
COUNTED = (*SUBFOLDERS, QUARANTINE)
INDEX = {sub: i for i, sub in enumerate(COUNTED)}
DEFAULT_LIMIT_NBYTES = 10 << 30
WORTH_RAISING = 1.1
BLOCK_NBYTES = 4096
LARGE_NBYTES = 4 << 20
"""From this size on, a file may take up one more block, for the file system's map of its blocks."""
MARGIN_NBYTES = 4 * BLOCK_NBYTES
"""Reserved for notes on models, which are written without going through the tier."""
QUARANTINE_FILES, QUARANTINE_SHARE = 32, 16
"""Caps on the quarantine: the number of files, and the fraction (1/16) of the limit."""
ABANDONED_S = 3600.0
"""Where files cannot be locked, a temp file of this age counts as abandoned."""
N_HOURS = 24
NO_CACHE: int | None = getattr(fcntl, "F_NOCACHE", None)
"""macOS: keep none of a file's pages. A record that was just written is in memory anyway."""
POLL_S, MAX_POLL_S = 0.0002, 0.002
NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
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

is_root = re.compile(r"[0-9a-f]{64}").fullmatch
_time = struct.Struct("<d")
is_name = re.compile(r"[0-9a-f]{64}\.[a-z]+").fullmatch
_temp = re.compile(r"[0-9a-f]{64}\.[a-z]+\.\d+\.\d+\.(\d+)\.tmp").fullmatch
_set_aside = re.compile(r"[0-9a-f]{64}\.[a-z]+\.\d+").fullmatch


def path_of(key: str) -> str:
    """The path of a key's file."""
    return f"{key}{SUFFIX}" if "/" in key else f"{key[:2]}/{key}{SUFFIX}"


def key_of(sub: str, file: str) -> str:
    """A record's name; for a foreign file, its path without the suffix."""
    name = file.removesuffix(SUFFIX)
    return name if name[:2] == sub and is_name(name) else f"{sub}/{name}"


def reserved_nbytes(temp: str) -> int:
    """The size that a temp file's name reserves; 0 if it is not such a name."""
    match = _temp(temp)
    return int(match[1]) if match else 0


def fault_of(error: OSError) -> TierFault:
    reason = REASONS.get(error.errno or 0, "system error")
    return TierFault(reason, error.strerror or str(error))


# --- system calls --------------------------------------------------------------------------


class FileStat(NamedTuple):
    name: str
    size: int
    nbytes: int
    """Bytes that it takes up on disk, or will once the system has written all of it."""
    mtime: float

    @classmethod
    def of(cls, name: str, stat: os.stat_result) -> FileStat:
        nbytes = max(allocated(stat.st_size), stat.st_blocks * 512)
        return cls(name, stat.st_size, nbytes, stat.st_mtime)


def allocated(size: int) -> int:
    """Bytes that a file of this size takes up on disk."""
    whole = -(-size // BLOCK_NBYTES) * BLOCK_NBYTES
    return whole + (BLOCK_NBYTES if size >= LARGE_NBYTES else 0)


def quarantine_surplus(files: Sequence[FileStat], *, limit_nbytes: int) -> int:
    """How many of these files, counted from the first, exceed what a folder of this limit keeps."""
    n = max(len(files) - QUARANTINE_FILES, 0)
    while sum(file.nbytes for file in files[n:]) > limit_nbytes // QUARANTINE_SHARE:
        n += 1
    return n


class Disk:
    """Every system call of the tier; paths are relative to the folder. Tests replace it."""

    max_call_nbytes = 256 << 20
    """The most bytes that one call reads or writes: some systems refuse 2 GiB and more."""
    max_pieces = 512

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_locks = True

    def files(self, sub: str) -> list[FileStat]:
        """The plain files of a subfolder; none if it does not exist."""
        files: list[FileStat] = []
        try:
            entries = os.scandir(f"{self.folder}/{sub}")
        except (FileNotFoundError, NotADirectoryError):
            return files
        with entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                    if entry.is_file(follow_symlinks=False):
                        files.append(FileStat.of(entry.name, entry.stat(follow_symlinks=False)))
        return files

    def subfolder(self, sub: str) -> tuple[int, int]:
        """Its own bytes, and when names in it last changed; (0, 0) if it does not exist."""
        try:
            stat = os.stat(f"{self.folder}/{sub}")
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0
        return stat.st_blocks * 512, stat.st_mtime_ns

    def temps(self) -> list[FileStat]:
        """Files that are being written, or were when their writer died. A user's own files in a folder
        called tmp are not among them."""
        return [file for file in self.files(TMP) if _temp(file.name)]

    def quarantined(self) -> list[FileStat]:
        """The oldest first: their names end with the time."""
        files = (file for file in self.files(QUARANTINE) if _set_aside(file.name))
        return sorted(files, key=lambda file: file.name.rpartition(".")[2])

    def other_nbytes(self) -> int:
        """All except records and quarantine: temp files at their reserved size, the lock, notes."""
        temps = sum(max(reserved_nbytes(temp.name), temp.nbytes) for temp in self.temps())
        fixed = [self.stat(LOCK), self.stat(TAG_FILE), *self.files(MODELS), *self.files(CLEARED)]
        folders = sum(self.subfolder(sub)[0] for sub in (".", TMP, MODELS, CLEARED))
        files = sum(file.nbytes for file in fixed if file is not None)
        return temps + folders + files + MARGIN_NBYTES

    def stat(self, path: str) -> FileStat | None:
        try:
            return FileStat.of(path, os.stat(f"{self.folder}/{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return os.open(f"{self.folder}/{path}", flags | os.O_CLOEXEC, 0o600)

    def stat_open(self, fd: int) -> FileStat:
        return FileStat.of("", os.fstat(fd))

    def read(self, fd: int, buffer: memoryview) -> int:
        """Read the next bytes of a file, as many as one call returns."""
        return os.readv(fd, [buffer[: self.max_call_nbytes]])

    def read_first(self, fd: int, nbytes: int) -> memoryview:
        """The first `nbytes` bytes of a file that was just opened. Raises OSError; EOFError if it has
        fewer, though it had as many a moment ago."""
        # Not a bytearray: that would be filled with zeros first.
        view = np.empty(nbytes, dtype=np.uint8).data
        have = 0
        while have < nbytes:
            n = self.read(fd, view[have:])
            if n == 0:
                raise EOFError(f"the file ends at {have}")
            have += n
        return view

    def close(self, fd: int) -> None:
        os.close(fd)

    def make_folder(self) -> None:
        """Make the folder and its fixed contents. If new or ours, it is closed to other users."""
        is_new = not self.folder.exists()
        make_private(self.folder)
        is_ours = is_new or (self.folder / LOCK).exists() or not any(self.folder.iterdir())
        if is_ours and self.folder.stat().st_mode & 0o077:
            self.folder.chmod(0o700)
        for name in (TMP, QUARANTINE):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        if not (self.folder / TAG_FILE).exists():
            fd = self.open(TAG_FILE, os.O_WRONLY | os.O_CREAT)
            with os.fdopen(fd, "wb") as file:
                file.write(TAG_TEXT)

    def free_nbytes(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def open_lock(self) -> int:
        return self.open(LOCK, os.O_RDWR | os.O_CREAT)

    def is_lock(self, fd: int) -> bool:
        """Whether this is still the folder's lock file: someone may have deleted the folder."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(f"{self.folder}/{LOCK}"))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def try_lock(self, fd: int) -> bool:
        """False: another process holds it. Where the file system has no locks, this always succeeds."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            if self.has_locks:
                log.warning(
                    "%s: file locking is not supported; do not share this folder with another "
                    "server",
                    self.folder,
                )
            self.has_locks = False
        return True

    def unlock(self, fd: int) -> None:
        if self.has_locks:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def read_page(self, fd: int, nbytes: int) -> bytes:
        return os.pread(fd, nbytes, 0)

    def write_page(self, fd: int, page: bytes) -> None:
        os.pwrite(fd, page, 0)

    def create(self, path: str) -> int:
        """A new temp file, locked for as long as its writer lives."""
        fd = self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if NO_CACHE is not None:
            with contextlib.suppress(OSError):  # other file systems than Apple's may not know it
                fcntl.fcntl(fd, NO_CACHE, 1)
        self.try_lock(fd)
        return fd

    def is_abandoned(self, path: str, age_s: float) -> bool:
        """Whether the writer of a temp file is dead: then the system has released its lock.

        A process id would not do: ids are reused, and differ between containers. The file is opened
        for writing, because network file systems give exclusive locks to writers only.
        """
        try:
            fd = self.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            return self.try_lock(fd) and (self.has_locks or age_s > ABANDONED_S)
        finally:
            os.close(fd)

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        """Write all pieces; most records take one call."""
        left = [memoryview(p) for p in pieces if len(p)]
        at = 0
        while at < len(left):
            n = os.writev(fd, list(self._batch(left, at)))
            while n:
                if n < len(left[at]):
                    left[at] = left[at][n:]
                    break
                n -= len(left[at])
                at += 1

    def _batch(self, left: Sequence[memoryview], at: int) -> Iterator[memoryview]:
        room = self.max_call_nbytes
        for view in islice(left, at, at + self.max_pieces):
            yield view[:room]
            room -= min(len(view), room)
            if not room:
                return

    def rename(self, path: str, to: str) -> None:
        try:
            os.rename(f"{self.folder}/{path}", f"{self.folder}/{to}")
        except FileNotFoundError:
            (self.folder / to).parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(f"{self.folder}/{path}", f"{self.folder}/{to}")

    def unlink(self, path: str) -> None:
        """Remove a file; one that is already gone is no fault."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(f"{self.folder}/{path}")

    def rmdir(self, sub: str) -> None:
        """Remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(f"{self.folder}/{sub}")

    def bury(self, root: str, at: float) -> None:
        """Raise the time at which a root was cleared. One call writes it: a process that is killed
        leaves the old time or the new one."""
        (self.folder / CLEARED).mkdir(mode=0o700, exist_ok=True)
        fd = self.open(f"{CLEARED}/{root}", os.O_RDWR | os.O_CREAT)
        try:
            if _cleared_at(self.read_page(fd, _time.size)) < at:
                self.write_page(fd, _time.pack(at))
        finally:
            self.close(fd)

    def buried(self) -> dict[str, float]:
        """When each root was cleared."""
        times: dict[str, float] = {}
        for file in self.files(CLEARED):
            if is_root(file.name):
                fd = self.open(f"{CLEARED}/{file.name}")
                try:
                    times[file.name] = _cleared_at(self.read_page(fd, _time.size))
                finally:
                    self.close(fd)
        return times

    def set_mtime(self, path: str, at: float) -> None:
        ns = int(at * 1e9)
        os.utime(f"{self.folder}/{path}", ns=(ns, ns))


def _cleared_at(raw: bytes) -> float:
    """An empty file is one whose writer was killed before it could promise anything."""
    return float(_time.unpack(raw)[0]) if len(raw) == _time.size else -inf


# --- numbers that processes share ----------------------------------------------------------

MAGIC = int.from_bytes(b"firn pg2", "little")
_LIMIT, _HOURS, _COUNTERS, _NBYTES = 1, 2, 2 + 2 * N_HOURS, 2 + 2 * N_HOURS + len(COUNTED)
_N_WORDS = _NBYTES + len(COUNTED)
Words = npt.NDArray[np.int64]


class Page:
    """The numbers in the lock file. Owner: the thread that holds the lock.

        magic | limit | 24 x (hour, bytes written in it) | 257 x counter | 257 x bytes on disk

    Each subfolder has a counter, which is raised before anything in it changes, and again
    afterwards. A process that sees a counter changed lists the subfolder again. An odd one means
    that a process died or failed in between: the subfolder's bytes must be measured. A new page
    begins with odd counters.
    """

    def __init__(self, words: Words, save: Callable[[bytes], None]) -> None:
        self._words = words
        self._save = save
        self.counters = words[_COUNTERS:_NBYTES]
        self.nbytes = words[_NBYTES:]

    def save(self) -> None:
        self._save(self._words.astype("<i8").tobytes())

    @property
    def limit_nbytes(self) -> int:
        """The limit of the process that opened the folder last; 0: none yet."""
        return int(self._words[_LIMIT])

    @limit_nbytes.setter
    def limit_nbytes(self, nbytes: int) -> None:
        self._words[_LIMIT] = nbytes

    def day_nbytes(self, hour: int) -> int:
        """Bytes written in this hour and the 23 before it, by all processes."""
        hours = self._words[_HOURS:_COUNTERS].reshape(N_HOURS, 2)
        return sum(int(n) for h, n in hours if hour - N_HOURS < int(h) <= hour)

    def check_budget(self, budget_nbytes: int | None, hour: int, nbytes: int) -> None:
        """Raises Refused if writing `nbytes` more would exceed the day's budget."""
        if budget_nbytes is not None and self.day_nbytes(hour) + nbytes > budget_nbytes:
            raise Refused("write budget")

    def add_written(self, hour: int, nbytes: int) -> None:
        slot = self._words[_HOURS:_COUNTERS].reshape(N_HOURS, 2)[hour % N_HOURS]
        slot[:] = hour, nbytes + (int(slot[1]) if int(slot[0]) == hour else 0)


class FolderLock:
    """Owner: the tier, which admits one thread at a time."""

    def __init__(self, disk: Disk, *, timeout_s: float) -> None:
        self._disk = disk
        self._timeout_s = timeout_s
        self._fd = -1

    @contextlib.contextmanager
    def hold(self) -> Iterator[Page]:
        """Raises TierFault if others hold it too long, OSError if the folder cannot be used."""
        fd = self._acquire()
        try:
            words = _parse(self._disk.read_page(fd, 8 * _N_WORDS))
            yield Page(
                _fresh() if words is None else words, lambda raw: self._disk.write_page(fd, raw)
            )
        finally:
            self._disk.unlock(fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Servers never close a tier: its lock file is closed with the last reference to it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def _acquire(self) -> int:
        deadline = time.monotonic() + self._timeout_s
        poll = POLL_S
        while True:
            if self._fd < 0:
                self._disk.make_folder()
                self._fd = self._disk.open_lock()
            if self._disk.try_lock(self._fd):
                if self._disk.is_lock(self._fd):
                    return self._fd
                self.close()  # the folder was deleted under us: begin again
            if time.monotonic() >= deadline:
                raise TierFault(
                    "locked", "timed out waiting for the folder lock held by another process"
                )
            time.sleep(poll)
            poll = min(2 * poll, MAX_POLL_S)


def peek(disk: Disk) -> Page | None:
    """The current numbers, read without the lock and not to be changed; None if there are none."""
    try:
        fd = disk.open(LOCK)
        try:
            words = _parse(disk.read_page(fd, 8 * _N_WORDS))
        finally:
            disk.close(fd)
    except OSError:
        return None
    return None if words is None else Page(words, lambda raw: None)


def _parse(raw: bytes) -> Words | None:
    if len(raw) != 8 * _N_WORDS or int.from_bytes(raw[:8], "little") != MAGIC:
        return None
    return np.frombuffer(raw, dtype="<i8").astype(np.int64)


def _fresh() -> Words:
    words = np.zeros(_N_WORDS, dtype=np.int64)
    words[0] = MAGIC
    words[_COUNTERS:_NBYTES] = 2 * int.from_bytes(os.urandom(5), "little") + 1
    return words


# --- without the lock ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A record file that the disk cannot read, or that may not be opened."""

    name: str
    nbytes: int
    used_at: float
    fault: TierFault


def read_heads(folder: Path) -> Iterator[ScannedRecord | UnreadFile]:
    """The beginning of every record file, foreign ones too."""
    disk = Disk(folder)
    for sub in SUBFOLDERS:
        for stat in disk.files(sub):
            if not stat.name.endswith(SUFFIX):
                continue
            name = key_of(sub, stat.name)
            try:
                with open(f"{folder}/{sub}/{stat.name}", "rb") as file:
                    yield ScannedRecord(name, file.read(PEEK_NBYTES), stat.size, stat.mtime)
            except FileNotFoundError:  # evicted since it was listed
                continue
            except OSError as e:
                yield UnreadFile(name, stat.size, stat.mtime, fault_of(e))


def default_limit(free_nbytes: int, used_nbytes: int = 0) -> int:
    """10 GiB, but at most a quarter of the space that is free or already used by the cache."""
    return max(min(DEFAULT_LIMIT_NBYTES, (free_nbytes + used_nbytes) // 4), 0)


def raised_limit(limit_nbytes: int, *, free_nbytes: int, used_nbytes: int) -> int:
    """The default limit once a full disk has room again; a little more room changes nothing."""
    limit = default_limit(free_nbytes, used_nbytes)
    return limit if limit > WORTH_RAISING * limit_nbytes else limit_nbytes
