"""A rank that dies ends the group, and clients get an error. Each function ends its ranks.

Servers are slow to start, so these run at the end of tests that have started one.
"""

from __future__ import annotations

import contextlib
import signal

import httpx

from tests.ranks.processes import STOP_S, Ranks, client

BODY = {"prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True}


def idle_follower(ranks: Ranks) -> None:
    ranks.processes[1].kill()
    assert ranks.wait() == [1, -signal.SIGKILL], ranks.log(0)[-3000:]
    assert "rank 1 is gone" in ranks.log(0)


def busy_follower(ranks: Ranks) -> None:
    """It dies during a step, in which rank 0's engine then hangs or fails."""
    lines = []
    with client().stream("POST", f"{ranks.url}/v1/completions", json=BODY) as told:
        for line in told.iter_lines():
            if not lines:
                ranks.processes[1].kill()
            lines.append(line)
    assert any('"error"' in line for line in lines), lines[-3:]
    assert ranks.wait() == [1, -signal.SIGKILL], ranks.log(0)[-3000:]


def frozen_follower(ranks: Ranks) -> None:
    """It keeps its connections but never finishes its part of the step: only its silence shows."""
    lines = []
    with client().stream("POST", f"{ranks.url}/v1/completions", json=BODY) as told:
        for line in told.iter_lines():
            if not lines:
                ranks.processes[1].send_signal(signal.SIGSTOP)
            lines.append(line)
    assert any('"error"' in line for line in lines), lines[-3:]
    assert ranks.processes[0].wait(STOP_S) == 1, ranks.log(0)[-3000:]
    assert "rank 1 has sent nothing" in ranks.log(0)
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.processes[1].wait(STOP_S) == 1, "thawed, it finds that rank 0 is gone"


def busy_leader(ranks: Ranks) -> None:
    with (
        contextlib.suppress(httpx.TransportError),
        client().stream("POST", f"{ranks.url}/v1/completions", json=BODY) as told,
    ):
        for _ in told.iter_lines():
            ranks.processes[0].kill()
    codes = ranks.wait()
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, -signal.SIGKILL), "it has ended by itself, and not well"
