"""An SSD tier on a disk that misbehaves. Bytes are really spoilt: what notices is really tested.

    tier = FaultyTier(SsdSettings(folder, limit), plan=random_plan(seed=1, rate=0.2))

A plan is asked before each read and write, and names the fault to suffer. `tier.suffered` counts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from firn.cache.container import Buffer, Header, Loaded
from firn.cache.tiers import Entry, Gone, Name, Stored, Usage, name_of
from firn.cache.tiers._disk import Disk, path_of
from firn.cache.tiers._survey import record_paths
from firn.cache.tiers.ssd import SsdSettings, SsdTier
from firn.core.keys import KeyTokens


class Fault(Enum):
    DROP = "drop"
    """A write that never happens but says so; a read of a file that someone has deleted."""
    DELAY = "delay"
    """Waits until `tier.release()`, at most `delay_s`."""
    SHORT_READ = "short read"
    BIT_FLIP = "bit flip"
    SWAP = "swap"
    """The file has been exchanged with another record's."""
    STALE = "stale"
    """The file holds what another record's file holds; that one is still there, too."""
    DUPLICATE = "duplicate"
    """The order arrives twice."""
    ENOSPC = "disk full"
    EIO = "I/O error"
    EROFS = "read-only"
    KILL = "kill"
    """SIGKILL, half-way through a write."""


WRITE_FAULTS = (Fault.DROP, Fault.DELAY, Fault.DUPLICATE, Fault.ENOSPC, Fault.EIO, Fault.EROFS)
READ_FAULTS = (
    Fault.DROP, Fault.DELAY, Fault.SHORT_READ, Fault.BIT_FLIP, Fault.SWAP, Fault.STALE,
    Fault.DUPLICATE, Fault.EIO,
)  # fmt: skip
QUICK_FAULTS = tuple(f for f in (*WRITE_FAULTS, *READ_FAULTS) if f is not Fault.DELAY)
ERRNO = {Fault.ENOSPC: errno.ENOSPC, Fault.EIO: errno.EIO, Fault.EROFS: errno.EROFS}
Op = Literal["read", "write"]
Plan = Callable[[Op, Name], Fault | None]


def random_plan(*, seed: int, rate: float, faults: Sequence[Fault] = QUICK_FAULTS) -> Plan:
    """A fault in so many of the operations; never a delay or a kill unless they are named."""
    rng, lock = random.Random(seed), threading.Lock()
    allowed = {
        "write": [f for f in faults if f in (*WRITE_FAULTS, Fault.KILL)],
        "read": [f for f in faults if f in READ_FAULTS],
    }

    def plan(op: Op, name: Name) -> Fault | None:
        with lock:
            return rng.choice(allowed[op]) if allowed[op] and rng.random() < rate else None

    return plan


