"""An SSD tier on a disk that misbehaves. Bytes are really spoilt, so the real checks must notice.

    tier = FaultyTier(TierOptions(folder, limit), plan=random_plan(seed=1, rate=0.2))

The plan is called before each read and write and returns the fault to suffer. `tier.suffered`
counts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from firn.cache.tiers import Buffer, Gone, ScannedRecord, TierOptions, TierUsage, WriteResult
from firn.cache.tiers._folder import Disk, path_of
from firn.cache.tiers.ssd import SsdTier


class Fault(Enum):
    DROP = "drop"
    """A write that reports success but never happens; a read of a file that someone has deleted."""
    DELAY = "delay"
    """Waits for `tier.release()`, for at most `delay_s`."""
    SHORT_READ = "short read"
    BIT_FLIP = "bit flip"
    SWAP = "swap"
    """The file has been exchanged with another record's."""
    STALE = "stale"
    """The file has the content of another record's file, which still exists."""
    DUPLICATE = "duplicate"
    """The operation happens twice."""
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
Plan = Callable[[Op, str], Fault | None]


def random_plan(*, seed: int, rate: float, faults: Sequence[Fault] = QUICK_FAULTS) -> Plan:
    """A fault in this share of the operations; a delay or a kill only if `faults` names it."""
    rng, lock = random.Random(seed), threading.Lock()
    allowed = {
        "write": [f for f in faults if f in (*WRITE_FAULTS, Fault.KILL)],
        "read": [f for f in faults if f in READ_FAULTS],
    }

    def plan(op: Op, name: str) -> Fault | None:
        with lock:
            return rng.choice(allowed[op]) if allowed[op] and rng.random() < rate else None

    return plan


class FaultyDisk(Disk):
    """Fails operations on demand: for all threads (`errors`), or once for one (`failing`)."""

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

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name not in vars(Disk) or not callable(found):
            return found

        def watched(*args: Any) -> Any:
            try:
                self._enter(name)
            except OSError:
                if name == "write":
                    os.write(args[0], b"".join(args[1])[: sum(len(p) for p in args[1]) // 2])
                raise
            return found(*args)

        return watched

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


class FaultyTier:
    """Implements tiers.Tier."""

    def __init__(
        self,
        options: TierOptions,
        *,
        plan: Plan,
        seed: int = 0,
        delay_s: float = 10.0,
        **more: Any,
    ) -> None:
        self.disk = FaultyDisk(Path(options.location))
        self.inner = SsdTier(options, disk=self.disk, **more)
        self.suffered: Counter[str] = Counter()
        self._plan = plan
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._delay_s = delay_s

    def release(self) -> None:
        """End all delays, the present ones and all later ones."""
        self._gate.set()

    # --- the contract ------------------------------------------------------------------------

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        return self.inner.scan()

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        fault = self._next("write", name)
        if fault is Fault.DROP:
            return WriteResult(1, new=True)
        if fault is Fault.DUPLICATE:
            self.inner.write(name, pieces, used_at=used_at)
        if fault in ERRNO or fault is Fault.KILL:
            with self.disk.failing("write", ERRNO.get(fault, 0)):
                return self.inner.write(name, pieces, used_at=used_at)
        return self.inner.write(name, pieces, used_at=used_at)

    def bury(self, root: str, at: float) -> None:
        self.inner.bury(root, at)

    def buried(self) -> Mapping[str, float]:
        return self.inner.buried()

    def read(self, name: str, n: int | None = None) -> memoryview:
        fault = self._next("read", name)
        if fault is Fault.EIO:
            with self.disk.failing("read", errno.EIO):
                return self.inner.read(name, n)
        if fault is Fault.DUPLICATE:
            self.inner.read(name, n)
        if fault in (Fault.DROP, Fault.SHORT_READ, Fault.BIT_FLIP, Fault.SWAP, Fault.STALE):
            # The file or its folder may be removed while it is being spoilt: it is lost either way.
            with self._lock, contextlib.suppress(FileNotFoundError):
                self._spoil(self.disk.folder / path_of(name), fault)
        return self.inner.read(name, n)

    def touch(self, stamps: Mapping[str, float]) -> None:
        self.inner.touch(stamps)

    def delete(self, name: str, *, keep: bool = False) -> None:
        self.inner.delete(name, keep=keep)

    def usage(self) -> TierUsage:
        return self.inner.usage()

    # --- the damage --------------------------------------------------------------------------

    def _next(self, op: Op, name: str) -> Fault | None:
        fault = self._plan(op, name)
        if fault is not None:
            with self._lock:
                self.suffered[f"{op} {fault.value}"] += 1
        if fault is Fault.DELAY:
            self._gate.wait(timeout=self._delay_s)
        return fault

    def _spoil(self, path: Path, fault: Fault) -> None:
        """Spoils a file behind the tier's back, as a bad disk or a careless user would."""
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
        others = [p for p in sorted(self.disk.folder.glob("??/*.safetensors")) if p != path]
        return self._rng.choice(others) if others else None


def put(path: Path, content: bytes | bytearray) -> None:
    """Replaces the file atomically, so that a reader sees either the old one or the new one."""
    temp = path.with_name(f".{path.name}.spoilt")
    temp.write_bytes(content)
    temp.replace(path)
