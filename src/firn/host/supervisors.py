"""A server that starts with the user's session: a launchd agent on macOS, a systemd user unit on Linux.

`Service` is what to run; `Launchd` and `Systemd` write its file and control the supervisor, each
through one `run`, which tests replace.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from firn.core.errors import SetupError

LABEL = "local.firn.server"
UNIT = "firn.service"
STOP_S = 90
"""Enough for running replies to end and records to be written; launchd waits 20 s by default."""
RESTART_S = 10
N_FILES = 65536
NO_SESSION = "systemd's session of this user cannot be reached"


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    text: str


Run = Callable[[Sequence[str]], CommandResult]


def run(command: Sequence[str]) -> CommandResult:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as e:
        raise SetupError(f"{command[0]} cannot be run: {e}") from e
    return CommandResult(done.returncode, (done.stdout + done.stderr).strip())


@dataclass(frozen=True, slots=True)
class Service:
    """arguments: those of `firn serve`."""

    arguments: tuple[str, ...]
    python: str = sys.executable

    @property
    def command(self) -> tuple[str, ...]:
        return (self.python, "-m", "firn", "serve", *self.arguments)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    installed: bool
    running: bool = False
    text: str = ""


class Supervisor(Protocol):
    """Manages services of this user."""

    @property
    def path(self) -> Path:
        """The file that describes the service."""
        ...

    def install(self, service: Service) -> None:
        """Write the file and start the service, replacing an older one. Raises SetupError."""
        ...

    def uninstall(self) -> bool:
        """Stop and remove the service; False: there was none."""
        ...

    def status(self) -> ServiceStatus: ...

    def logs(self, n_lines: int, *, follow: bool) -> tuple[str, ...]:
        """The command that shows the service's logs."""
        ...


def supervisor(platform: str = sys.platform, home: Path | None = None) -> Supervisor:
    """This system's supervisor. Raises SetupError if there is none that firn supports."""
    home = home or Path.home()
    if platform == "darwin":
        return Launchd(home)
    if platform == "linux" and shutil.which("systemctl"):
        return Systemd(home)
    raise SetupError(
        "Neither launchd nor systemd was found: run `firn serve` under your own supervisor."
    )


# --- macOS ---------------------------------------------------------------------------------