class FaultyDisk(Disk):
    """Fails where it is told to: for every thread (`errors`), or once for one (`failing`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.errors: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self._here = threading.local()

    @contextlib.contextmanager
    def failing(self, op: str, number: int) -> Iterator[None]:
        """The next `op` of this thread fails; SIGKILL for number 0."""
        self._here.next = (op, number)
        try:
            yield
        finally:
            self._here.next = None

    def _enter(self, op: str) -> None:
        self.calls[op] += 1
        number = self.errors.get(op)
        armed = getattr(self._here, "next", None)
        if armed is not None and armed[0] == op:
            self._here.next = None
            number = armed[1]
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        try:
            self._enter("write")
        except OSError:
            os.write(fd, b"".join(pieces)[: sum(len(p) for p in pieces) // 2])
            raise
        super().write(fd, pieces)

    def names(self, shelf: str) -> list[str]:
        self._enter("names")
        return super().names(shelf)

    def make_folder(self) -> None:
        self._enter("make_folder")
        super().make_folder()

    def open_lock(self) -> int:
        self._enter("open_lock")
        return super().open_lock()

    def write_page(self, fd: int, page: bytes) -> None:
        self._enter("write_page")
        super().write_page(fd, page)

    def create(self, path: str) -> int:
        self._enter("create")
        return super().create(path)

    def rename(self, path: str, to: str) -> None:
        self._enter("rename")
        super().rename(path, to)

    def unlink(self, path: str) -> None:
        self._enter("unlink")
        super().unlink(path)

    def set_mtime(self, path: str, at: float) -> None:
        self._enter("set_mtime")
        super().set_mtime(path, at)

    def open(self, path: str) -> int:
        self._enter("open")
        return super().open(path)

    def read(self, fd: int, buffer: memoryview) -> int:
        self._enter("read")
        return super().read(fd, buffer)


class FaultyTier:
    """Implements tiers.Tier."""

    def __init__(
        self, settings: SsdSettings, *, plan: Plan, seed: int = 0, delay_s: float = 10.0
    ) -> None:
        self.disk = FaultyDisk(settings.folder)
        self.inner = SsdTier(settings, disk=self.disk)
        self.suffered: Counter[str] = Counter()
        self._plan = plan
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._delay_s = delay_s

    def release(self) -> None:
        """Let everything that is delayed go on, now and from now on."""
        self._gate.set()

    # --- the contract ------------------------------------------------------------------------

    def scan(self) -> Iterator[Entry | Gone]:
        return self.inner.scan()

    def write(self, header: Header, buffers: Sequence[Any]) -> Stored:
        fault = self._next("write", name_of(header))
        if fault is Fault.DROP:
            return Stored(1, new=True)
        if fault is Fault.DUPLICATE:
            self.inner.write(header, buffers)
        if fault in ERRNO:
            with self.disk.failing("write", ERRNO[fault]):
                return self.inner.write(header, buffers)
        if fault is Fault.KILL:
            with self.disk.failing("write", 0):
                return self.inner.write(header, buffers)
        return self.inner.write(header, buffers)

    def read(self, name: Name, expect: KeyTokens | None = None) -> Loaded:
        fault = self._next("read", name)
        if fault is Fault.EIO:
            with self.disk.failing("read", errno.EIO):
                return self.inner.read(name, expect)
        if fault is Fault.DUPLICATE:
            self.inner.read(name, expect)
        if fault in (Fault.DROP, Fault.SHORT_READ, Fault.BIT_FLIP, Fault.SWAP, Fault.STALE):
            # A file, or its folder, may go while it is being spoilt: it is lost all the same.
            with self._lock, contextlib.suppress(FileNotFoundError):
                self._spoil(self.disk.folder / path_of(name), fault)
        return self.inner.read(name, expect)

    def delete(self, name: Name) -> None:
        self.inner.delete(name)

    def touch(self, names: Iterable[Name]) -> None:
        self.inner.touch(names)

    def usage(self) -> Usage:
        return self.inner.usage()

    # --- the damage --------------------------------------------------------------------------

    def _next(self, op: Op, name: Name) -> Fault | None:
        fault = self._plan(op, name)
        if fault is not None:
            with self._lock:
                self.suffered[f"{op} {fault.value}"] += 1
        if fault is Fault.DELAY:
            self._gate.wait(timeout=self._delay_s)
        return fault

    def _spoil(self, path: Path, fault: Fault) -> None:
        """Behind the tier's back, as a bad disk or a careless user would."""
        raw = bytearray(path.read_bytes())
        other = self._other(path)
        if fault is Fault.DROP:
            path.unlink(missing_ok=True)
        elif fault is Fault.SHORT_READ:
            put(path, raw[: self._rng.randrange(len(raw))])
        elif fault is Fault.BIT_FLIP:
            raw[self._rng.randrange(len(raw))] ^= 1 << self._rng.randrange(8)
            put(path, raw)
        elif other is not None:
            theirs = other.read_bytes()
            put(path, theirs)
            if fault is Fault.SWAP:
                put(other, raw)

    def _other(self, path: Path) -> Path | None:
        paths = [self.disk.folder / p for p in record_paths(Disk(self.disk.folder))]
        others = [p for p in sorted(paths) if p != path]
        return self._rng.choice(others) if others else None


def put(path: Path, content: bytes | bytearray) -> None:
    """Another file in the place of this one, so that whoever reads sees the one or the other."""
    temp = path.with_name(f".{path.name}.spoilt")
    temp.write_bytes(content)
    temp.replace(path)
