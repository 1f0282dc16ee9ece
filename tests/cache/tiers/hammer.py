"""One of several processes that share a folder. A program: see test_ssd_processes.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from firn.cache.parts import Part
from firn.cache.storage.container import TierEntry
from firn.cache.storage.faults import Refused
from tests.cache.tiers.records import Folder, beside, chain

FAMILIES = [chain(5, first=1000 * i, nbytes=20_000 + 30_000 * (i % 4)) for i in range(12)]
STATES = [beside(family[-1], Part.STATE) for family in FAMILIES]


def main(folder: Path, limit_nbytes: int, seed: int, n_rounds: int) -> int:
    tier = Folder(folder, limit_nbytes)
    rng = np.random.default_rng(seed)
    n_hits = n_over = 0
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(n_rounds):
        which = int(rng.integers(len(FAMILIES)))
        family = [*FAMILIES[which], STATES[which]]
        for one in family:
            try:
                tier.write(one)
            except Refused:
                break
            n_over += tier.usage().nbytes > limit_nbytes
        other = int(rng.integers(len(FAMILIES)))
        n_hits += sum(tier.holds(r) for r in [*FAMILIES[other], STATES[other]])
        tier.touch(FAMILIES[other])
        if i % 5 == 0:
            tier.delete(STATES[which])
        if i % 7 == 0:
            known = {r.name for f in FAMILIES for r in f} | {s.name for s in STATES}
            assert all(e.name in known for e in tier.scan() if isinstance(e, TierEntry))
    usage = tier.usage()
    print(json.dumps({"hits": n_hits, "over": n_over, "drops": usage.drops, **usage.counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
