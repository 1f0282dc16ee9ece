"""Kills a process at every step of the tier's work and checks what is left. See test_ssd_kill.py.

For each step a child is forked that kills itself there; the parent then opens the folder as a fresh
process would.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from firn.cache.parts import Part
from firn.cache.tiers import Buffer
from firn.cache.tiers._folder import Disk, path_of
from tests.cache.tiers.folders import du
from tests.cache.tiers.records import Folder, beside, chain, of_size

MIB = 1 << 20
LIMIT = 2 * MIB
BEFORE, NOW = 1.7e9, 1.75e9
CHANGES = {
    "make_folder", "open_lock", "try_lock", "unlock", "write_page", "create", "write",
    "close", "rename", "unlink", "rmdir", "set_mtime",
}  # fmt: skip
OLD = chain(4, nbytes=200_000)
OTHERS = [of_size(200_000, 40 + i) for i in range(4)]
NEW = [of_size(500_000, 90), beside(OLD[3], Part.STATE)]
BAD = OTHERS[0]


class Dying(Disk):
    """Kills its process before the k-th of the calls that change something."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        self.step = step
        self.n_steps = 0

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in CHANGES:
            return attribute

        def counted(*args: Any) -> Any:
            self.n_steps += 1
            if self.n_steps == self.step:
                die()
            return attribute(*args)

        return counted


class DyingHalfWay(Dying):
    """Kills its process in the middle of writing a record."""

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        raw = b"".join(pieces)
        os.write(fd, raw[: len(raw) * self.step // 8])
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    tier = Folder(folder, LIMIT)
    for i, one in enumerate((*OLD, *OTHERS)):
        tier.write(one, used_at=BEFORE - 4 * i)
    tier.tier.close()
    path = folder / path_of(str(BAD.name))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def work(folder: Path, disk: Disk) -> None:
    """A scan, writes that evict, a damaged read that quarantines, a delete, a touch."""
    tier = Folder(folder, LIMIT, disk=disk)
    tier.scan()
    tier.holds(BAD)
    for one in NEW:
        tier.write(one, used_at=NOW)
    tier.touch(OLD, at=NOW)
    tier.delete(OTHERS[3])


def look(folder: Path) -> None:
    """What a restart must find, whatever happened."""
    assert du(folder) <= LIMIT
    tier = Folder(folder, LIMIT)
    names = tier.names()
    assert not any((folder / "tmp").iterdir()), "a temp file is left"
    for one in (*OLD, *OTHERS, *NEW):
        good = tier.holds(one)  # never other bytes than its own
        assert good == (one.name in names) or one is BAD
    for one in NEW:
        tier.write(one, used_at=NOW)
    assert all(tier.holds(one) for one in NEW)
    assert du(folder) <= LIMIT
    assert du(folder) <= tier.usage().nbytes <= min(LIMIT, du(folder) + 64 * 1024), "miscounted"


def child(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status


def main(folder: Path) -> int:
    counting = Dying(folder, 0)
    prepare(folder)
    work(folder, counting)
    n_steps = counting.n_steps
    n_killed = 0
    dying = [Dying(folder, k) for k in range(1, n_steps + 1)]
    dying += [DyingHalfWay(folder, k) for k in range(9)]
    for disk in dying:
        prepare(folder)
        status = child(lambda disk=disk: work(folder, disk))  # type: ignore[misc]
        if isinstance(disk, DyingHalfWay) or disk.step < n_steps - 5:
            assert os.WIFSIGNALED(status), f"step {disk.step} was not reached"
        n_killed += os.WIFSIGNALED(status)
        look(folder)
    print(n_steps, n_killed)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
