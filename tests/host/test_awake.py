"""A Mac stays awake only while requests run; the program that keeps it awake is faked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from firn.host.awake import Awake, command

SLEEPER = (sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(600)")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_is_held_while_requests_run_and_a_little_longer(clock: Clock) -> None:
    awake = Awake(SLEEPER, linger_s=5, clock=clock)
    awake.note(busy=False)
    assert not awake.holds, "nobody has asked for anything"
    awake.note(busy=True)
    process = awake._process
    assert process is not None
    assert process.poll() is None
    awake.note(busy=True)
    assert awake._process is process, "one is enough"
    clock.now = 4
    awake.note(busy=False)
    assert awake.holds, "the next request may come at once"
    clock.now = 9
    awake.note(busy=False)
    assert not awake.holds
    assert process.poll() is not None, "and the program is gone"
    awake.close()


def test_one_that_died_is_started_again(clock: Clock) -> None:
    awake = Awake(SLEEPER, clock=clock)
    awake.note(busy=True)
    first = awake._process
    assert first is not None
    first.kill()
    first.wait()
    awake.note(busy=True)
    assert awake._process is not first
    awake.close()


def test_where_there_is_no_such_program_nothing_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    awake = Awake((str(tmp_path / "caffeinate"),))
    awake.note(busy=True)
    awake.note(busy=True)
    assert not awake.holds
    assert len(caplog.records) == 1, "said once"


def test_the_program_ends_with_the_server() -> None:
    assert command("linux") == ()
    program, *flags = command("darwin")
    assert program == "/usr/bin/caffeinate"
    assert flags[:2] == ["-i", "-w"]
    assert int(flags[2]) > 0


def test_elsewhere_no_process_is_ever_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    awake = Awake(())
    awake.note(busy=True)
    assert not awake.holds
