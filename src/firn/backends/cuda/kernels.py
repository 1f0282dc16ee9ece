"""Kernels that MLX compiles on first use: kept, and compiled ahead by several processes.

Some of them take five seconds each, and MLX compiles one after the other. By default it keeps them in
the system's temporary folder, where they are lost at the next boot and where other users can write.

    <folder>/<MLX's version>-<the GPU>/    name.ptx, name.txt   written by MLX
                                           known.json           their sizes, once they were used
                                           .<process id>/       of a process that compiles ahead

MLX writes its files in place. So the processes that compile ahead write to folders of their own and
move files that are complete. At each start, files that known.json does not list are removed: a
crash may have truncated them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from firn.core.private_folder import make_private

log = logging.getLogger("firn.models")

FOLDER = "MLX_PTX_CACHE_DIR"
KNOWN = "known.json"
MAX_PROCESSES = 8
TIMEOUT_S = 120.0
FLOAT = mx.bfloat16
"""The type that most models compute in. Kernels for other types are compiled on first use."""


def _table(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((4, 4), dtype=dtype)


def _rows(dtype: mx.Dtype, index: mx.Dtype) -> mx.array:
    return _table(dtype)[mx.array([[0, 1]], dtype=index)]


def _values(dtype: mx.Dtype, index: mx.Dtype) -> mx.array:
    return mx.zeros((4,), dtype=dtype)[mx.array([0, 1], dtype=index)]


def _taken(dtype: mx.Dtype, index: mx.Dtype) -> mx.array:
    return mx.take_along_axis(_table(dtype), mx.zeros((4, 1), dtype=index), axis=1)


def _put(dtype: mx.Dtype, index: mx.Dtype) -> mx.array:
    where, what = mx.zeros((4, 1), dtype=index), mx.ones((4, 1), dtype=dtype)
    return mx.put_along_axis(_table(dtype), where, what, axis=1)


def _added(index: mx.Dtype) -> mx.array:
    return _table(mx.float32).at[:, mx.array([0, 1], dtype=index)].add(1.0)


OPERATIONS: dict[str, Callable[[], mx.array]] = {
    "embeddings of prompts": partial(_rows, FLOAT, mx.int32),
    "embeddings of picked tokens": partial(_rows, FLOAT, mx.uint32),
    "rows that leave": partial(_values, mx.uint32, mx.int32),
    "columns": partial(_values, mx.int32, mx.int32),
    "keys that move": partial(_taken, FLOAT, mx.int32),
    "keys that are written": partial(_put, FLOAT, mx.int32),
    "drafts": partial(_taken, mx.int32, mx.int32),
    "top-p": partial(_taken, mx.float32, mx.int32),
    "logprobs": partial(_taken, mx.float32, mx.uint32),
    "logit bias": partial(_added, mx.int32),
    "penalties": partial(_added, mx.uint32),
    "tokens seen": partial(_put, mx.bool_, mx.uint32),
    "drafted tokens seen": partial(_put, mx.bool_, mx.int32),
}
"""Operations that rows, groups, drafts and sampling use, one kernel each."""


def keep(folder: Path) -> None:
    """Have MLX keep its kernels below this folder, and compile those that every server needs if
    they are not there yet. Call it before anything is computed. A folder set by the user stays."""
    if os.environ.get(FOLDER):
        return
    place = folder / _machine()
    try:
        make_private(place)
        with (place / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # servers that start at the same time compile once
            os.environ[FOLDER] = str(place)
            _drop_unknown(place)
            if not (place / KNOWN).exists() and _compile(place):
                note(folder)
    except OSError as e:
        log.warning("compiled GPU kernels stay in the system's temporary folder: %s", e)


def note(folder: Path) -> None:
    """Record that all kernels below this folder have been used, and so are complete."""
    place = folder / _machine()
    if os.environ.get(FOLDER) != str(place):
        return
    temp = place / f".{KNOWN}-{os.getpid()}"
    try:
        sizes = {path.name: path.stat().st_size for path in _files(place)}
        whole = {name: n for name, n in sizes.items() if f"{name[:-4]}.txt" in sizes}
        temp.write_text(json.dumps(whole))
        temp.replace(place / KNOWN)
    except OSError as e:
        log.warning("GPU kernels will be recompiled at the next start: %s", e)


def _drop_unknown(place: Path) -> None:
    """Remove files that are not known, and folders of processes that were killed: while the lock is
    held, no other process compiles ahead."""
    for left in place.glob(".[0-9]*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        known = dict(json.loads((place / KNOWN).read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
        (place / KNOWN).unlink(missing_ok=True)
    for path in _files(place):
        if known.get(path.name) != path.stat().st_size:
            path.unlink(missing_ok=True)


def _files(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.suffix in (".ptx", ".txt")]


def _machine() -> str:
    """The folder's name: kernels are specific to a version of MLX and a kind of GPU."""
    info = mx.device_info()
    gpu = str(info.get("device_name") or info.get("architecture") or "gpu")
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{version('mlx')}-{gpu}")


def _compile(place: Path) -> bool:
    """Returns whether all operations were compiled. The others are compiled on first use."""
    log.info("compiling GPU kernels: the first start on a machine takes longer")
    began, names = time.perf_counter(), list(OPERATIONS)
    n = max(min(MAX_PROCESSES, (os.cpu_count() or 2) // 2), 1)
    processes = [_process(place, names[i::n]) for i in range(min(n, len(names)))]
    until = began + TIMEOUT_S
    codes = [_wait(process, until) for process in processes]
    log.info("GPU kernels compiled in %.0f s", time.perf_counter() - began)
    return not any(codes)


def _process(place: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *names],
        env={**os.environ, FOLDER: str(place)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait(process: subprocess.Popen[bytes], until: float) -> int:
    try:
        return process.wait(max(until - time.perf_counter(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(names: Sequence[str]) -> None:
    """In a process of its own: compile these operations, and move what MLX has written."""
    place = Path(os.environ[FOLDER])
    own = place / f".{os.getpid()}"
    own.mkdir(mode=0o700)
    os.environ[FOLDER] = str(own)
    try:
        for name in names:
            mx.eval(OPERATIONS[name]())
            move(own, place)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def move(own: Path, place: Path) -> None:
    """Move files into place, the .ptx file last: MLX looks for it, and then reads the others."""
    for path in sorted(own.iterdir(), key=lambda p: p.suffix == ".ptx"):
        path.replace(place / path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
