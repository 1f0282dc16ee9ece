"""The functions in machine code compute the same as those they replace, on every path."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from firn.backends.cpu import stubs
from firn.backends.cpu.openblas import OpenBlas, libraries

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not stubs.can_run(), reason="they are for Linux on x86-64"
)
BUNDLED = next((lib for lib in libraries() if lib.kind == "bundled"), None)
N, F, P = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
SGEMM = ctypes.CFUNCTYPE(None, N, N, N, N, N, N, F, P, N, P, N, F, P, N)
POWF = ctypes.CFUNCTYPE(F, F, F)


@pytest.fixture(scope="module")
def sgemm() -> SGEMM:
    if BUNDLED is None:
        pytest.skip("scipy-openblas32 is not installed")
    blas = OpenBlas(BUNDLED, n_threads=1)
    address = stubs.sgemm_by_rows(
        sgemm=blas._address("cblas_sgemm"), sgemv=blas._address("cblas_sgemv")
    )
    return SGEMM(address)


@pytest.mark.parametrize("dirty", [np.nan, np.inf, 3.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 7), (1, 1, 1), (1, 300, 2), (2, 5, 7), (9, 1, 4)])
def test_the_sgemm_stub_multiplies_like_sgemm(
    sgemm: SGEMM, m: int, n: int, k: int, transposed: bool, alpha: float, beta: float, dirty: float
) -> None:
    """The output may hold anything, and is read only if beta is not 0. Rows may have gaps."""
    if beta and not np.isfinite(dirty):
        return
    rng = np.random.default_rng([m, n, k])
    a = rng.standard_normal((m, k + 3), dtype=np.float32)
    b = rng.standard_normal((n, k + 2) if transposed else (k, n + 2), dtype=np.float32)
    c = np.full((m, n), dirty, np.float32)
    right = b[:, :k].T if transposed else b[:, :n]
    want = alpha * a[:, :k].astype(np.float64) @ right + (beta * c if beta else 0)
    trans = 112 if transposed else 111
    sgemm(
        101, 111, trans, m, n, k, alpha, a.ctypes.data, k + 3, b.ctypes.data, b.shape[1],
        beta, c.ctypes.data, n,
    )  # fmt: skip
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)


def test_a_transposed_row_is_left_to_sgemm(sgemm: SGEMM) -> None:
    """The values of a transposed left side are not contiguous, which sgemv cannot read."""
    a, b = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((3, 4), np.float32)
    c = np.zeros((1, 4), np.float32)
    sgemm(101, 112, 111, 1, 4, 3, 1.0, a.ctypes.data, 2, b.ctypes.data, 4, 0.0, c.ctypes.data, 4)
    assert c.tolist() == [[6.0] * 4]  # 0 + 2 + 4


def test_the_powf_stub_computes_what_powf_does() -> None:
    libm = ctypes.CDLL("libm.so.6")
    libm.powf.restype, libm.powf.argtypes = F, [F, F]
    powf, exp2f = (ctypes.cast(libm[name], P).value for name in ("powf", "exp2f"))
    assert powf
    assert exp2f
    ours = POWF(stubs.powf_of_two(powf=powf, exp2f=exp2f))
    values = [
        -np.inf,
        -200.0,
        -149.5,
        -126.0,
        -1.5,
        -0.0,
        0.0,
        1e-30,
        0.3,
        7.7,
        127.9,
        128.0,
        np.inf,
    ]
    for base in (2.0, -2.0, 0.0, 1.0, 2.0000002, 0.5, np.e, np.inf, np.nan):
        for value in values:
            np.testing.assert_equal(ours(base, value), libm.powf(base, value))
    np.testing.assert_equal(ours(2.0, np.nan), np.nan)
