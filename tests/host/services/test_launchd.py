"""Services of launchd: the files it would read, and what is asked of a stand-in for launchctl."""

from __future__ import annotations

import os
import plistlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from firn.core.errors import SetupError
from firn.host import services
from firn.host.services import supervisor
from firn.host.services.launchd import LABEL, Launchd, fields_of
from firn.host.services.service import START, STOP_S, CommandResult, Service, ServiceSettings
from tests.host.services.launchctl import Launchctl

SERVICE = Service(
    ("model", "--port", "8123", "--api-key", 'k"%$x'),
    {"HF_HOME": "/Volumes/disk", "HF_TOKEN": "hf_secret"},
    python="/opt/a b/python",
)


def agent(home: Path, launchctl: Launchctl) -> Launchd:
    return Launchd(home, uid=501, run=launchctl, pause=launchctl.pause)


def daemon(home: Path, launchctl: Launchctl, *, is_root: bool = True) -> Launchd:
    return Launchd(
        home, uid=os.getuid(), user="me", is_root=is_root, daemons=home / "daemons",
        run=launchctl, pause=launchctl.pause,
    )  # fmt: skip


def test_an_agent(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = agent(tmp_path, launchctl)
    assert not launchd.status().installed
    launchd.install(SERVICE)
    plist = plistlib.loads(launchd.path.read_bytes())
    assert plist["ProgramArguments"] == [
        "/opt/a b/python", "-m", START, str(launchd.settings), "serve", "model", "--port", "8123",
        "--api-key", 'k"%$x',
    ]  # fmt: skip
    assert plist["KeepAlive"] == {"SuccessfulExit": False}, "one that was stopped stays so"
    assert plist["ExitTimeOut"] == STOP_S
    assert plist["RunAtLoad"] is True
    assert "UserName" not in plist
    assert Path(plist["StandardErrorPath"]).parent.is_dir()
    assert launchd.path.stat().st_mode & 0o077 == 0, "it may hold a key"
    assert launchctl.running == {f"gui/501/{LABEL}": launchd.path}
    assert launchd.logs(9, follow=True)[:4] == ("tail", "-n", "9", "-F")
    assert launchd.uninstall()
    assert not launchctl.running
    assert not launchd.path.exists()
    assert not launchd.settings.exists()
    assert not launchd.uninstall()


def test_secrets_are_in_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    """Anybody on the Mac may ask launchd for the variables and arguments of a service."""
    launchd = agent(tmp_path, Launchctl())
    launchd.install(SERVICE)
    assert b"hf_secret" not in launchd.path.read_bytes()
    assert launchd.settings.stat().st_mode & 0o777 == 0o600
    settings = ServiceSettings.read(launchd.settings)
    assert settings == ServiceSettings(SERVICE.environment, str(launchd.log))


@pytest.mark.parametrize("code", [5, 37])
def test_it_is_installed_over_one_that_runs_and_drains(tmp_path: Path, code: int) -> None:
    """As the one that is there ends its replies for five seconds, and launchd cleans up for three."""
    launchctl = Launchctl(stops_in_s=5, drains_in_s=3, draining_code=code)
    launchd = agent(tmp_path, launchctl)
    launchd.install(Service(("old",)))
    launchctl.calls.clear()
    launchd.install(Service(("new",)))
    assert "new" in plistlib.loads(launchd.path.read_bytes())["ProgramArguments"]
    assert launchd.status().running
    assert 8 <= launchctl.now < 10
    bootstraps = [i for i, verb in enumerate(launchctl.verbs) if verb == "bootstrap"]
    assert len(bootstraps) > 2, "it was refused while it drained"
    assert launchctl.verbs.index("bootout") < bootstraps[0]
    assert launchctl.verbs[bootstraps[-1] + 1] == "kickstart"


def test_one_that_never_ends_is_named(tmp_path: Path) -> None:
    launchctl = Launchctl(stops_in_s=10_000)
    launchd = agent(tmp_path, launchctl)
    launchd.install(SERVICE)
    before = launchd.path.read_bytes()
    with pytest.raises(SetupError, match="did not remove"):
        launchd.install(Service(("new",)))
    assert launchctl.now > STOP_S, "it has the time that it is promised"
    assert launchd.path.read_bytes() == before


def test_a_restart_waits_for_the_old_one(tmp_path: Path) -> None:
    launchctl = Launchctl(stops_in_s=20, drains_in_s=3)
    launchd = agent(tmp_path, launchctl)
    with pytest.raises(SetupError, match="no service"):
        launchd.restart()
    launchd.install(SERVICE)
    launchd.restart()
    assert launchctl.now > 20
    assert launchd.status().running
    launchctl.running.clear()  # as after `launchctl bootout`
    launchd.restart()
    assert launchd.status().running


def test_what_launchd_says_of_it(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = agent(tmp_path, launchctl)
    launchd.install(SERVICE)
    assert launchd.status().running
    assert launchd.status().text == "running, process 36019", "not those of its coalitions"
    launchctl.is_failing = True
    assert not launchd.status().running
    assert launchd.status().text == "spawn scheduled, last exit code 2"
    launchctl.running.clear()
    assert launchd.status().text == "not loaded in launchd"
    assert fields_of("no service") == {}


def test_without_a_login_at_the_screen(tmp_path: Path) -> None:
    """A Mac mini over ssh: there is no gui domain, and an agent for it cannot be loaded."""
    launchctl = Launchctl("user/501", "system")
    launchd = agent(tmp_path, launchctl)
    launchd.install(SERVICE)
    assert launchctl.running == {f"user/501/{LABEL}": launchd.path}
    assert launchd.status().running
    # Somebody logs in at the screen: the service is found where it is, and moves when installed anew.
    launchctl.domains = ("gui/501", "user/501", "system")
    assert launchd.status().running
    launchd.restart()
    assert list(launchctl.running) == [f"user/501/{LABEL}"]
    launchd.install(SERVICE)
    assert list(launchctl.running) == [f"gui/501/{LABEL}"]
    assert "LimitLoadToSessionType" not in plistlib.loads(launchd.path.read_bytes()), "once only"


def test_a_daemon_starts_with_the_mac_and_runs_as_its_user(tmp_path: Path) -> None:
    launchctl = Launchctl("system")
    launchd = daemon(tmp_path, launchctl)
    launchd.install(SERVICE)
    assert launchctl.running == {f"system/{LABEL}": tmp_path / "daemons" / f"{LABEL}.plist"}
    plist = plistlib.loads(launchd.path.read_bytes())
    assert plist["UserName"] == "me"
    assert plist["EnvironmentVariables"]["HOME"] == str(tmp_path)
    assert launchd.log.exists(), "root must not be the one who makes it"
    seen = daemon(tmp_path, launchctl, is_root=False)
    assert seen.status().running
    for change in (lambda: seen.install(SERVICE), seen.restart, seen.uninstall):
        with pytest.raises(SetupError, match="sudo"):
            change()
    launchd.restart()
    assert launchd.uninstall()


def test_an_agent_and_a_daemon_do_not_run_side_by_side(tmp_path: Path) -> None:
    launchctl = Launchctl()
    other = agent(tmp_path, launchctl)
    other.install(SERVICE)
    launchd = daemon(tmp_path, launchctl)
    with pytest.raises(SetupError, match="`firn service uninstall`"):
        launchd.install(SERVICE)
    assert list(launchctl.running) == [f"gui/501/{LABEL}"]
    assert other.uninstall()
    launchd.install(SERVICE)
    late = Launchd(tmp_path, uid=501, daemons=tmp_path / "daemons", run=launchctl)
    with pytest.raises(SetupError, match="`sudo firn service uninstall`"):
        late.install(SERVICE)


def test_whose_service_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemons = tmp_path / "daemons"
    made = Launchd.of_caller(tmp_path, 501, "", daemons=daemons)
    assert made.path.parent == tmp_path / "Library" / "LaunchAgents"
    made = Launchd.of_caller(tmp_path, 501, "me", daemons=daemons)
    assert made.path.parent == daemons
    daemons.mkdir()
    (daemons / f"{LABEL}.plist").write_bytes(b"")
    made = Launchd.of_caller(tmp_path, 501, "", daemons=daemons)
    assert made.path.parent == daemons, "so that its status can be seen"

    person = SimpleNamespace(pw_uid=501, pw_name="me", pw_dir=str(tmp_path))
    root = SimpleNamespace(pw_uid=0, pw_name="root", pw_dir="/var/root")
    monkeypatch.setattr(services.pwd, "getpwuid", lambda uid: person if uid == 501 else root)
    monkeypatch.setattr(services.os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", "501")
    found = supervisor("darwin")
    assert isinstance(found, Launchd)
    assert found.log.is_relative_to(tmp_path)
    for uid in ("0", "nobody", ""):
        monkeypatch.setenv("SUDO_UID", uid)
        with pytest.raises(SetupError, match="root"):
            supervisor("darwin")


def test_a_plist_that_launchd_rejects(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = agent(tmp_path, launchctl)
    launchd.install(Service(("old",)))
    before = launchd.path.read_bytes(), launchd.settings.read_bytes()
    refused = CommandResult(5, "Bootstrap failed: 5: Input/output error")
    accept = launchctl._bootstrap

    def refuse(domain: str, path: str) -> CommandResult:
        return refused if b"new" in Path(path).read_bytes() else accept(domain, path)

    launchctl._bootstrap = refuse  # type: ignore[method-assign]
    with pytest.raises(SetupError, match="Input/output error"):
        launchd.install(Service(("new",), {"HF_HOME": "/new"}))
    assert (launchd.path.read_bytes(), launchd.settings.read_bytes()) == before
    assert launchd.status().running, "the one that was there runs again"
