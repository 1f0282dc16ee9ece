"""Every system call of the SSD tier, and the layout of its folder. Holds no state but the path.

    firn.lock                              see _shared.py
    <2 hex>/<key>.<part>.safetensors       records; complete from the moment they have this name
    tmp/<key>.<part>.<pid>.<n>.<nbytes>.tmp    being written; the name says how much is set aside for it
    quarantine/<file>.<n>                  bytes that turned out bad
    models/<fingerprint>.json              names for people
    CACHEDIR.TAG                           tells backup programs to pass by

Only files of these names are ever counted or removed. Tests put a failing Disk in the place of this.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from firn.cache.container import Buffer
from firn.cache.parts import Part
from firn.cache.tiers import Name
from firn.core.keys import Key

LOCK = "firn.lock"
TMP = "tmp"
QUARANTINE = "quarantine"
MODELS = "models"
TAG_FILE = "CACHEDIR.TAG"
TAG_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# The prefix cache of firn; safe to delete.\n"
)
SUFFIX = ".safetensors"
SHELVES = tuple(f"{i:02x}" for i in range(256))
BLOCK_NBYTES = 4096
LARGE_NBYTES = 4 << 20
"""Files of this size may need a block of the file system's own for their map."""

_RECORD = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.([a-z]+)\.safetensors")
_TEMP = re.compile(r"[0-9a-f]{64}\.[a-z]+\.\d+\.\d+\.(\d+)\.tmp")
_PARTS = {part.value: part for part in Part}


def path_of(name: Name) -> str:
    text = name.key.hex()
    return f"{text[:2]}/{text}.{name.part.value}{SUFFIX}"


def name_at(path: str) -> Name | None:
    """None: no record of ours could have this path."""
    found = _RECORD.fullmatch(path)
    if found is None or found[3] not in _PARTS:
        return None
    return Name(Key(bytes.fromhex(found[2])), _PARTS[found[3]])


def temp_path(name: Name, serial: int, *, nbytes: int) -> str:
    return f"{TMP}/{name.key.hex()}.{name.part.value}.{os.getpid()}.{serial}.{nbytes}.tmp"


def reserved_nbytes(temp: str) -> int:
    """What the name of a temp file sets aside; 0 when it is no such name."""
    found = _TEMP.fullmatch(temp.rpartition("/")[2])
    return int(found[1]) if found else 0


def allocated(size: int, n_sectors: int = 0) -> int:
    """Bytes that a file takes up on disk, or will once the system has written all of it."""
    whole = -(-size // BLOCK_NBYTES) * BLOCK_NBYTES
    return max(whole, n_sectors * 512) + (BLOCK_NBYTES if size >= LARGE_NBYTES else 0)


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in a listing. `path` is relative to the folder."""

    path: str
    size: int
    nbytes: int
    """On disk."""
    mtime: float


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder itself. Not there: no bytes, no time."""

    nbytes: int = 0
    mtime_ns: int = 0


class Disk:
    max_call_nbytes = 256 << 20
    """One call reads or writes at most this: some systems refuse 2 GiB and more."""
    max_pieces = 512

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base = f"{folder}/"

    # --- looking -----------------------------------------------------------------------------

    def files(self, shelf: str) -> list[Listed]:
        """The files of a folder; a folder that is not there has none."""
        try:
            with os.scandir(f"{self._base}{shelf}") as entries:
                return list(self._listed(shelf, entries))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def names(self, shelf: str) -> list[str]:
        """Paths of what is in a folder; a folder that is not there has nothing in it."""
        try:
            return [f"{shelf}/{name}" for name in os.listdir(f"{self._base}{shelf}")]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def shelf(self, name: str) -> Shelf:
        try:
            found = os.stat(f"{self._base}{name}")
        except (FileNotFoundError, NotADirectoryError):
            return Shelf()
        return Shelf(found.st_blocks * 512, found.st_mtime_ns)

    def stat(self, path: str) -> Listed | None:
        try:
            found = os.stat(f"{self._base}{path}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _listed(path, found)

    def open(self, path: str) -> int:
        return os.open(f"{self._base}{path}", os.O_RDONLY | os.O_CLOEXEC)

    def stat_open(self, fd: int, path: str) -> Listed:
        return _listed(path, os.fstat(fd))

    def first(self, fd: int, nbytes: int) -> bytes:
        """The first bytes of a file, fewer where it ends."""
        return os.pread(fd, nbytes, 0)

    def read(self, fd: int, buffer: memoryview) -> int:
        """The next bytes of a file, as many as one call gives."""
        return os.readv(fd, [buffer[: self.max_call_nbytes]])

    # --- changing ----------------------------------------------------------------------------

    def make_folder(self) -> None:
        """The folder and what is always in it. A folder that is ours, or new, is for us alone."""
        if not self.folder.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif self._is_ours() and self.folder.stat().st_mode & 0o077:
            self.folder.chmod(0o700)
        for name in (TMP, QUARANTINE):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        if not (self.folder / TAG_FILE).exists():
            self.put(TAG_FILE, TAG_TEXT)

    def put(self, path: str, content: bytes) -> None:
        """A small file that nothing depends on: half of one does no harm."""
        target = self.folder / path
        target.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)

    def open_lock(self) -> int:
        return os.open(f"{self._base}{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def is_lock(self, fd: int) -> bool:
        """Whether the lock file is still this one: someone may have deleted the folder."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(f"{self._base}{LOCK}"))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def try_lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def read_page(self, fd: int, nbytes: int) -> bytes:
        return os.pread(fd, nbytes, 0)

    def write_page(self, fd: int, page: bytes) -> None:
        os.pwrite(fd, page, 0)

    def create(self, path: str) -> int:
        """A new temp file, locked for as long as its writer lives."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"{self._base}{path}", flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def is_abandoned(self, path: str) -> bool:
        """Whether the writer of a temp file is dead: then the system has let go of its lock.

        Unlike a process id this cannot be taken over, and it means the same in every container.
        """
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return False
        try:
            return self.try_lock(fd)
        finally:
            os.close(fd)

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        """All of it. Most records go out in one call."""
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

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, path: str, to: str) -> None:
        source, target = f"{self._base}{path}", f"{self._base}{to}"
        try:
            os.rename(source, target)
        except FileNotFoundError:
            (self.folder / to).parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(source, target)

    def unlink(self, path: str) -> None:
        """A file that is gone already is no fault."""
        try:
            os.unlink(f"{self._base}{path}")
        except (FileNotFoundError, NotADirectoryError):
            return

    def rmdir(self, shelf: str) -> None:
        """Only an empty folder goes."""
        try:
            os.rmdir(f"{self._base}{shelf}")
        except OSError:
            return

    def set_mtime(self, path: str, at: float) -> None:
        ns = int(at * 1e9)
        os.utime(f"{self._base}{path}", ns=(ns, ns))

    def _is_ours(self) -> bool:
        """Never change the mode of a folder that someone keeps other things in."""
        return (self.folder / LOCK).exists() or not any(self.folder.iterdir())

    def _listed(self, shelf: str, entries: Iterator[os.DirEntry[str]]) -> Iterator[Listed]:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    yield _listed(f"{shelf}/{entry.name}", entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # gone since the folder was read


def _listed(path: str, found: os.stat_result) -> Listed:
    nbytes = allocated(found.st_size, found.st_blocks)
    return Listed(path, found.st_size, nbytes, found.st_mtime)
