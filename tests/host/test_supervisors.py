"""Services of launchd and systemd: the files they would read, with fakes of their programs."""

from __future__ import annotations

import configparser
import plistlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from firn import app
from firn.core.errors import SetupError
from firn.fleet import server as front
from firn.host.supervisors import STOP_S, CommandResult, Launchd, Service, Systemd, supervisor

SERVICE = Service(("model", "--port", "8123", "--api-key", 'k"%$x'), python="/opt/a b/python")


class Fake:
    """Answers by the first of its keywords that is a word of the command."""

    def __init__(self, **answers: CommandResult) -> None:
        self.answers = answers
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.calls.append(tuple(command))
        return next(
            (a for word, a in self.answers.items() if word in command), CommandResult(0, "")
        )

    @property
    def verbs(self) -> list[str]:
        return [next(w for w in call[1:] if not w.startswith("-")) for call in self.calls]


@pytest.fixture(autouse=True)
def _no_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def test_a_launchd_agent(tmp_path: Path) -> None:
    fake = Fake()
    launchd = Launchd(tmp_path, run=fake, uid=501)
    assert not launchd.status().installed
    launchd.install(SERVICE)
    plist = plistlib.loads(launchd.path.read_bytes())
    assert plist["ProgramArguments"] == [
        "/opt/a b/python", "-m", "firn", "serve", "model", "--port", "8123", "--api-key", 'k"%$x',
    ]  # fmt: skip
    assert plist["KeepAlive"] == {"SuccessfulExit": False}, "one that was stopped stays so"
    assert plist["ExitTimeOut"] == STOP_S
    assert plist["RunAtLoad"] is True
    assert Path(plist["StandardErrorPath"]).parent.is_dir()
    assert launchd.path.stat().st_mode & 0o077 == 0, "it may hold a key"
    assert fake.verbs == ["bootout", "bootstrap"]
    assert fake.calls[-1] == ("launchctl", "bootstrap", "gui/501", str(launchd.path))
    assert launchd.logs(9, follow=True)[:4] == ("tail", "-n", "9", "-F")
    assert launchd.uninstall()
    assert not launchd.path.exists()


def test_what_launchd_says_of_it(tmp_path: Path) -> None:
    text = "gui/501/local.firn.server = {\n\tstate = running\n\n\tpid = 4711\n}"
    launchd = Launchd(tmp_path, run=Fake(print=CommandResult(0, text)))
    launchd.install(SERVICE)
    assert launchd.status().running
    assert launchd.status().text == "running, process 4711"
    gone = Launchd(tmp_path, run=Fake(print=CommandResult(113, "Could not find service")))
    assert not gone.status().running
    refused = Launchd(tmp_path, run=Fake(bootstrap=CommandResult(5, "Input/output error")))
    with pytest.raises(SetupError, match="Input/output error"):
        refused.install(SERVICE)


def test_a_systemd_unit(tmp_path: Path) -> None:
    fake = Fake()
    systemd = Systemd(tmp_path, run=fake)
    systemd.install(SERVICE)
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(systemd.path)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[:4] == ["/opt/a b/python", "-m", "firn", "serve"]
    assert words[-1] == 'k"%%$$x', "neither a specifier nor a variable"
    assert int(unit["Service"]["TimeoutStopSec"]) == STOP_S
    assert unit["Service"]["Restart"] == "on-failure"
    assert systemd.path.stat().st_mode & 0o077 == 0
    assert fake.verbs == ["show", "daemon-reload", "enable", "restart"]
    assert systemd.uninstall()
    assert not systemd.uninstall()
    with pytest.raises(SetupError):
        systemd.install(Service(("a\nb",)))


def test_what_systemd_says_of_it(tmp_path: Path) -> None:
    shown = CommandResult(0, "ActiveState=active\nSubState=running\nMainPID=12\n")
    systemd = Systemd(tmp_path, run=Fake(show=shown))
    systemd.install(SERVICE)
    assert systemd.status().running
    assert systemd.status().text == "active (running), process 12"
    assert "--follow" in systemd.logs(5, follow=True)
    failing = Systemd(tmp_path, run=Fake(enable=CommandResult(1, "no bus")))
    with pytest.raises(SetupError, match="no bus"):
        failing.install(SERVICE)


def test_without_a_session_nothing_is_installed(tmp_path: Path) -> None:
    """As in a container, or over su: systemctl is there, and its user bus is not."""
    no_bus = CommandResult(1, "Failed to connect to bus: No medium found")
    systemd = Systemd(tmp_path, run=Fake(systemctl=no_bus))
    with pytest.raises(SetupError, match=r"cannot be reached .*No medium found.*Nothing was"):
        systemd.install(SERVICE)
    assert not systemd.path.exists()
    assert not systemd.status().installed
    Systemd(tmp_path, run=Fake()).install(SERVICE)
    status = systemd.status()
    assert status.installed
    assert not status.running
    assert "cannot be reached" in status.text
    assert "?" not in status.text


def test_a_failed_install_leaves_the_service_that_was_there(tmp_path: Path) -> None:
    for failing, working in (
        (
            Systemd(tmp_path, run=Fake(restart=CommandResult(1, "no"))),
            Systemd(tmp_path, run=Fake()),
        ),
        (
            Launchd(tmp_path, run=Fake(bootstrap=CommandResult(5, "no"))),
            Launchd(tmp_path, run=Fake()),
        ),
    ):
        with pytest.raises(SetupError):
            failing.install(SERVICE)
        assert not failing.path.exists()
        working.install(SERVICE)
        before = working.path.read_bytes()
        with pytest.raises(SetupError):
            failing.install(Service(("another",)))
        assert failing.path.read_bytes() == before


def test_supervisors_wait_for_the_longest_stop() -> None:
    assert max(app.LEAVE_S, front.LEAVE_S) < STOP_S


def test_each_system_has_its_own(tmp_path: Path) -> None:
    assert isinstance(supervisor("darwin", tmp_path), Launchd)
    with pytest.raises(SetupError):
        supervisor("sunos5", tmp_path)
