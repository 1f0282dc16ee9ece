"""Several real processes on one folder: right bytes, and never more of them than the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from firn.cache.storage.faults import TierFault
from firn.cache.tiers._folder import Disk, FolderLock
from tests.cache.tiers.folders import du
from tests.cache.tiers.hammer import FAMILIES
from tests.cache.tiers.records import Folder

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


def start(folder: Path, limit: int, seed: int, n_rounds: int) -> subprocess.Popen[str]:
    arguments = [str(folder), str(limit), str(seed), str(n_rounds)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cache.tiers.hammer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("n_processes", "n_rounds"), [(2, 60), (4, 30), pytest.param(4, 1000, marks=pytest.mark.soak)]
)
def test_the_limit_holds_at_every_moment(tmp_path: Path, n_processes: int, n_rounds: int) -> None:
    folder, limit = tmp_path / "cache", 3 * MIB
    Folder(folder, limit).evict_to(limit)
    processes = [start(folder, limit, seed, n_rounds) for seed in range(n_processes)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
    samples: list[int] = []
    lock = FolderLock(Disk(folder), timeout_s=30)
    while any(p.poll() is None for p in processes):
        # Under the lock nothing is renamed or evicted while we count, but files still grow.
        with lock.hold():
            samples.append(du(folder))
        time.sleep(0.005)  # lets them take the lock
    results = [p.communicate(timeout=60) for p in processes]
    assert all(p.returncode == 0 for p in processes), [err for _, err in results]
    assert len(samples) > 10
    assert max(samples) <= limit
    assert max(samples) > limit * 0.6, "the limit was never near"
    totals: Counter[str] = Counter()
    for out, _ in results:
        report = json.loads(out)
        assert set(report.pop("drops")) <= {"full"}
        totals.update(report)
    assert totals["over"] == 0
    assert totals["hits"] > 50
    assert totals["evictions"] > 20
    assert totals["damaged"] == totals["quarantined"] == 0
    assert list((folder / "tmp").iterdir()) == []
    fresh = Folder(folder, limit)
    entries = fresh.names()
    assert entries
    assert all(fresh.holds(r) == (r.name in entries) for f in FAMILIES for r in f)


def test_a_writer_that_died_leaves_nothing_and_a_living_one_is_left_alone(tmp_path: Path) -> None:
    """Recognised by the lock on the temp file: the process id in its name may be reused."""
    folder, limit = tmp_path / "cache", 3 * MIB
    tier = Folder(folder, limit)
    tier.evict_to(limit)
    key = "ab" * 32
    dead = folder / "tmp" / f"{key}.pages.{os.getpid()}.0.500000.tmp"
    dead.write_bytes(b"x" * 1000)
    living = folder / "tmp" / f"{key}.state.999999999.0.500000.tmp"
    fd = Disk(folder).create(f"tmp/{living.name}")
    try:
        before = Folder(folder, limit)
        before.scan()
        assert not dead.exists()
        assert living.exists()
        assert before.usage().nbytes > 500_000, "what it set aside is counted"
        assert before.usage().counts["stale_temps"] == 1
    finally:
        os.close(fd)
    before.scan()
    assert not living.exists()
    assert before.usage().nbytes < 100_000


def test_a_record_that_another_process_is_writing_is_not_written_twice(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    one = FAMILIES[0][0]
    tier = Folder(folder, 3 * MIB)
    tier.evict_to(MIB)
    name = f"{one.header.key.hex()}.pages.1.0.50000.tmp"
    fd = Disk(folder).create(f"tmp/{name}")
    try:
        assert not tier.write(one).new
    finally:
        os.close(fd)
    assert tier.write(one).new
    assert tier.holds(one)


def test_the_lock_of_a_stopped_process_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from firn.cache.tiers._folder import Disk, FolderLock\n"
        "with FolderLock(Disk(Path(sys.argv[1])), timeout_s=5).hold():\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    tier = Folder(tmp_path, MIB, lock_timeout_s=0.05)
    one = FAMILIES[0][0]
    with pytest.raises(TierFault) as caught:
        tier.write(one)
    assert caught.value.reason == "locked"
    holder.kill()
    holder.communicate()
    fresh = Folder(tmp_path, MIB, lock_timeout_s=5)
    assert fresh.write(one).new
