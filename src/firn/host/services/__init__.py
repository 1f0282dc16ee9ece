"""A server that runs as a service of this user: launchd on macOS, a systemd user unit on Linux.

service       what to run, its files, and what a supervisor can do
environment   which variables of a shell a service gets
log_file      keeps the file that launchd writes a service's output to small
launchd, systemd   the supervisors, each through one `run`, which tests replace
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from firn.core.errors import SetupError
from firn.host.services.launchd import Launchd
from firn.host.services.service import Supervisor
from firn.host.services.systemd import Systemd


def supervisor(platform: str = sys.platform, home: Path | None = None) -> Supervisor:
    """This system's supervisor. Raises SetupError if there is none that firn supports."""
    if platform == "darwin":
        return _launchd(home, os.environ)
    if platform == "linux" and shutil.which("systemctl"):
        return Systemd(home or Path.home())
    raise SetupError(
        "Neither launchd nor systemd was found: run `firn serve` under your own supervisor."
    )


def _launchd(home: Path | None, environ: Mapping[str, str]) -> Launchd:
    if os.geteuid() != 0:
        return Launchd.of_caller(home or Path.home(), os.getuid(), "")
    try:
        caller = pwd.getpwuid(int(environ.get("SUDO_UID", "0")))
    except (ValueError, KeyError):
        caller = pwd.getpwuid(0)
    if caller.pw_uid == 0:
        raise SetupError("A server does not run as root: use sudo as the user whom it belongs to.")
    return Launchd.of_caller(home or Path(caller.pw_dir), caller.pw_uid, caller.pw_name)
