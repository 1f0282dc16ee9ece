"""firn's rope is the same function as MLX's own, for every kind of rotation and position."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from firn.backends.cpu import rope as cpu_rope
from firn.backends.cpu.rope import _plain_rope, install, rope
from firn.models.patches import Patches

WIDTH = 32
Float64 = npt.NDArray[np.float64]
EPSILON = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}
POSITIONS: dict[str, Any] = {
    "the start": 0,
    "one": 7,
    "a late one": 100_000,
    "each its own": mx.array([0, 3, 70_000]),
    "one as an array": mx.array([41]),
    "one as a scalar": mx.array(41),
}
KINDS: dict[str, dict[str, Any]] = {
    "halves": {"dims": WIDTH, "traditional": False, "base": 1e4, "scale": 1.0},
    "pairs": {"dims": WIDTH, "traditional": True, "base": 1e4, "scale": 1.0},
    "a part": {"dims": WIDTH // 4, "traditional": False, "base": 1e6, "scale": 1.0},
    "a part in pairs": {"dims": WIDTH // 2, "traditional": True, "base": 1e6, "scale": 1.0},
    "scaled": {"dims": WIDTH, "traditional": False, "base": 1e4, "scale": 0.25},
    "given frequencies": {
        "dims": WIDTH,
        "traditional": False,
        "base": None,
        "scale": 1.0,
        "freqs": mx.array(np.geomspace(1, 5e4, WIDTH // 2).astype(np.float32)),
    },
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = mx.fast.rope
    yield
    mx.fast.rope = before


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    rng = np.random.default_rng(list(shape))
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("at", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rope_equals_mlx_own(kind: str, at: str, dtype: mx.Dtype) -> None:
    x = normal(3, 4, 1, WIDTH, dtype=dtype)
    ours = rope(x, **KINDS[kind], offset=POSITIONS[at])
    theirs = _plain_rope(x, **KINDS[kind], offset=POSITIONS[at])
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    true = exact(x, POSITIONS[at], **KINDS[kind])
    assert far(ours, true) <= 2 * far(theirs, true) + 2 * EPSILON[dtype]


def exact(
    x: mx.array,
    at: Any,
    *,
    dims: int,
    traditional: bool,
    scale: float,
    base: Any,
    freqs: Any = None,
) -> Float64:
    """The rotation in double precision."""
    given = np.array(x.astype(mx.float32), dtype=np.float64)
    speeds = base ** (-np.arange(dims // 2) / (dims // 2)) if freqs is None else 1 / np.array(freqs)
    angles = scale * np.array(at, dtype=np.float64).reshape(-1, 1, 1, 1) * speeds
    out = given.copy()
    halves = np.s_[..., : dims // 2], np.s_[..., dims // 2 : dims]
    first, second = (np.s_[..., :dims:2], np.s_[..., 1:dims:2]) if traditional else halves
    out[first] = given[first] * np.cos(angles) - given[second] * np.sin(angles)
    out[second] = given[first] * np.sin(angles) + given[second] * np.cos(angles)
    return out


def far(a: mx.array, true: Float64) -> float:
    return float(np.abs(np.array(a.astype(mx.float32)) - true).max())


def test_nothing_kept_of_another_step_or_kind_is_used() -> None:
    """The last step's matrix, or another kind's, must not be used for this one."""
    x = normal(2, 4, 1, WIDTH)
    for position in (5, 6, 5):
        for kind in KINDS.values():
            for offset in (position, mx.array([position, position + 9])):
                for _ in ("queries", "keys"):
                    ours, theirs = (
                        rope(x, **kind, offset=offset),
                        _plain_rope(x, **kind, offset=offset),
                    )
                    assert mx.abs(ours - theirs).max() < 1e-5


def test_positions_may_be_counted_up_in_place() -> None:
    """The same array then holds other positions."""
    x, kind, positions = normal(2, 4, 1, WIDTH), KINDS["halves"], mx.array([3, 9])
    for _ in range(3):
        for _ in ("queries", "keys"):
            ours, theirs = (f(x, **kind, offset=positions) for f in (rope, _plain_rope))
            assert mx.abs(ours - theirs).max() < 1e-5
        positions += 1


def test_frequencies_of_two_layers_are_told_apart() -> None:
    x = normal(1, 4, 1, WIDTH)
    for factor in (1.0, 2.0):
        kind = KINDS["given frequencies"] | {"freqs": factor * KINDS["given frequencies"]["freqs"]}
        ours, theirs = rope(x, **kind, offset=9), _plain_rope(x, **kind, offset=9)
        assert mx.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 4, 5, WIDTH), (4, 5, WIDTH), (4, 1, WIDTH)], ids=str)
def test_chunks_and_other_shapes_are_left_to_mlx(shape: tuple[int, ...]) -> None:
    x, kind = normal(*shape), KINDS["halves"]
    assert mx.array_equal(rope(x, **kind, offset=11), _plain_rope(x, **kind, offset=11))


def test_frequencies_that_keep_changing_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models stretch their base as a text grows; arrays for each base would fill the memory."""
    monkeypatch.setattr(cpu_rope, "_rotations", cpu_rope._Rotations())
    monkeypatch.setattr(cpu_rope, "MAX_KINDS", 3)
    x, n_made = normal(1, 4, 1, WIDTH), 0
    for step in range(10):
        kind = KINDS["halves"] | {"base": 1e4 + step}
        ours, theirs = rope(x, **kind, offset=step), _plain_rope(x, **kind, offset=step)
        assert mx.abs(ours - theirs).max() < 1e-5
        n_made = max(n_made, len(cpu_rope._rotations._by_kind))
    assert n_made == 3


def test_no_array_is_shared_between_threads() -> None:
    """An array that its thread left uncomputed when it ended can never be computed."""
    x, kind = normal(1, 4, 1, WIDTH), KINDS["halves"]
    expected = _plain_rope(x, **kind, offset=1234)
    mx.eval(x, expected)

    def once() -> None:
        rope(x, **kind, offset=1234)  # never evaluated
        mx.synchronize()
        mx.clear_streams()

    thread = threading.Thread(target=once)
    thread.start()
    thread.join()
    assert mx.abs(rope(x, **kind, offset=1234) - expected).max() < 1e-5


def test_install_replaces_mlx_own() -> None:
    patches = Patches()
    install(patches)
    assert mx.fast.rope is rope
    patches.undo()
    assert mx.fast.rope is _plain_rope
