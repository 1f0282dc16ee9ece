"""Facts about macOS, with what its programs print."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from firn.host import mac

SNAPSHOTS = """Snapshots for disk /:
com.apple.TimeMachine.2026-11-18-101010.local
com.apple.TimeMachine.2026-11-18-111213.local
com.apple.os.update-9A7B3C1D
"""


class Programs:
    """Prints by the last word of a command; knows nothing else."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str]) -> str:
        assert command[0].startswith("/")
        self.calls.append(tuple(command))
        if command[-1] not in self.texts:
            raise subprocess.CalledProcessError(1, list(command))
        return self.texts[command[-1]]


def test_the_system_is_called_by_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mac, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    programs = Programs(**{"kern.osproductversion": "26.1\n", "kern.osversion": "25B78\n"})
    assert mac.version(output=programs) == "26.1"
    assert mac.build(output=programs) == "25B78"
    assert mac.version(output=Programs()) == "16.0"
    assert mac.build(output=Programs()), "the kernel's, which changes less often"


def test_a_python_for_intel_macs_is_noticed() -> None:
    name = "sysctl.proc_translated"
    assert mac.is_translated("darwin", output=Programs(**{name: "1\n"}))
    assert not mac.is_translated("darwin", output=Programs(**{name: "0\n"}))
    assert not mac.is_translated("darwin", output=Programs())
    elsewhere = Programs(**{name: "1\n"})
    assert not mac.is_translated("linux", output=elsewhere)
    assert elsewhere.calls == []


def test_snapshots_of_the_volume_that_a_folder_is_on() -> None:
    programs = Programs(**{"/": SNAPSHOTS, "/Volumes/disk": "Snapshots for disk /Volumes/disk:\n"})
    home = Path("/Users/me/Library/Caches/firn")
    assert len(mac.local_snapshots(home, "darwin", output=programs)) == 2
    assert mac.local_snapshots(Path("/Volumes/disk/firn/a"), "darwin", output=programs) == []
    assert [call[-1] for call in programs.calls] == ["/", "/Volumes/disk"]
    assert mac.local_snapshots(home, "darwin", output=Programs()) == [], "tmutil failed"
    assert mac.local_snapshots(home, "linux", output=programs) == []
    assert len(programs.calls) == 2


def test_a_mac_is_the_same_in_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(**{"hw.model": "Mac16,5\n", "hw.memsize": "137438953472\n"})
    monkeypatch.setattr(mac, "node", lambda: "dhcp-17.example.com")
    assert mac.machine_id("darwin", output=programs) == "Mac16,5-137438953472"
    assert mac.machine_id("darwin", output=Programs()) == "dhcp-17.example.com"
    assert mac.machine_id("linux", output=programs) == "dhcp-17.example.com"


def test_the_thread_that_computes_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    classes: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: str | None) -> None:
            if name == "refuses":
                self.pthread_set_qos_class_self_np = lambda qos, priority: 22  # EINVAL
            elif name != "older":
                self.pthread_set_qos_class_self_np = self._set

        def _set(self, qos: int, priority: int) -> int:
            classes.append((qos, priority))
            return 0

    monkeypatch.setattr(mac.ctypes, "CDLL", Library)
    assert mac.put_first("darwin")
    assert classes == [(0x19, 0)]
    assert not mac.put_first("darwin", libc="older")
    assert not mac.put_first("darwin", libc="refuses")
    assert not mac.put_first("linux")
    assert len(classes) == 1
