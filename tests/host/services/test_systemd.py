"""Services of systemd: the files it would read, with a fake of systemctl."""

from __future__ import annotations

import configparser
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from firn import app
from firn.core.errors import SetupError
from firn.fleet import server as front
from firn.host.services import supervisor
from firn.host.services.launchd import Launchd
from firn.host.services.service import STOP_S, CommandResult, Service, ServiceSettings
from firn.host.services.systemd import Systemd

SERVICE = Service(
    ("model", "--port", "8123", "--api-key", 'k"%$x'),
    {"HF_TOKEN": "hf_secret"},
    python="/opt/a b/python",
)


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


def test_a_unit(tmp_path: Path) -> None:
    fake = Fake()
    systemd = Systemd(tmp_path, run=fake)
    systemd.install(SERVICE)
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(systemd.path)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[:2] == ["/opt/a b/python", "-m"]
    assert words[3:5] == [str(systemd.settings), "serve"]
    assert words[-1] == 'k"%%$$x', "neither a specifier nor a variable"
    assert int(unit["Service"]["TimeoutStopSec"]) == STOP_S
    assert unit["Service"]["Restart"] == "on-failure"
    assert systemd.path.stat().st_mode & 0o077 == 0
    assert systemd.settings.stat().st_mode & 0o077 == 0
    assert ServiceSettings.read(systemd.settings).environment == {"HF_TOKEN": "hf_secret"}
    assert "hf_secret" not in systemd.path.read_text()
    assert fake.verbs == ["show", "daemon-reload", "enable", "restart"]
    assert systemd.uninstall()
    assert not systemd.settings.exists()
    assert not systemd.uninstall()
    with pytest.raises(SetupError):
        systemd.install(Service(("a\nb",)))


def test_a_restart(tmp_path: Path) -> None:
    fake = Fake()
    systemd = Systemd(tmp_path, run=fake)
    with pytest.raises(SetupError, match="no service"):
        systemd.restart()
    systemd.install(SERVICE)
    fake.calls.clear()
    systemd.restart()
    assert fake.verbs == ["restart"]


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
    failing = Systemd(tmp_path, run=Fake(restart=CommandResult(1, "no")))
    with pytest.raises(SetupError):
        failing.install(SERVICE)
    assert not failing.path.exists()
    assert not failing.settings.exists()
    Systemd(tmp_path, run=Fake()).install(SERVICE)
    before = failing.path.read_bytes(), failing.settings.read_bytes()
    with pytest.raises(SetupError):
        failing.install(Service(("another",), {"HF_TOKEN": "another"}))
    assert (failing.path.read_bytes(), failing.settings.read_bytes()) == before


def test_supervisors_wait_for_the_longest_stop() -> None:
    assert max(app.LEAVE_S, front.LEAVE_S) < STOP_S


def test_each_system_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 501)
    assert isinstance(supervisor("darwin", tmp_path), Launchd)
    with pytest.raises(SetupError):
        supervisor("sunos5", tmp_path)
