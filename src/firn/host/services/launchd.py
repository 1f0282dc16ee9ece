"""Services of macOS: an agent of this user, or, installed by sudo, a daemon that starts with the Mac.

    gui/UID    the user is logged in at the screen; starts at every such login
    user/UID   there is no such login (a Mac mini reached over ssh); starts at the first login
    system     a daemon that runs as the user, from the Mac's start, whoever is logged in

launchd removes a service only when its process has ended, and until then, and for some seconds after,
answers 5 or 37 to the next `bootstrap`.
"""

from __future__ import annotations

import os
import plistlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from firn.core.errors import SetupError
from firn.host.services.service import (
    N_FILES,
    RESTART_S,
    STOP_S,
    CommandResult,
    Run,
    Service,
    ServiceSettings,
    ServiceStatus,
    make_folder,
    run,
    write_private,
    written,
)

LABEL = "local.firn.server"
DAEMONS = Path("/Library/LaunchDaemons")
POLL_S = 0.5
GONE_S = STOP_S + 15
DRAINED_S = 30
IO_ERROR, ALREADY_IN_PROGRESS = 5, 37
"""What `bootstrap` answers while the service that had this label is being removed."""


class Launchd:
    def __init__(
        self,
        home: Path,
        *,
        uid: int | None = None,
        user: str = "",
        is_root: bool = False,
        daemons: Path = DAEMONS,
        run: Run = run,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """user: whom a daemon runs as; "": an agent. is_root: this process may change daemons."""
        uid = os.getuid() if uid is None else uid
        self._run = run
        self._pause = pause
        self._home = home
        self._user = user
        self._is_root = is_root
        self._owner = uid if is_root else None
        self._domains = ("system",) if user else (f"gui/{uid}", f"user/{uid}")
        agents = home / "Library" / "LaunchAgents"
        self.path = (daemons if user else agents) / f"{LABEL}.plist"
        self._other = (agents if user else daemons) / f"{LABEL}.plist"
        self.settings = home / "Library" / "Application Support" / "firn" / "service.json"
        self.log = home / "Library" / "Logs" / "firn" / "server.log"

    @classmethod
    def of_caller(
        cls, home: Path, uid: int, sudo_user: str, *, daemons: Path = DAEMONS, run: Run = run
    ) -> Launchd:
        """A daemon's, if this is sudo or only a daemon is installed; otherwise an agent's."""
        agent = cls(home, uid=uid, run=run)
        user = sudo_user or home.name
        daemon = cls(home, uid=uid, user=user, is_root=bool(sudo_user), daemons=daemons, run=run)
        if sudo_user:
            return daemon
        return daemon if daemon.path.exists() and not agent.path.exists() else agent

    def install(self, service: Service) -> None:
        self._check_rights()
        if self._other.exists():
            sudo = "" if self._user else "sudo "
            raise SetupError(
                f"{self._other} is installed, too, and both would want the same port: first "
                f"`{sudo}firn service uninstall`."
            )
        make_folder(self.log.parent, owner=self._owner)
        if not self.log.exists():
            write_private(self.log, b"", owner=self._owner)
        domain = self._domain()
        settings = ServiceSettings(service.environment, log=str(self.log)).as_json()
        plist = plistlib.dumps(self._plist(service, domain))
        try:
            with (
                written(self.settings, settings, owner=self._owner),
                written(self.path, plist),
            ):
                self._unload()
                self._load(domain)
        except SetupError:
            if self.path.exists():  # the older service runs again, as far as that is possible
                with suppress(SetupError):
                    self._load(domain)
            raise

    def _check_rights(self) -> None:
        if self._user and not self._is_root:
            raise SetupError(
                f"{self.path} starts with this Mac: use sudo to change it, or to remove it."
            )

    def _domain(self) -> str:
        """The first that exists."""
        exists = (d for d in self._domains[:-1] if not self._launchctl("print", d).code)
        return next(exists, self._domains[-1])

    def _plist(self, service: Service, domain: str) -> dict[str, object]:
        plist: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": list(service.command(self.settings)),
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
                "HOME": str(self._home),
                "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                "PYTHONUNBUFFERED": "1",
            },
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        if domain.startswith("user/"):
            # With both types it would run twice once somebody logs in at the screen.
            plist["LimitLoadToSessionType"] = "Background"
        if self._user:
            plist["UserName"] = self._user
        return plist

    def uninstall(self) -> bool:
        if not self.path.exists() and not self._loaded():
            return False
        self._check_rights()
        self._unload()
        self.path.unlink(missing_ok=True)
        self.settings.unlink(missing_ok=True)
        return True

    def restart(self) -> None:
        if not self.path.exists():
            raise SetupError("There is no service to restart.")
        self._check_rights()
        loaded = self._loaded()
        self._unload()
        self._load(loaded[0] if loaded else self._domain())

    def _loaded(self) -> list[str]:
        """The domains that have the service."""
        return [d for d in self._domains if not self._launchctl("print", f"{d}/{LABEL}").code]

    def _unload(self) -> None:
        """Returns when the service is gone: its process is given the time to end well."""
        for domain in self._loaded():
            target = f"{domain}/{LABEL}"
            self._launchctl("bootout", target)
            for _ in range(round(GONE_S / POLL_S)):
                if self._launchctl("print", target).code:
                    break
                self._pause(POLL_S)
            else:
                raise SetupError(f"launchd did not remove {target} within {GONE_S} s; try again.")

    def _load(self, domain: str) -> None:
        target = f"{domain}/{LABEL}"
        self._launchctl("enable", target)  # it may have been disabled once
        for _ in range(round(DRAINED_S / POLL_S)):
            done = self._launchctl("bootstrap", domain, str(self.path))
            if done.code not in (IO_ERROR, ALREADY_IN_PROGRESS):
                break
            self._pause(POLL_S)
        if done.code:
            raise SetupError(f"launchd rejected {self.path}: {done.text}")
        started = self._launchctl("kickstart", target)
        if started.code not in (0, ALREADY_IN_PROGRESS):
            raise SetupError(f"launchd did not start {target}: {started.text}")

    def _launchctl(self, *arguments: str) -> CommandResult:
        return self._run(("launchctl", *arguments))

    def status(self) -> ServiceStatus:
        if not self.path.exists():
            return ServiceStatus(False)
        answers = (self._launchctl("print", f"{domain}/{LABEL}") for domain in self._domains)
        text = next((answer.text for answer in answers if not answer.code), None)
        if text is None:
            return ServiceStatus(True, text="not loaded in launchd")
        fields = fields_of(text)
        state = fields.get("state", "unknown")
        if "pid" in fields:
            state += f", process {fields['pid']}"
        elif "last exit code" in fields:
            state += f", last exit code {fields['last exit code']}"
        return ServiceStatus(True, running=fields.get("state") == "running", text=state)

    def logs(self, n_lines: int, *, follow: bool) -> tuple[str, ...]:
        return ("tail", "-n", str(n_lines), *(("-F",) if follow else ()), str(self.log))


def fields_of(text: str) -> dict[str, str]:
    """The service's own fields in what `launchctl print` says. Its coalitions and endpoints, in braces
    of their own, have states and pids, too."""
    fields: dict[str, str] = {}
    depth = 0
    for line in map(str.strip, text.splitlines()):
        if line.endswith("{"):
            depth += 1
        elif line == "}":
            depth -= 1
        elif depth == 1 and " = " in line:
            name, _, value = line.partition(" = ")
            fields.setdefault(name, value)
    return fields
