"""Facts about this machine that need no MLX: memory, disk, descriptors, processors, addresses."""

from __future__ import annotations

import ipaddress
import math
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from firn.host.programs import output_of


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """In bytes. available: what a new process could allocate without swapping; None: unknown."""

    total: int
    available: int | None


def memory(root: Path = Path("/")) -> SystemMemory:
    """root: where /proc and /sys are."""
    if sys.platform == "darwin":
        return SystemMemory(_physical_nbytes(), _mac_available())
    info = _meminfo(root / "proc/meminfo")
    total = info.get("MemTotal", _physical_nbytes())
    available = info.get("MemAvailable")
    limit = _number_in(root / "sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:  # a container with less than the machine
        used = _number_in(root / "sys/fs/cgroup/memory.current") or 0
        total, available = limit, min(available or limit, max(limit - used, 0))
    return SystemMemory(total, available)


def _physical_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB"}


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mac_available() -> int | None:
    try:
        text = output_of(("/usr/bin/vm_stat",))
    except (OSError, subprocess.SubprocessError):
        return None
    return vm_stat_available(text, page_nbytes=os.sysconf("SC_PAGE_SIZE"))


def vm_stat_available(text: str, *, page_nbytes: int) -> int | None:
    """Available bytes from macOS's vm_stat: free pages, and those that are on disk or may be lost.

    Not inactive ones: MLX's buffers are among them while the GPU is idle, and they are counted as what
    MLX holds. Speculative pages are on disk, and counted there.
    """
    wanted = ("Pages free", "Pages purgeable", "File-backed pages")
    rows = (line.partition(":") for line in text.splitlines())
    pages = [int(value.strip(" .")) for name, _, value in rows if name in wanted]
    return sum(pages) * page_nbytes if len(pages) == len(wanted) else None


def disk_free(folder: Path) -> int:
    """Free bytes where `folder` is, or would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def usable_cores(root: Path = Path("/")) -> int:
    """Processors that this process may use, within its affinity and its container's quota."""
    if sys.platform == "linux":
        n = len(os.sched_getaffinity(0))
    else:  # macOS has no affinity
        n = os.cpu_count() or 1
    try:
        quota, _, period = (root / "sys/fs/cgroup/cpu.max").read_text().partition(" ")
        if quota.isdigit():
            n = min(n, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return max(n, 1)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def most_descriptors() -> int:
    """The most files that a process of this user may open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def raise_descriptor_limit(*, wanted: int = 65536) -> int:
    """Let this process open `wanted` files, or as many as allowed; returns the limit.

    Each connection and each record being read takes one. macOS starts processes with 256.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    for limit in (most, 24576, 10240, 4096, 1024):  # macOS refuses more than its kernel's limit
        if soft != resource.RLIM_INFINITY and soft < limit <= most:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
            except (OSError, ValueError):
                continue
    return wanted if soft == resource.RLIM_INFINITY else soft
