"""Small products get one thread, large ones all; the number is set only where it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from mlx import nn

from firn.models.blas import WORTHWHILE, Threads, _weights_a_product

CODE = """if True:
    import ctypes
    import mlx.core as mx
    from mlx import nn
    from firn.models.blas import threads_for

    number = ctypes.CDLL(None).openblas_get_num_threads
    threads = threads_for(nn.Linear(64, 64))
    found = [number()]
    for n_tokens in (1, 1000, 1):
        threads.prepare(n_tokens)
        found.append(number())
    print(*found)
"""


class Library:
    def __init__(self, n: int) -> None:
        self.n = n
        self.calls: list[int] = []

    def openblas_get_num_threads(self) -> int:
        return self.n

    def openblas_set_num_threads(self, n: int) -> None:
        self.calls.append(n)


def test_threads_follow_the_size() -> None:
    library = Library(8)
    threads = Threads(library, weights_a_product=WORTHWHILE // 4)
    for n_tokens in (256, 1, 1, 3, 4, 16, 1):
        threads.prepare(n_tokens)
    assert library.calls == [1, 8, 1]


@pytest.mark.parametrize(("n_all", "weights"), [(8, WORTHWHILE), (1, 10)])
def test_nothing_is_set_where_there_is_no_choice(n_all: int, weights: int) -> None:
    library = Library(n_all)
    threads = Threads(library, weights_a_product=weights)
    for n_tokens in (1, 256, 1):
        threads.prepare(n_tokens)
    assert library.calls == []


def test_norms_and_biases_are_no_products() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.Linear(20, 30))
    assert _weights_a_product(model) == (10 * 20 + 20 * 30) // 2


def test_a_model_without_products() -> None:
    assert _weights_a_product(nn.LayerNorm(20)) == 0


@pytest.mark.skipif(
    not glob("/usr/lib/*/openblas-pthread/libopenblas.so.0"), reason="there is no OpenBLAS here"
)
def test_the_real_library() -> None:
    [library, *_] = glob("/usr/lib/*/openblas-pthread/libopenblas.so.0")
    env = {**os.environ, "LD_PRELOAD": str(Path(library)), "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=env
    )
    n_all = min(2, os.cpu_count() or 1)
    assert done.stdout.split() == [str(n) for n in (n_all, 1, n_all, 1)]
