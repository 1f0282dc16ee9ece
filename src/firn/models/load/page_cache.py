"""A file, and which parts of it are in the system's page cache. Checking reads nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np


class CachedFile:
    """Open for reading. Owner: one thread. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY)
        self._map: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError):  # then `holds` cannot tell
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        self._mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        if self._map is not None:
            self._map.close()

    def holds(self, start: int, nbytes: int) -> bool:
        """Whether these bytes are in memory; True if the system cannot tell."""
        if self._map is None or self._mincore is None:
            return True
        first = start - start % mmap.PAGESIZE
        n_pages = -(-(start + nbytes - first) // mmap.PAGESIZE)
        pages = np.empty(n_pages, dtype=np.uint8)
        base = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        status = self._mincore(
            ctypes.c_void_p(base + first),
            ctypes.c_size_t(start + nbytes - first),
            ctypes.c_void_p(pages.ctypes.data),
        )
        return status != 0 or bool((pages & 1).all())

    def read(self, view: memoryview, start: int) -> None:
        """Fill the view. Raises OSError, and ValueError if the file ends too early."""
        n_done = 0
        while n_done < len(view):
            n = os.preadv(self._fd, [view[n_done:]], start + n_done)
            if n == 0:
                raise ValueError("a file has become shorter")
            n_done += n
