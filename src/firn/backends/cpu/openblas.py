"""OpenBLAS libraries that may be on a machine, and the replacement of MLX's own BLAS by one of them.

MLX's Linux wheel multiplies with a reference BLAS, at 1/40 of the processor's speed. The wheel
scipy-openblas32 has OpenBLAS's functions under prefixed names, which MLX does not call; so MLX's calls
are redirected (see `imports`). Nothing is preloaded, and no file is copied or written.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from firn.backends.cpu import stubs
from firn.backends.cpu.imports import MLX, find_slots
from firn.models.patches import Patches

Kind = Literal["system", "bundled"]
PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""The functions that MLX's matrix products call, for float32, float64 and complex64."""
SPIN = "23"
"""Idle threads spin for 2**23 cycles, about 3 ms, before they sleep.

OpenBLAS's default of 2**28 keeps a core from Python, MLX and the clients long after a step. If threads
went to sleep in less time than a layer of attention takes, every product would have to wake them.
"""


@dataclass(frozen=True, slots=True)
class Library:
    """A library on this machine. prefix: what the names of its functions begin with."""

    kind: Kind
    path: str
    prefix: str = ""


def libraries() -> list[Library]:
    """Candidates; a trial shows whether they load and how fast they are."""
    return [lib for lib in (_bundled(), _of_the_system()) if lib is not None]


def _bundled() -> Library | None:
    """The wheel's library. Importing the package would load it with its default threads, so it is
    only located."""
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [
        f for folder in folders for f in sorted(Path(folder, "lib").glob("libscipy_openblas*"))
    ]
    return Library("bundled", str(files[0]), "scipy_") if files else None


def _of_the_system() -> Library | None:
    """The one that the dynamic linker would load."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [program, "-p"]
            listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            rows = (line.partition(" => ") for line in listed.stdout.splitlines())
            paths = [path for name, _, path in rows if name.split()[:1] == ["libopenblas.so.0"]]
            return Library("system", paths[0]) if paths else None
    return None


class OpenBlas:
    """A library loaded into this process. Raises OSError or AttributeError if it is not OpenBLAS."""

    def __init__(self, library: Library, *, n_threads: int) -> None:
        with _environment(OPENBLAS_NUM_THREADS=str(n_threads), OPENBLAS_THREAD_TIMEOUT=SPIN):
            self._functions = ctypes.CDLL(library.path)
        self._prefix = library.prefix
        self._set_threads = self._function("openblas_set_num_threads")
        self.n_threads = n_threads
        self.set_threads(n_threads)

    @property
    def version(self) -> str:
        """As the library reports it: "OpenBLAS 0.3.34"."""
        config = self._function("openblas_get_config")
        config.restype = ctypes.c_char_p
        words = (config() or b"").decode("ascii", "replace").split()
        return " ".join(words[:2])

    @property
    def core(self) -> str:
        """The processor family that the library has detected."""
        name = self._function("openblas_get_corename")
        name.restype = ctypes.c_char_p
        return (name() or b"").decode("ascii", "replace")

    def set_threads(self, n: int) -> None:
        self._set_threads(ctypes.c_int(n))

    def attach(self, patches: Patches) -> None:
        """Make MLX multiply with this library from now on, in this process. Raises NoSlot."""
        import mlx.core  # noqa: F401 - only a loaded library has slots

        slots = find_slots(MLX, PRODUCTS)
        addresses = {name: self._address(name) for name in PRODUCTS}
        if stubs.can_run():
            with contextlib.suppress(OSError):  # no executable memory: sgemm for all products
                addresses["cblas_sgemm"] = stubs.sgemm_by_rows(
                    sgemm=addresses["cblas_sgemm"], sgemv=self._address("cblas_sgemv")
                )
        for name, slot in slots.items():
            patches.add(f"{MLX}:{name}", partial(slot.set, slot.get()))
            slot.set(addresses[name])

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        return self._functions[self._prefix + name]

    def _address(self, name: str) -> int:
        address = ctypes.cast(self._function(name), ctypes.c_void_p).value
        assert address is not None
        return address


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables inside the block: OpenBLAS reads them as it loads; child processes must not
    inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
