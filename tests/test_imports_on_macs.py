"""Every module can be imported on macOS, which lacks names that Linux has.

In a process of its own: `sys.platform` and the names are changed before firn is imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import firn

LINUX_ONLY = """
import os, fcntl, resource, select, signal, socket, sys
GONE = {
    os: "sched_getaffinity sched_setaffinity sched_setscheduler sched_getscheduler sched_param "
        "SCHED_BATCH SCHED_OTHER SCHED_IDLE O_DIRECT O_TMPFILE O_PATH posix_fadvise "
        "POSIX_FADV_DONTNEED POSIX_FADV_WILLNEED POSIX_FADV_SEQUENTIAL posix_fallocate fdatasync "
        "sendfile64 copy_file_range memfd_create eventfd splice pipe2 getrandom pidfd_open "
        "setns unshare preadv2 RWF_NOWAIT",
    fcntl: "F_OFD_SETLK F_OFD_GETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS",
    resource: "prlimit RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO",
    select: "epoll EPOLLIN EPOLLOUT EPOLLET",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT pidfd_send_signal",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT TCP_QUICKACK AF_NETLINK",
}
"""
SCRIPT = (
    LINUX_ONLY
    + """
import importlib, pathlib, pkgutil
# The libraries are those of this machine: they are imported as they are, and firn without the names.
import asyncio, multiprocessing, subprocess, numpy, mlx.core, mlx_lm.models.cache, transformers, uvloop
import uvicorn, fastapi, httpx, rich.console, typer, huggingface_hub
import firn
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
failed = []
for found in pkgutil.walk_packages(firn.__path__, "firn."):
    if found.name.endswith("__main__") or found.name in sys.modules:
        continue
    try:
        importlib.import_module(found.name)
    except Exception as e:
        failed.append(f"{found.name}: {type(e).__name__}: {e}")
n = sum(name.startswith("firn.") for name in sys.modules)
print(n, *failed, sep="\\n")
os._exit(0)
"""
)


def test_every_module() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    n, *failed = done.stdout.splitlines()
    assert failed == []
    n_files = sum(1 for _ in Path(firn.__file__).parent.rglob("*.py"))
    assert int(n) > 0.9 * n_files
