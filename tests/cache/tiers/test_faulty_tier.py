"""The misbehaving tier itself: each fault occurs, and none of them gets through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from firn.cache.storage.faults import Damaged, Missing, Refused, TierFault
from firn.cache.tiers import TierOptions
from tests.cache.tiers.records import Direct, Folder, chain
from tests.faulty_tier import READ_FAULTS, WRITE_FAULTS, Fault, FaultyTier, random_plan

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
RECORDS = chain(5)


def suffering(folder: Path, op: str, fault: Fault) -> tuple[Direct, FaultyTier]:
    """A tier that suffers the fault once, then none."""
    left = [fault]
    faulty = FaultyTier(
        TierOptions(str(folder), MIB),
        plan=lambda now, name: left.pop() if now == op and left else None,
        retry_s=0.0,
    )
    faulty.release()
    return Direct(faulty), faulty


@pytest.mark.parametrize("fault", READ_FAULTS, ids=lambda f: f.value)
def test_read_faults(tmp_path: Path, fault: Fault) -> None:
    tier, faulty = suffering(tmp_path, "read", fault)
    for one in RECORDS:
        tier.write(one)
    if fault in (Fault.DELAY, Fault.DUPLICATE):
        assert tier.holds(RECORDS[0])
    else:
        misses = {Fault.DROP: (Missing,), Fault.EIO: (TierFault,)}
        expected = misses.get(fault, (Damaged, Missing))
        with pytest.raises(expected):
            tier.read(RECORDS[0])
    assert faulty.suffered == {f"read {fault.value}": 1}
    for one in RECORDS:
        tier.holds(one)


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda f: f.value)
def test_write_faults(tmp_path: Path, fault: Fault) -> None:
    tier, _ = suffering(tmp_path, "write", fault)
    one = RECORDS[0]
    if fault in (Fault.EIO, Fault.EROFS):  # on a full disk it makes room, and tries again
        with pytest.raises(TierFault):
            tier.write(one)
    else:
        tier.write(one)
        assert tier.holds(one) == (fault is not Fault.DROP)
    tier.write(one)
    assert tier.holds(one)


def test_a_kill_half_way_through_a_write(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.cache.tiers.test_faulty_tier import RECORDS, suffering\n"
        "from tests.faulty_tier import Fault\n"
        "tier, _ = suffering(Path(sys.argv[1]), 'write', Fault.KILL)\n"
        "tier.write(RECORDS[0])\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, cwd=ROOT)
    assert run.returncode == -signal.SIGKILL
    assert Folder(tmp_path, MIB).scan() == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_many_faults_and_never_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    plan = random_plan(seed=seed, rate=0.3)
    faulty = FaultyTier(TierOptions(str(tmp_path), MIB), plan=plan, seed=seed, retry_s=0.0)
    tier = Direct(faulty)
    families = [chain(5, first=100 * i, nbytes=20_000) for i in range(15)]
    n_hits = 0
    for i in range(40):
        for one in families[(7 * i) % 15]:
            try:
                tier.write(one)
            except (Refused, TierFault):
                continue
            n_hits += tier.holds(one)
        if i % 10 == 9:
            tier.scan()
    assert n_hits > 20
    assert sum(faulty.suffered.values()) > 40
    fresh = Folder(tmp_path, MIB)
    assert fresh.names() == {r.name for f in families for r in f if fresh.holds(r)}
    assert not os.listdir(tmp_path / "tmp")
