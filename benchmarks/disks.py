"""The disk's own speed, as a yardstick for the cache, and how to make files cold."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from report import BenchError

MIB = 1 << 20
PIECE_NBYTES = 4 * MIB
N_PROBES = 8
MAX_DROPS = 10

Temperature = Literal["cold", "warm", "unknown"]


def write_file(path: Path, pieces: Iterable[Any]) -> float:
    """Seconds to write one file sequentially and sync it to the disk, like `dd`."""
    os.sync()
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[os.write(fd, view[:PIECE_NBYTES]) :]
    finally:
        os.close(fd)
    os.sync()
    return time.perf_counter() - start


def read_file(path: Path) -> float:
    """Seconds to read one file sequentially into a buffer that is reused, like `dd`."""
    buffer = bytearray(PIECE_NBYTES)
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        while os.readv(fd, [buffer]):
            pass
    finally:
        os.close(fd)
    return time.perf_counter() - start


def drop(paths: Iterable[Path]) -> Temperature:
    """Drops these files from the page cache. Returns whether they are cold now."""
    if sys.platform != "linux":
        return "warm"
    seen = {_drop_one(path) for path in paths}
    return "warm" if "warm" in seen else "unknown" if "unknown" in seen else "cold"


def _drop_one(path: Path) -> Temperature:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # a running server has removed or replaced it
        return "cold"
    try:
        os.fsync(fd)  # dirty pages would stay
        for _ in range(MAX_DROPS):
            drop_pages(fd)
            temperature = _temperature(fd)
            if temperature != "warm":
                break
            time.sleep(0.02)  # a page may be in use for a moment
        drop_pages(fd)  # what the probes may have read
        return temperature
    finally:
        os.close(fd)


def drop_pages(fd: int) -> None:
    """Asks the system to drop a file's pages from its cache. Only Linux can do that."""
    if sys.platform == "linux":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _temperature(fd: int) -> Temperature:
    """Whether pages of the file are in memory, according to reads that may not wait."""
    if not hasattr(os, "RWF_NOWAIT"):
        return "unknown"
    size, page = os.fstat(fd).st_size, bytearray(4096)
    for i in range(N_PROBES):
        try:
            if os.preadv(fd, [page], size * (2 * i + 1) // (2 * N_PROBES), os.RWF_NOWAIT):
                return "warm"
        except BlockingIOError:
            continue
        except OSError:
            return "unknown"
    return "cold"


def need_free(folder: Path, nbytes: int) -> None:
    """Raises BenchError unless twice `nbytes` is free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes:
        raise BenchError(
            f"{folder} has {free / 1e9:.1f} GB free; {2 * nbytes / 1e9:.1f} are wanted"
        )


def read_speed(folder: Path, *, nbytes: int = 256 * MIB) -> float:
    """Bytes per second of one sequential read, cold where the system allows it."""
    need_free(folder, nbytes)
    path = folder / "speed.tmp"
    try:
        piece = os.urandom(16 * MIB)
        write_file(path, [piece] * (nbytes // len(piece)))
        drop([path])
        return nbytes / read_file(path)
    finally:
        path.unlink(missing_ok=True)


def sequential_s(folder: Path, nbytes: int) -> float:
    """Seconds to read `nbytes` sequentially from one file that is not in memory."""
    path = folder / "yardstick"
    piece = memoryview(bytes(range(256)) * (1 << 14))
    try:
        write_file(path, [piece] * max(nbytes // len(piece), 1))
        drop([path])
        return read_file(path)
    finally:
        path.unlink(missing_ok=True)
