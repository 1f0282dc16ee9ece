"""The misbehaving tier itself: each fault is suffered, and none of them gets through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from firn.cache.faults import Damaged, Missing, Refused, TierFault
from firn.cache.tiers import Entry
from firn.cache.tiers.ssd import SsdSettings, SsdTier
from tests.cache.tiers.records import chain, holds
from tests.faulty_tier import READ_FAULTS, WRITE_FAULTS, Fault, FaultyTier, random_plan

MIB = 1 << 20
ROOT = Path(__file__).parents[3]
RECORDS = chain(5)


def suffering(folder: Path, op: str, fault: Fault) -> FaultyTier:
    """One that suffers the fault once, then none."""
    left = [fault]
    tier = FaultyTier(
        SsdSettings(folder, MIB, retry_s=0.0),
        plan=lambda now, name: left.pop() if now == op and left else None,
    )
    tier.release()
    return tier


@pytest.mark.parametrize("fault", READ_FAULTS, ids=lambda f: f.value)
def test_read_faults(tmp_path: Path, fault: Fault) -> None:
    tier = suffering(tmp_path, "read", fault)
    for one in RECORDS:
        tier.write(one.header, one.buffers)
    if fault in (Fault.DELAY, Fault.DUPLICATE):
        assert holds(tier, RECORDS[0])
    else:
        expected = Missing if fault is Fault.DROP else (Damaged, Missing)
        with pytest.raises(expected):
            tier.read(RECORDS[0].name, RECORDS[0].header.tokens)
    assert tier.suffered == {f"read {fault.value}": 1}
    for one in RECORDS:
        holds(tier, one)


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda f: f.value)
def test_write_faults(tmp_path: Path, fault: Fault) -> None:
    tier = suffering(tmp_path, "write", fault)
    one = RECORDS[0]
    if fault in (Fault.ENOSPC, Fault.EIO, Fault.EROFS):
        with pytest.raises(TierFault):
            tier.write(one.header, one.buffers)
    else:
        tier.write(one.header, one.buffers)
        assert holds(tier, one) == (fault is not Fault.DROP)
    tier.write(one.header, one.buffers)
    assert holds(tier, one)


def test_a_kill_half_way_through_a_write(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.cache.tiers.test_faulty_tier import RECORDS, suffering\n"
        "from tests.faulty_tier import Fault\n"
        "tier = suffering(Path(sys.argv[1]), 'write', Fault.KILL)\n"
        "tier.write(RECORDS[0].header, RECORDS[0].buffers)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, cwd=ROOT)
    assert run.returncode == -signal.SIGKILL
    tier = SsdTier(SsdSettings(tmp_path, MIB))
    assert list(tier.scan()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_many_faults_and_never_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    settings = SsdSettings(tmp_path, MIB, retry_s=0.0)
    tier = FaultyTier(settings, plan=random_plan(seed=seed, rate=0.3), seed=seed)
    families = [chain(5, first=100 * i, nbytes=20_000) for i in range(15)]
    n_hits = 0
    for i in range(40):
        for one in families[(7 * i) % 15]:
            try:
                tier.write(one.header, one.buffers)
            except (Refused, TierFault):
                continue
            n_hits += holds(tier, one)
        if i % 10 == 9:
            list(tier.scan())
    assert n_hits > 20
    assert sum(tier.suffered.values()) > 40
    fresh = SsdTier(SsdSettings(tmp_path, MIB))
    names = {e.name for e in fresh.scan() if isinstance(e, Entry)}
    assert names == {r.name for f in families for r in f if holds(fresh, r)}
    assert not os.listdir(tmp_path / "tmp")
