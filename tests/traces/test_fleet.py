"""Several servers and one store, simulated: what must hold for any traffic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from firn.traces.agents import agent_trace
from firn.traces.fleet import ROUTINGS, play_fleet
from firn.traces.read import line_of
from firn.traces.simulate import SimulatedSsd, play
from firn.traces.trace import Trace, TraceEntry

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.of(agent_trace(3000, n_people=12), block=256)


def firn(*words: str, status: int = 0) -> str:
    """The command's output."""
    command = [sys.executable, "-m", "firn", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout or done.stderr


def unlimited(trace: Trace) -> float:
    return float(trace.known.sum()) * trace.block / trace.n_prompt_tokens


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_server_is_what_one_server_is(trace: Trace, routing: str) -> None:
    alone = (
        float(play(SimulatedSsd(trace, n_blocks=4000)).sum()) * trace.block / trace.n_prompt_tokens
    )
    found = play_fleet(trace, n_servers=1, n_blocks=4000, routing=routing)  # type: ignore[arg-type]
    assert found.local == pytest.approx(alone)
    assert (found.from_store, found.n_written, found.busiest) == (0.0, 0, 1.0)


def test_a_router_that_knows_and_a_store_both_help(trace: Trace) -> None:
    def reused(routing: str, ttl_s: float | None) -> float:
        return play_fleet(
            trace,
            n_servers=6,
            n_blocks=4000,
            routing=routing,  # type: ignore[arg-type]
            ttl_s=ttl_s,
        ).reused

    plain, aware = reused("round robin", None), reused("cache-aware", None)
    stored, both = reused("round robin", DAY_S), reused("cache-aware", DAY_S)
    assert plain < 0.9 * aware
    assert plain < stored
    assert aware <= both <= unlimited(trace) + 1e-9


def test_nobody_does_all_the_work(trace: Trace) -> None:
    found = play_fleet(trace, n_servers=6, n_blocks=4000, routing="cache-aware")
    assert found.busiest < 3.0


def test_the_store_has_what_was_used_twice_for_as_long_as_it_is_told() -> None:
    def at(time_s: float, *blocks: int) -> TraceEntry:
        return TraceEntry(time_s, 4 * len(blocks), 0, blocks)

    asked = [at(0, 1, 2), at(10, 1, 2), at(20, 1, 2, 3), at(5000, 1, 2), at(5010, 1, 2)]
    trace = Trace.of(asked, block=4)

    def play_with(ttl_s: float) -> tuple[int, int]:
        found = play_fleet(trace, n_servers=5, n_blocks=100, routing="round robin", ttl_s=ttl_s)
        return found.n_read, found.n_written

    assert play_with(100.0) == (0, 0), "nobody saw any of it twice"
    two = play_fleet(trace, n_servers=2, n_blocks=100, routing="round robin", ttl_s=100.0)
    assert two.n_written == 4, "by the third request, and again by the fifth"
    assert two.n_read == 0
    assert two.n_kept == 2
    other = Trace.of([at(0, 1, 2), at(1, 9), at(2, 1, 2), at(3, 1, 2)], block=4)
    found = play_fleet(other, n_servers=2, n_blocks=100, routing="round robin", ttl_s=100.0)
    assert (found.n_written, found.n_read) == (2, 2), "the second server never saw it"


def test_the_command_tells_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    entries = agent_trace(400, n_people=4)
    file.write_text("\n".join(line_of(entry, block=256) for entry in entries))
    command = ["cache", "advise", str(file), "--servers", "4", "--token-bytes", "1024"]
    shown = firn(*command)
    assert "cache-aware" in shown
    assert "MiB/s" in shown
    told = json.loads(firn(*command, "--json"))
    assert (told["servers"], len(told["runs"])) == (4, 12)
    rates = np.array([run["reused"] for run in told["runs"]])
    assert ((rates >= 0) & (rates <= 1)).all()
    assert "--store-ttl soon" in firn(*command, "--store-ttl", "soon", status=2)
