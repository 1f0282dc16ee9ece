"""Garbage collection with a large tree, in its own process: it changes the whole interpreter."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from firn.cache.garbage import GROWN_BUSY_BYTES, GROWN_IDLE_BYTES, IDLE_EVERY_S, LOOK_EVERY_S

SCRIPT = """
import gc
from firn.cache.garbage import BUSY_EVERY_S, IDLE_EVERY_S, MANY, Garbage
from firn.core.clock import Clock

class Cycle:
    alive = 0
    def __init__(self):
        self.me = self
        Cycle.alive += 1
    def __del__(self):
        Cycle.alive -= 1

class Now(Clock):
    def elapsed(self):
        return now

now = 0.0
passes = []
gc.callbacks.append(lambda phase, info: phase == "stop" and passes.append(info["generation"]))
garbage = Garbage(Now())
kept = [Cycle() for _ in range(200_000)]
assert 2 not in passes, "a full collection of its own accord"
garbage.keep(n_new=MANY - 1)
assert gc.get_freeze_count() < 200_000, "not for a few"
garbage.keep(n_new=MANY)
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

running = Cycle()
n_frozen = gc.get_freeze_count()
now += BUSY_EVERY_S
garbage.tick(idle=False)
assert gc.get_freeze_count() <= n_frozen, "nothing is frozen with a request"
del running
now += IDLE_EVERY_S
garbage.tick(idle=True)
assert Cycle.alive == 200_000, "it is found when it is over"

for cycle in kept:
    cycle.me = None  # as the tree does
del cycle
kept.clear()
assert Cycle.alive == 0, "what is frozen is freed by its reference counts"
"""


def test_full_collections_come_when_there_is_time() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


TRIM = """
import sys, threading, time
from firn.cache.garbage import Garbage
from firn.core.clock import Clock

idle, after_s, n_mib = sys.argv[1] == "idle", float(sys.argv[2]), int(sys.argv[3])

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

class Now(Clock):
    def elapsed(self):
        return now

now = 0.0
garbage = Garbage(Now())
made = threading.Event(), threading.Event()

def other_thread():  # its memory is its own, in glibc
    blocks = [bytearray(64 << 10) for _ in range(n_mib * 16)]
    last = bytearray(64 << 10)
    del blocks
    made[0].set()
    made[1].wait()

thread = threading.Thread(target=other_thread)
thread.start()
made[0].wait()
before = resident()
now = after_s
garbage.tick(idle=idle)
until = time.monotonic() + 30
while resident() > before - (n_mib << 19):
    assert time.monotonic() < until, (before, resident())
    time.sleep(0.01)
made[1].set()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others give it back at once")
@pytest.mark.parametrize(
    ("load", "after_s", "n_mib"),
    [
        ("idle", IDLE_EVERY_S, 60),
        ("idle", LOOK_EVERY_S, (GROWN_IDLE_BYTES >> 20) + 16),
        ("busy", LOOK_EVERY_S, (GROWN_BUSY_BYTES >> 20) + 16),
    ],
)
def test_free_memory_goes_back_to_the_system(load: str, after_s: float, n_mib: int) -> None:
    script = [sys.executable, "-c", TRIM, load, str(after_s), str(n_mib)]
    subprocess.run(script, check=True, timeout=60)
