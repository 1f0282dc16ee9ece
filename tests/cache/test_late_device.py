"""A real model and a real folder under a device that reports its faults late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from firn.cache import copies
from firn.cache.arrays import payload
from firn.cache.memory import rows
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from tests.cache.pending import settle
from tests.cache.tiny import tiny
from tests.harness import Harness, Result, running
from tests.hash_runner import prompt_of


def spoil(
    harness: Harness, *, chunk: int, in_commit: pytest.MonkeyPatch | None = None
) -> list[str]:
    """Make one chunk's work come out as zeros. The device reports it when asked to confirm, or when
    the cache computes what it commits."""
    runner: Any = harness.runner
    told: list[str] = []
    state = {"n": 0, "parked": False}
    prefill, confirm = runner.prefill, runner.confirm

    def spoiled(row: Any, prompt: Any, end: int, **options: Any) -> None:
        prefill(row, prompt, end, **options)
        state["n"] += 1
        if state["n"] == chunk:
            for layer in row.layers:
                layer.keys, layer.values = map(mx.zeros_like, (layer.keys, layer.values))
            state["parked"] = True

    def asked() -> None:
        confirm()
        tell()

    def evaluate(payloads: Any) -> None:
        tell()
        payload.evaluate(payloads)

    def tell() -> None:
        if state["parked"]:
            state["parked"] = False
            told.append("told")
            raise RuntimeError("[METAL] Command buffer execution failed")

    runner.prefill = spoiled
    if in_commit is None:
        runner.confirm = asked
    else:
        in_commit.setattr(copies, "evaluate", evaluate)
    return told


def open_on(folder: Path) -> Any:
    tier = SsdTier(TierOptions(str(folder), 1 << 30))
    return running(tiny("qwen3"), chunk=32, block=32, tier=tier, fingerprint=b"late")


def said(result: Result) -> tuple[list[int], list[float]]:
    return result.reply, [round(p, 3) for p in result.logprobs[0]]


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("told_in", ["confirm", "commit"])
def test_what_a_failed_command_left_is_neither_resumed_nor_written(
    tmp_path: Path, chunk: int, told_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [t % 60 for t in prompt_of(4, 150)]
    with running(tiny("qwen3"), chunk=32, block=32) as plain:
        want = said(plain.ask(ids))
    with open_on(tmp_path) as harness:
        told = spoil(harness, chunk=chunk, in_commit=monkeypatch if told_in == "commit" else None)
        assert said(harness.ask(ids)) == want, "it was computed again"
        assert told == ["told"]
        if told_in == "confirm" or chunk > 1:  # else the commit that failed held the only records
            assert harness.cache.stats.dropped["in doubt"] >= 1
        assert said(harness.ask(ids)) == want
    with open_on(tmp_path) as harness:
        again = harness.ask(ids)
        assert again.n_cached > 0
        assert said(again) == want, "and so is what the disk has of it"


def test_a_prompt_that_memory_had_no_room_for_is_computed_once_records_gave_way(
    tmp_path: Path,
) -> None:
    """Another program has taken memory. What the cache held of other prompts is on the disk."""
    first, second = [t % 60 for t in prompt_of(4, 150)], [t % 60 for t in prompt_of(5, 150)]
    with running(tiny("qwen3"), chunk=32, block=32) as plain:
        want = [said(plain.ask(ids)) for ids in (first, second)]
    with open_on(tmp_path) as harness:
        assert said(harness.ask(first)) == want[0]
        settle(harness)
        before = harness.between_steps(lambda: harness.cache.records.memory.nbytes)
        held: list[int] = []
        runner: Any = harness.runner
        prefill, free_memory = runner.prefill, runner.free_memory

        def out_of_memory(*args: Any, **options: Any) -> None:
            runner.prefill = prefill
            raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")

        def freed() -> None:
            held.append(harness.cache.records.memory.nbytes)
            free_memory()

        runner.prefill, runner.free_memory = out_of_memory, freed
        assert said(harness.ask(second)) == want[1]
        assert before > 0
        assert held == [0], "before it was tried again"
        again = harness.ask(first)
        assert again.n_cached > 0
        assert said(again) == want[0]


class StuckTier(SsdTier):
    """Writes nothing until it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(TierOptions(str(folder), 1 << 30))
        self.go = threading.Event()

    def write(self, *args: Any, **options: Any) -> Any:
        self.go.wait(60)
        return super().write(*args, **options)


def test_records_give_way_even_if_there_is_no_memory_to_copy_them_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in a row, and none is written yet: they are lost, and their memory is freed."""
    ids, tier = [t % 60 for t in prompt_of(4, 600)], StuckTier(tmp_path)

    def fail(payloads: Any) -> None:
        raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")

    with running(tiny("qwen3"), chunk=32, block=32, tier=tier, fingerprint=b"late") as harness:
        want = said(harness.ask(ids))
        records = harness.cache.records

        def give_way() -> list[int]:
            before = records.memory.nbytes
            with monkeypatch.context() as patch:
                patch.setattr(rows, "evaluate", fail)
                harness.cache.set_room(0)
            return [before, records.memory.nbytes]

        before, after = harness.between_steps(give_way)
        tier.go.set()
        assert before > 0
        assert after == 0
        assert records.counts.total.faults["room"] == 1
        assert records.counts.total.dropped["no memory"] > 0
        harness.between_steps(lambda: harness.cache.set_room(1 << 30))
        assert said(harness.ask(ids)) == want
