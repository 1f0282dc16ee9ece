"""Collecting garbage beside a large tree, in a process of its own: it changes the whole interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from firn.cache.garbage import BUSY_EVERY_S, IDLE_EVERY_S, Garbage

class Cycle:
    alive = 0
    def __init__(self):
        self.me = self
        Cycle.alive += 1
    def __del__(self):
        Cycle.alive -= 1

now = 0.0
passes = []
gc.callbacks.append(lambda phase, info: phase == "stop" and passes.append(info["generation"]))
garbage = Garbage(lambda: now)
kept = [Cycle() for _ in range(200_000)]
assert 2 not in passes, "a full collection of its own accord"
garbage.keep()
assert gc.get_freeze_count() > 200_000
Cycle()
assert Cycle.alive == 200_001

passes.clear()
garbage.tick(idle=True)
assert passes == [], "not so soon"
now = IDLE_EVERY_S
garbage.tick(idle=False)
assert passes == [], "not while there is work"
garbage.tick(idle=True)
assert passes == [2] and Cycle.alive == 200_000
Cycle()
now += BUSY_EVERY_S
garbage.tick(idle=False)
assert Cycle.alive == 200_000, "some day even then"

for cycle in kept:
    cycle.me = None  # as the tree does
del cycle
kept.clear()
assert Cycle.alive == 0, "what is frozen is freed by its reference counts"
"""


def test_full_collections_come_when_there_is_time() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
