"""Which BLAS multiplies for MLX on a Linux CPU: the fastest on the machine, or the one asked for.

The results of trials are remembered in a small file, so that the next start loads one library and
measures none. If anything goes wrong, MLX keeps its own BLAS, and one log line says why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import xxhash

from firn.backends.cpu import trial
from firn.backends.cpu.imports import NoSlot
from firn.backends.cpu.openblas import Library, OpenBlas, libraries
from firn.backends.cpu.trial import Trial
from firn.config import BlasChoice
from firn.core.errors import SetupError
from firn.core.private_folder import make_private
from firn.host.machine import usable_cores
from firn.models.patches import Patches

log = logging.getLogger("firn.models")

WORTH = 1.2
"""How many times as fast as MLX's own a library must be."""
PREFERENCE = {"bundled": 1.2, "system": 1.0}
"""Factors on the measured speed: firn is tested with the bundled one."""
HOW_TO_GET = {
    "bundled": "install firn[cpu], which includes scipy-openblas32",
    "system": "install OpenBLAS with the system's packages (Debian: libopenblas0-pthread)",
}


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that multiplies matrices in this process. library None: MLX's own."""

    text: str
    """For people: which one, how fast, or why no other."""
    library: OpenBlas | None = None
    gflops: float = 0.0

    @property
    def identity(self) -> str:
        """Everything that its rounding depends on."""
        if self.library is None:
            return "mlx's blas"
        return f"{self.library.version} {self.library.core} x{self.library.n_threads}"


def attach(choice: BlasChoice, *, memo: Path, patches: Patches, again: bool = False) -> Blas:
    """Replace MLX's BLAS by another library, for this process.

    memo: the file that remembers trials; again: ignore it, and run the trials anew.
    Raises SetupError if a library was asked for by name and cannot be used.
    """
    if choice == "none":
        return Blas("MLX's own BLAS, as requested")
    if choice == "auto" and sys.platform != "linux":
        return Blas(f"MLX's own BLAS, which is fast on {sys.platform}")
    why_not = _why_not_here()
    wanted = [lib for lib in libraries() if choice in ("auto", lib.kind)]
    if why_not or not wanted:
        return _go_without(choice, why_not or "no OpenBLAS is installed")
    trials = _trials(wanted, memo, {} if again else _read(memo))
    best = max(wanted, key=lambda lib: trials[lib.kind].gflops * PREFERENCE[lib.kind])
    result = trials[best.kind]
    if result.fault:
        return _go_without(choice, f"{best.path}: {result.fault}")
    if choice == "auto" and result.gflops < WORTH * result.own_gflops:
        return Blas(f"MLX's own BLAS, {result.own_gflops:.0f} GFLOP/s", gflops=result.own_gflops)
    try:
        library = OpenBlas(best, n_threads=n_threads())
        library.attach(patches)
    except (OSError, AttributeError, NoSlot) as e:
        return _go_without(choice, str(e))
    threads = "1 thread" if library.n_threads == 1 else f"{library.n_threads} threads"
    text = (
        f"{result.label}, {best.kind}, {threads}: {result.gflops:.0f} GFLOP/s "
        f"(MLX's own: {result.own_gflops:.1f})"
    )
    return Blas(text, library, result.gflops)


def n_threads() -> int:
    """One for each core that this process may use, or fewer if the environment limits OpenBLAS."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        with contextlib.suppress(ValueError):
            if (allowed := int(os.environ.get(name, ""))) > 0:
                return min(allowed, usable_cores())
    return usable_cores()


def _why_not_here() -> str:
    if sys.platform != "linux":
        return f"{sys.platform} already has a fast BLAS"
    if platform.libc_ver()[0] != "glibc":
        return "this system does not use glibc"
    return ""


def _go_without(choice: BlasChoice, why: str) -> Blas:
    if choice != "auto":
        raise SetupError(f"--blas {choice}: {why}; {HOW_TO_GET[choice]}, or leave out the flag.")
    return Blas(f"MLX's own BLAS, which is slow: {why}")


# --- trials, remembered --------------------------------------------------------------------


def _trials(wanted: list[Library], memo: Path, known: dict[str, Trial]) -> dict[str, Trial]:
    """Trials by kind of library. Those that are not known are run, and remembered."""
    out: dict[str, Trial] = {}
    n_new = 0
    for library in wanted:
        name = _name(library)
        if name not in known:
            log.debug("trying %s OpenBLAS (once)", library.kind)
            known[name] = trial.run(library, n_threads=n_threads())
            n_new += 1
        out[library.kind] = known[name]
    if n_new:
        _write(memo, known)
    return out


def _name(library: Library) -> str:
    """Everything that a trial's result depends on."""
    try:
        stat = os.stat(library.path)
        file = f"{library.path} {stat.st_size} {stat.st_mtime_ns}"
    except OSError:
        file = library.path
    return (
        f"{file}, mlx {metadata.version('mlx')}, {_processor()}, {n_threads()} threads, "
        f"trial {trial.FORMAT}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "CPU part", "Features")
    features = sorted({line for line in lines if line.startswith(wanted)})
    return f"{platform.machine()}-{xxhash.xxh3_64_hexdigest(repr(features).encode())}"


def _read(memo: Path) -> dict[str, Trial]:
    try:
        return {name: Trial(**fields) for name, fields in json.loads(memo.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(memo: Path, trials: Mapping[str, Trial]) -> None:
    """Best effort: without the file, the next start tries again."""
    text = json.dumps({name: asdict(t) for name, t in trials.items()}, indent=1)
    with contextlib.suppress(OSError):
        make_private(memo.parent)
        temp = memo.with_suffix(f".{os.getpid()}")
        temp.write_text(text)
        temp.replace(memo)
