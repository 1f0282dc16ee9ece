"""Facts about macOS that Python does not know, or knows wrongly."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from platform import mac_ver, node, release

from firn.host.programs import output_of

Output = Callable[[Sequence[str]], str]

PRESSURE_WARNING = 2
"""1: normal, 2: warning, 4: critical."""


def sysctl(name: str, *, output: Output = output_of) -> str:
    """A value of the kernel's; '' if it has none of this name."""
    try:
        return output(("/usr/sbin/sysctl", "-n", name)).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version(*, output: Output = output_of) -> str:
    """'26.1'. A Python that was built before macOS 26 calls it 16.0, and so does its `platform`."""
    return sysctl("kern.osproductversion", output=output) or mac_ver()[0]


def build(*, output: Output = output_of) -> str:
    """'25B78': changes with every update of the system."""
    return sysctl("kern.osversion", output=output) or release()


def is_short_of_memory(*, output: Output = output_of) -> bool:
    """Whether macOS compresses or swaps, and asks programs to give memory back."""
    level = sysctl("kern.memorystatus_vm_pressure_level", output=output)
    return level.isdigit() and int(level) >= PRESSURE_WARNING


def machine_id(platform: str = sys.platform, *, output: Output = output_of) -> str:
    """Which machine, or at least which kind of machine, this is: what was measured on it holds.

    A Mac's name changes with the network that it is in; its model and memory do not.
    """
    model = sysctl("hw.model", output=output) if platform == "darwin" else ""
    nbytes = sysctl("hw.memsize", output=output) if model else ""
    return f"{model}-{nbytes}" if model else node()


def is_translated(platform: str = sys.platform, *, output: Output = output_of) -> bool:
    """Whether this is an x86-64 Python, translated by Rosetta. An Intel Mac does not know the name."""
    return platform == "darwin" and sysctl("sysctl.proc_translated", output=output) == "1"


def local_snapshots(
    folder: Path, platform: str = sys.platform, *, output: Output = output_of
) -> list[str]:
    """Time Machine's snapshots of the volume that the folder is on; [] if that cannot be told.

    Each keeps what was deleted after it, whatever is excluded from backups, for a day or until the
    disk is full.
    """
    if platform != "darwin":
        return []
    try:
        text = output(("/usr/bin/tmutil", "listlocalsnapshots", _volume(folder)))
    except (OSError, subprocess.SubprocessError):
        return []
    lines = map(str.strip, text.splitlines())
    return [line for line in lines if line.startswith("com.apple.TimeMachine.")]


def _volume(folder: Path) -> str:
    """Where its volume is mounted. Nearly everything outside /Volumes is on the one of /."""
    parts = folder.parts[:3]
    return str(Path(*parts)) if parts[:2] == ("/", "Volumes") and len(parts) == 3 else "/"


# --- threads -------------------------------------------------------------------------------

USER_INITIATED = 0x19
"""QOS_CLASS_USER_INITIATED: somebody waits for it. Other threads stay at the default."""


def put_first(platform: str = sys.platform, *, libc: str | None = None) -> bool:
    """Have macOS run this thread on its fast cores and before those of programs in the background,
    even if the process was started in the background itself. Returns whether it does."""
    if platform != "darwin":
        return False
    try:
        set_class = ctypes.CDLL(libc).pthread_set_qos_class_self_np
    except (OSError, AttributeError):
        return False
    return int(set_class(USER_INITIATED, 0)) == 0
