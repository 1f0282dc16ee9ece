"""A digest of every byte of every tensor in some safetensors files, at memory speed.

Tensors are cut into pieces. Several threads compute a 128-bit xxh3 of each piece, in any order
(xxhash and the reads release the GIL), and blake2b joins them with the tensors' names, types and
shapes. The order of files and of tensors does not matter, unless two tensors have the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from firn.core.errors import SetupError
from firn.models.load.page_cache import CachedFile
from firn.models.load.tensor_header import read_header

PIECE_NBYTES = 4 << 20
MAX_THREADS = 8
POLL_S = 0.05
"""How long to wait for the loader while the page cache holds nothing that is still to be hashed."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Values that change when a file's bytes do. `ctime_ns` cannot be set back."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def identities(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """The identities of the files, with links resolved. Raises OSError."""
    return tuple(_identity(os.path.realpath(path)) for path in paths)


def _identity(path: str) -> FileIdentity:
    s = os.stat(path)
    return FileIdentity(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)


@dataclass(slots=True)
class _HashedTensor:
    label: bytes
    dtype: str
    start: int
    """Offset in the file."""
    nbytes: int
    pieces: list[bytes] = field(default_factory=list)

    @property
    def entry(self) -> bytes:
        digest = hashlib.blake2b(b"".join(self.pieces), digest_size=32).digest()
        return self.label + b"\0" + digest


@dataclass(frozen=True, slots=True)
class _Read:
    """One read: bytes [start, start + nbytes) of a file, and the pieces of tensors in them."""

    file: int
    start: int
    nbytes: int
    pieces: tuple[tuple[_HashedTensor, int, int, int], ...]
    """Tensor, number of the piece, and the piece's bytes [low, high) within the read."""


class WeightHash:
    """Computed in the background as soon as it is created. Its threads are daemons: nothing has to
    wait for them.

    Until `result` is called, the loader is reading the same files. So that the disk is read only
    once, pieces that the loader has brought into the page cache are hashed first, before they are
    evicted.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads the headers. Raises SetupError."""
        self._paths = paths
        self._tensors = list(_tensors(paths))
        self.dtypes = frozenset(tensor.dtype for _, tensor in self._tensors)
        self._left = deque(_planned(self._tensors))
        self._lock = threading.Lock()
        self._waited_for = threading.Event()
        self._fault: Exception | None = None
        n_threads = min(MAX_THREADS, os.cpu_count() or 1, len(self._left))
        self._threads = [
            threading.Thread(target=self._work, name="firn-weights", daemon=True)
            for _ in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> bytes:
        """Waits. Raises SetupError."""
        self._waited_for.set()
        for thread in self._threads:
            thread.join()
        if self._fault is not None:
            where = self._paths[0].parent
            raise SetupError(f"{where}: the weights cannot be read: {self._fault}")
        digest = hashlib.blake2b(digest_size=32, person=b"firn-weights")
        for entry in sorted(tensor.entry for _, tensor in self._tensors):
            digest.update(len(entry).to_bytes(8, "little"))
            digest.update(entry)
        return digest.digest()

    def _work(self) -> None:
        """The main function of a thread."""
        buffer = memoryview(bytearray(PIECE_NBYTES))
        with ExitStack() as opened:
            files: dict[int, CachedFile] = {}
            n_passed = 0
            try:
                while self._fault is None:
                    with self._lock:
                        if not self._left:
                            return
                        read = self._left.popleft()
                    if read.file not in files:
                        path = self._paths[read.file]
                        files[read.file] = opened.enter_context(CachedFile(path))
                    file = files[read.file]
                    if not self._waited_for.is_set() and not file.holds(read.start, read.nbytes):
                        with self._lock:
                            self._left.append(read)
                        n_passed += 1
                        if n_passed > len(self._left):
                            self._waited_for.wait(POLL_S)
                            n_passed = 0
                        continue
                    n_passed = 0
                    file.read(buffer[: read.nbytes], read.start)
                    for tensor, number, low, high in read.pieces:
                        tensor.pieces[number] = xxhash.xxh3_128_digest(buffer[low:high])
            except (OSError, ValueError) as e:
                self._fault = e


def _planned(tensors: Sequence[tuple[int, _HashedTensor]]) -> Iterator[_Read]:
    """Reads no larger than a piece: part of a large tensor, or several adjacent small ones."""
    for tensor in (t for _, t in tensors):
        tensor.pieces = [b""] * -(-tensor.nbytes // PIECE_NBYTES)
    ordered = sorted(tensors, key=lambda item: (item[0], item[1].start))
    return _reads(ordered)


def _reads(ordered: Sequence[tuple[int, _HashedTensor]]) -> Iterator[_Read]:
    together: list[tuple[_HashedTensor, int, int, int]] = []
    file = first = end = -1
    for at, tensor in ordered:
        if tensor.nbytes > PIECE_NBYTES:
            for number in range(len(tensor.pieces)):
                low = number * PIECE_NBYTES
                n = min(PIECE_NBYTES, tensor.nbytes - low)
                yield _Read(at, tensor.start + low, n, ((tensor, number, 0, n),))
            continue
        if not tensor.nbytes:
            continue
        last = tensor.start + tensor.nbytes
        if together and (at != file or last - first > PIECE_NBYTES):
            yield _Read(file, first, end - first, tuple(together))
            together = []
        if not together:
            file, first, end = at, tensor.start, last
        together.append((tensor, 0, tensor.start - first, last - first))
        end = max(end, last)
    if together:
        yield _Read(file, first, end - first, tuple(together))


def _tensors(paths: Sequence[Path]) -> Iterator[tuple[int, _HashedTensor]]:
    """The number of the file and the tensor, for each. Raises SetupError."""
    n_seen: Counter[str] = Counter()
    for i, path in enumerate(paths):
        try:
            for name, place in read_header(path).items():
                label = json.dumps([name, place.dtype, place.shape]).encode()
                tensor = _HashedTensor(label, place.dtype, place.start, place.nbytes)
                # If two files have a tensor of the same name, the loader keeps the last one.
                tensor.label += f"\0{n_seen[name]}".encode() if n_seen[name] else b""
                n_seen[name] += 1
                yield i, tensor
        except (OSError, ValueError) as e:
            raise SetupError(
                f"{path.name} in {path.parent} is not a readable safetensors file: {e}"
            ) from e
