"""Chunks that the device cannot compute at some depth, where they must not shrink."""

from __future__ import annotations

import pytest

from firn.core.errors import ContextTooLong
from firn.engine.chunks import DepthLimit
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine
from tests.hash_runner import Faults, prompt_of

CHUNK, DEEP = 8, 48


class SlowDevice:
    """Its watchdog ends whole chunks that begin at DEEP or later; the fault is reported late."""

    def __init__(self) -> None:
        self.n_faults = 0
        self.lab: HashEngine

    def confirm(self) -> None:
        reading = self.lab.engine._loop._reading
        if any(t.row.n_tokens == t.chunk_start + CHUNK > DEEP + 1 for t in reading):
            self.n_faults += 1
            raise RuntimeError("Command buffer execution failed: Caused GPU Timeout Error")


def test_longer_prompts_are_refused_and_others_served() -> None:
    device = SlowDevice()
    with HashEngine(
        Faults(confirm=device.confirm), cache=DictCache(), chunk=CHUNK, aligned=True
    ) as lab:
        device.lab = lab
        first = lab.submit(prompt_of(1, 90), 4)
        other = lab.submit(prompt_of(2, DEEP), 12)
        error = first.wait().error
        assert isinstance(error, ContextTooLong)
        assert (error.n_prompt, error.limit) == (90, DEEP + CHUNK)
        other.wait().check()
        assert isinstance(
            lab.submit(prompt_of(3, DEEP + CHUNK + 1), 4).wait().error, ContextTooLong
        )
        lab.submit(prompt_of(4, DEEP + CHUNK), 4).wait().check()
        assert lab.leftovers() == {}
        assert not lab.n_deaths
    assert device.n_faults == 2


def test_a_fault_at_another_depth_says_nothing() -> None:
    depths = DepthLimit()
    for start in (64, 128, 192):
        depths.failed(start, start + 64)
    depths.check(1 << 20)
    depths.failed(128, 150)
    depths.check(150)
    with pytest.raises(ContextTooLong):
        depths.check(151)


def test_not_every_prompt_is_refused() -> None:
    """A device that fails at once is broken: the process ends."""
    depths = DepthLimit()
    for _ in range(3):
        depths.failed(0, 64)
    depths.check(100)


def test_the_shallowest_depth_counts() -> None:
    depths = DepthLimit()
    for start in (64, 64, 128, 128):
        depths.failed(start, start + 64)
    with pytest.raises(ContextTooLong, match="is 128 tokens"):
        depths.check(129)