class Launchd:
    def __init__(self, home: Path, *, run: Run = run, uid: int | None = None) -> None:
        self._run = run
        self._domain = f"gui/{os.getuid() if uid is None else uid}"
        self._home = home
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.log = home / "Library" / "Logs" / "firn" / "server.log"

    def install(self, service: Service) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with _write(self.path, plistlib.dumps(self._plist(service))):
            self._run(("launchctl", "bootout", f"{self._domain}/{LABEL}"))  # an older one, if any
            done = self._run(("launchctl", "bootstrap", self._domain, str(self.path)))
            if done.code:
                raise SetupError(f"launchd rejected {self.path}: {done.text}")

    def _plist(self, service: Service) -> dict[str, object]:
        return {
            "Label": LABEL,
            "ProgramArguments": list(service.command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            # By default, launchd kills after 20 s, while records are still being written.
            "ExitTimeOut": STOP_S,
            # macOS slows down other process types while the user works elsewhere.
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": N_FILES},
            "WorkingDirectory": str(self._home),
            "EnvironmentVariables": {
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                "PYTHONUNBUFFERED": "1",
            },
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }

    def uninstall(self) -> bool:
        done = self._run(("launchctl", "bootout", f"{self._domain}/{LABEL}"))
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there or done.code == 0

    def status(self) -> ServiceStatus:
        if not self.path.exists():
            return ServiceStatus(False)
        done = self._run(("launchctl", "print", f"{self._domain}/{LABEL}"))
        fields = dict(
            line.strip().split(" = ", 1) for line in done.text.splitlines() if " = " in line
        )
        if done.code:
            return ServiceStatus(True, text="not loaded in launchd")
        state = fields.get("state", "unknown")
        pid = f", process {fields['pid']}" if "pid" in fields else ""
        return ServiceStatus(True, running=state == "running", text=state + pid)

    def logs(self, n_lines: int, *, follow: bool) -> tuple[str, ...]:
        return ("tail", "-n", str(n_lines), *(("-F",) if follow else ()), str(self.log))


# --- Linux ---------------------------------------------------------------------------------


class Systemd:
    def __init__(self, home: Path, *, run: Run = run) -> None:
        self._run = run
        config = os.environ.get("XDG_CONFIG_HOME", "")
        base = Path(config) if config.startswith("/") else home / ".config"
        self.path = base / "systemd" / "user" / UNIT

    def install(self, service: Service) -> None:
        unit = self._unit(service).encode()
        done = self._run(("systemctl", "--user", "show", "--property=Version"))
        if done.code:
            raise SetupError(
                f"{NO_SESSION} ({done.text}): log in as this user, not by su or sudo and not in a "
                "container, or run `firn serve` under your own supervisor. Nothing was installed."
            )
        with _write(self.path, unit):
            for command in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
                done = self._run(("systemctl", "--user", *command))
                if done.code:
                    raise SetupError(f"systemctl --user {' '.join(command)}: {done.text}")

    def _unit(self, service: Service) -> str:
        return (
            "[Unit]\n"
            "Description=firn, a server for language models\n"
            "StartLimitIntervalSec=0\n"
            "\n"
            "[Service]\n"
            f"ExecStart={' '.join(map(_quote, service.command))}\n"
            "Environment=PYTHONUNBUFFERED=1\n"
            "Restart=on-failure\n"
            f"RestartSec={RESTART_S}\n"
            f"TimeoutStopSec={STOP_S}\n"
            # A front stops the processes of its models itself.
            "KillMode=mixed\n"
            f"LimitNOFILE={N_FILES}\n"
            "\n"
            "[Install]\n"
            "WantedBy=default.target\n"
        )

    def uninstall(self) -> bool:
        there = self.path.exists()
        if there:
            self._run(("systemctl", "--user", "disable", "--now", UNIT))
            self.path.unlink(missing_ok=True)
            self._run(("systemctl", "--user", "daemon-reload"))
        return there

    def status(self) -> ServiceStatus:
        if not self.path.exists():
            return ServiceStatus(False)
        properties = "ActiveState,SubState,MainPID"
        done = self._run(("systemctl", "--user", "show", UNIT, f"--property={properties}"))
        if done.code:
            return ServiceStatus(True, text=f"installed, but {NO_SESSION} ({done.text})")
        fields = dict(line.split("=", 1) for line in done.text.splitlines() if "=" in line)
        state = fields.get("ActiveState", "unknown")
        text = f"{state} ({fields.get('SubState', '?')})"
        if fields.get("MainPID", "0") != "0":
            text += f", process {fields['MainPID']}"
        return ServiceStatus(True, running=state == "active", text=text)

    def logs(self, n_lines: int, *, follow: bool) -> tuple[str, ...]:
        more = ("--follow",) if follow else ()
        return ("journalctl", "--user", f"--unit={UNIT}", f"--lines={n_lines}", "--no-pager", *more)


def _quote(word: str) -> str:
    """Quoted for systemd: nothing in it is read as a specifier, a variable or a second word."""
    if "\n" in word:
        raise SetupError("A service's arguments must not contain line breaks.")
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"'


@contextmanager
def _write(path: Path, data: bytes) -> Iterator[None]:
    """The file has this content; if something fails inside, afterwards what it had before."""
    before = path.read_bytes() if path.exists() else None
    _write_private(path, data)
    try:
        yield
    except SetupError:
        if before is None:
            path.unlink()
        else:
            _write_private(path, before)
        raise


def _write_private(path: Path, data: bytes) -> None:
    """Readable only by this user: arguments may contain keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.tmp")
    temp.unlink(missing_ok=True)
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temp.replace(path)
