"""Programs are started without a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from firn.host import awake, machine
from firn.host.awake import Awake
from firn.host.programs import output_of, started


@pytest.fixture(autouse=True)
def _no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def forks(*args: object) -> None:
        pytest.fail("this process was forked")

    monkeypatch.setattr(subprocess, "_fork_exec", forks)


def test_what_a_program_prints() -> None:
    assert output_of((sys.executable, "-c", "print('hello')")) == "hello\n"
    with pytest.raises(subprocess.CalledProcessError):
        output_of((sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(OSError, match="none"):
        output_of(("/none",))


def test_a_program_that_goes_on() -> None:
    process = started((sys.executable, "-c", "input()"))
    assert process.wait(60) != 0, "it has no input"


def test_a_mac_is_kept_awake_without_a_fork() -> None:
    held = Awake((sys.executable, "-c", "import time; time.sleep(600)"))
    held.note(busy=True)
    assert held.holds
    held.close()
    assert awake.command("darwin")[0].startswith("/")


def test_a_mac_is_asked_for_its_memory_without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def output(command: Sequence[str]) -> str:
        commands.append(command)
        return "Pages free: 1.\nPages purgeable: 1.\nFile-backed pages: 1.\n"

    monkeypatch.setattr(machine, "output_of", output)
    assert machine._mac_available() == 3 * os.sysconf("SC_PAGE_SIZE")
    assert commands == [("/usr/bin/vm_stat",)]
