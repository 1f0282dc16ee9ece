"""How fast an OpenBLAS library multiplies for MLX, tried in a process of its own.

A library that does not fit the processor may kill the process that loads it. So a child process loads it
first, and what the child prints, or that it died, is remembered (see `blas`).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from firn.backends.cpu.openblas import Library, OpenBlas
from firn.models.faults import first_line
from firn.models.patches import Patches

FORMAT = 3
"""Version of remembered trials: increment it when a trial measures something else."""
TIMEOUT_S = 60.0
N_TRIES, MIN_S = 4, 0.2
"""At least this many products, for at least this many seconds, so that some run while other
processes pause."""
SIZE = (96, 512, 512)


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial's result. fault: why the library cannot be used; empty if it can."""

    label: str = ""
    gflops: float = 0.0
    own_gflops: float = 0.0
    """Those of MLX's own BLAS, measured just before."""
    fault: str = ""


def run(library: Library, *, n_threads: int) -> Trial:
    """Try it in a child process, which may die without affecting this one."""
    code = [sys.executable, "-m", __name__, library.kind, library.path, library.prefix]
    try:
        done = subprocess.run(
            [*code, str(n_threads)], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as e:
        return Trial(fault=f"the trial did not finish: {type(e).__name__}")
    if done.returncode < 0:
        return Trial(fault=f"it ended its process with signal {-done.returncode}")
    try:
        return Trial(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or ["it printed no error"]
        return Trial(fault=last[0])


def main(kind: str, path: str, prefix: str, n_threads: str) -> None:
    own = gflops()
    library = Library("bundled" if kind == "bundled" else "system", path, prefix)
    try:
        blas = OpenBlas(library, n_threads=int(n_threads))
        blas.attach(Patches())
        _check()
        speed = gflops()
        # On a busy machine threads wait for each other, and two take forty times as long as one:
        # the speed of one thread is a lower bound of what this library can do.
        blas.set_threads(1)
        trial = Trial(f"{blas.version} for {blas.core}", max(speed, gflops()), own)
    except Exception as e:  # whatever happens, a trial ends with a result
        trial = Trial(own_gflops=own, fault=first_line(e))
    print(json.dumps(asdict(trial)))


def gflops() -> float:
    """The speed of float32 products of a short chunk's size, best of a few."""
    import mlx.core as mx

    m, k, n = SIZE
    a, b = mx.random.normal((m, k)), mx.random.normal((n, k))
    mx.eval(a, b)
    best, n_tries, end = math.inf, 0, time.perf_counter() + MIN_S
    while n_tries < N_TRIES or time.perf_counter() < end:
        began = time.perf_counter()
        mx.eval(a @ b.T)
        best = min(best, time.perf_counter() - began)
        n_tries += 1
    return 2 * m * n * k / best / 1e9


def _check() -> None:
    """Raise ValueError if products are wrong: of one row and several, transposed and not."""
    import mlx.core as mx
    import numpy as np

    rng = np.random.default_rng(0)
    for m, k, n in ((1, 70, 33), (1, 1, 5), (3, 70, 33), (17, 64, 1)):
        a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((m, k), (n, k)))
        want = a.astype(np.float64) @ b.T.astype(np.float64)
        for got in (mx.array(a) @ mx.array(b).T, mx.array(a) @ mx.array(np.ascontiguousarray(b.T))):
            if not np.allclose(np.array(got), want, atol=1e-3):
                raise ValueError("its products are wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
