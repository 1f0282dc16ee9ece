"""A systemctl that starts what a unit says. Its folder is in $SYSTEMCTL_HOME."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ["SYSTEMCTL_HOME"])
PID = HOME / "pid"
UNIT = HOME / ".config" / "systemd" / "user" / "firn.service"


def pid() -> int:
    return int(PID.read_text()) if PID.exists() else 0


def start() -> None:
    (line,) = [x for x in UNIT.read_text().splitlines() if x.startswith("ExecStart=")]
    with (HOME / "log").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(line.removeprefix("ExecStart=")),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    PID.write_text(str(process.pid))


def stop() -> None:
    if number := pid():
        os.kill(number, signal.SIGTERM)
        while Path(f"/proc/{number}/stat").exists():
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        PID.unlink()


match sys.argv[2:]:
    case ["restart", _]:
        stop()
        start()
    case ["disable", *_]:
        stop()
    case ["show", _, *_]:
        state = "active" if pid() else "inactive"
        sub = "running" if pid() else "dead"
        print(f"ActiveState={state}\nSubState={sub}\nMainPID={pid()}")
