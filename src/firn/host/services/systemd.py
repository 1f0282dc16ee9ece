"""Services of Linux: a user unit of systemd."""

from __future__ import annotations

import os
from pathlib import Path

from firn.core.errors import SetupError
from firn.host.services.service import (
    N_FILES,
    RESTART_S,
    STOP_S,
    Run,
    Service,
    ServiceSettings,
    ServiceStatus,
    run,
    written,
)

UNIT = "firn.service"
NO_SESSION = "systemd's session of this user cannot be reached"


class Systemd:
    def __init__(self, home: Path, *, run: Run = run) -> None:
        self._run = run
        config = os.environ.get("XDG_CONFIG_HOME", "")
        base = Path(config) if config.startswith("/") else home / ".config"
        self.path = base / "systemd" / "user" / UNIT
        self.settings = base / "firn" / "service.json"

    def install(self, service: Service) -> None:
        unit = self._unit(service).encode()
        done = self._run(("systemctl", "--user", "show", "--property=Version"))
        if done.code:
            raise SetupError(
                f"{NO_SESSION} ({done.text}): log in as this user, not by su or sudo and not in a "
                "container, or run `firn serve` under your own supervisor. Nothing was installed."
            )
        settings = ServiceSettings(service.environment).as_json()
        with written(self.settings, settings), written(self.path, unit):
            for command in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
                self._systemctl(*command)

    def _systemctl(self, *arguments: str) -> None:
        done = self._run(("systemctl", "--user", *arguments))
        if done.code:
            raise SetupError(f"systemctl --user {' '.join(arguments)}: {done.text}")

    def _unit(self, service: Service) -> str:
        return (
            "[Unit]\n"
            "Description=firn, a server for language models\n"
            "StartLimitIntervalSec=0\n"
            "\n"
            "[Service]\n"
            f"ExecStart={' '.join(map(_quote, service.command(self.settings)))}\n"
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
            self.settings.unlink(missing_ok=True)
            self._run(("systemctl", "--user", "daemon-reload"))
        return there

    def restart(self) -> None:
        if not self.path.exists():
            raise SetupError("There is no service to restart.")
        self._systemctl("restart", UNIT)

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
