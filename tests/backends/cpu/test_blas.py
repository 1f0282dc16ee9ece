"""The choice of a BLAS, by trials that are remembered and never harm the process."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firn.backends.cpu import blas, openblas, trial
from firn.backends.cpu.blas import attach
from firn.backends.cpu.openblas import Library
from firn.backends.cpu.trial import Trial
from firn.core.errors import SetupError
from firn.models.patches import Patches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have a fast BLAS")

SYSTEM, BUNDLED = Library("system", "/lib/one.so"), Library("bundled", "/lib/two.so", "scipy_")
BUNDLED_HERE = next((lib for lib in openblas.libraries() if lib.kind == "bundled"), None)
needs_bundled = pytest.mark.skipif(BUNDLED_HERE is None, reason="scipy-openblas32 is not installed")


class Loaded:
    """Stands for a library that was loaded into the process."""

    def __init__(self, library: Library, *, n_threads: int) -> None:
        self.library, self.n_threads, self.attached = library, n_threads, False

    def attach(self, patches: Patches) -> None:
        self.attached = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with two libraries; `trials` holds their results, `tried` those that were tried."""
    now: dict[str, Any] = {"trials": {}, "tried": [], "libraries": [BUNDLED, SYSTEM]}

    def run(library: Library, *, n_threads: int) -> Trial:
        now["tried"].append(library.kind)
        return now["trials"][library.kind]

    monkeypatch.setattr(blas, "libraries", lambda: now["libraries"])
    monkeypatch.setattr(blas, "OpenBlas", Loaded)
    monkeypatch.setattr(trial, "run", run)
    return now


def trial_of(gflops: float) -> Trial:
    return Trial("OpenBLAS", gflops, own_gflops=5.0)


@pytest.mark.parametrize(
    ("bundled", "system", "chosen"),
    [(100, 90, "bundled"), (100, 119, "bundled"), (100, 130, "system"), (5.5, 5.5, None)],
)
def test_the_fastest_is_taken(
    machine: dict[str, Any], tmp_path: Path, bundled: float, system: float, chosen: str | None
) -> None:
    machine["trials"] = {"bundled": trial_of(bundled), "system": trial_of(system)}
    result = attach("auto", patches=Patches(), memo=tmp_path / "blas.json")
    library: Any = result.library
    assert (library.library.kind if library else None) == chosen
    assert library is None or library.attached


@pytest.mark.parametrize(
    ("environ", "n"),
    [
        ({}, 8),
        ({"OPENBLAS_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
        ({"OMP_NUM_THREADS": "64"}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 8),
    ],
)
def test_it_has_a_thread_for_each_core_or_as_many_as_the_user_allows(
    machine: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    n: int,
) -> None:
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(90)}
    monkeypatch.setattr(blas, "usable_cores", lambda: 8)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    library = attach("auto", patches=Patches(), memo=tmp_path / "blas.json").library
    assert library is not None
    assert library.n_threads == n


def test_a_trial_is_remembered(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(90)}
    memo = tmp_path / "deep" / "blas.json"
    texts = {attach("auto", patches=Patches(), memo=memo).text for _ in range(3)}
    assert machine["tried"] == ["bundled", "system"]
    assert len(texts) == 1
    assert set(json.loads(memo.read_text())) == {blas._name(BUNDLED), blas._name(SYSTEM)}


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": 1}', '{"a": {"gflops": 1, "b": 2}}'])
def test_a_damaged_memo_means_a_new_trial(
    machine: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(90)}
    memo = tmp_path / "blas.json"
    memo.write_text(damage)
    assert attach("auto", patches=Patches(), memo=memo).library is not None
    assert machine["tried"] == ["bundled", "system"]


def test_without_a_writable_memo_each_start_tries_again(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(90)}
    (tmp_path / "file").touch()
    for _ in range(2):
        assert (
            attach("auto", patches=Patches(), memo=tmp_path / "file" / "blas.json").library
            is not None
        )
    assert len(machine["tried"]) == 4


def test_a_library_that_fails_is_passed_over(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["trials"] = {"bundled": Trial(fault="signal 4"), "system": trial_of(90)}
    library: Any = attach("auto", patches=Patches(), memo=tmp_path / "blas.json").library
    assert library.library.kind == "system"
    machine["trials"] = {"bundled": Trial(fault="signal 4"), "system": Trial(fault="signal 4")}
    left = attach("auto", patches=Patches(), memo=tmp_path / "other.json")
    assert left.library is None
    assert "signal 4" in left.text


@pytest.mark.parametrize("choice", ["system", "bundled"])
def test_a_library_asked_for_by_name_must_be_installed(
    machine: dict[str, Any], tmp_path: Path, choice: Any
) -> None:
    machine["libraries"] = []
    with pytest.raises(SetupError, match=f"--blas {choice}: no OpenBLAS is installed"):
        attach(choice, patches=Patches(), memo=tmp_path / "blas.json")
    assert attach("auto", patches=Patches(), memo=tmp_path / "blas.json").library is None


def test_blas_none_keeps_mlx_own(machine: dict[str, Any], tmp_path: Path) -> None:
    assert attach("none", patches=Patches(), memo=tmp_path / "blas.json").library is None
    assert machine["tried"] == []


@pytest.mark.parametrize(
    ("platform", "libc", "why"),
    [("darwin", "glibc", "which is fast on darwin"), ("linux", "musl", "does not use glibc")],
)
def test_other_systems_are_left_alone(
    machine: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    libc: str,
    why: str,
) -> None:
    monkeypatch.setattr(blas.sys, "platform", platform)
    monkeypatch.setattr(blas.platform, "libc_ver", lambda: (libc, "1"))
    own = attach("auto", patches=Patches(), memo=tmp_path / "blas.json")
    assert own.library is None
    assert why in own.text
    assert machine["tried"] == []


# --- real libraries, in processes of their own ---------------------------------------------


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)


@needs_bundled
def test_the_bundled_library_is_much_faster() -> None:
    assert BUNDLED_HERE is not None
    result = trial.run(BUNDLED_HERE, n_threads=1)
    assert not result.fault
    assert result.gflops > 2 * result.own_gflops
    assert result.label.startswith("OpenBLAS 0.")


@pytest.mark.parametrize(
    ("path", "says"),
    [("/nowhere/libopenblas.so", "cannot open"), ("libm.so.6", "openblas_set_num_threads")],
)
def test_a_file_that_is_not_openblas_is_a_fault(path: str, says: str) -> None:
    assert says in trial.run(Library("system", path), n_threads=1).fault


def test_a_library_that_kills_its_process_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        return real(["/bin/sh", "-c", "kill -s ILL $$"], **more)

    monkeypatch.setattr(trial.subprocess, "run", run)
    fault = trial.run(SYSTEM, n_threads=1).fault
    assert fault == f"it ended its process with signal {int(signal.SIGILL)}"


@needs_bundled
def test_products_go_to_the_library() -> None:
    """It stays attached though nothing refers to it. Another library would round differently."""
    done = python(
        """if True:
        import ctypes, gc
        import mlx.core as mx
        import numpy as np
        from firn.backends.cpu import trial
        from firn.backends.cpu.openblas import OpenBlas, libraries
        from firn.models.patches import Patches
        library = next(lib for lib in libraries() if lib.kind == "bundled")
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((96, 512), (512, 256)))
        before = np.array(mx.array(a) @ mx.array(b))
        OpenBlas(library, n_threads=2).attach(Patches())
        gc.collect()
        after = np.array(mx.array(a) @ mx.array(b))
        sgemm = ctypes.CDLL(library.path)[library.prefix + "cblas_sgemm"]
        one, zero, c = ctypes.c_float(1), ctypes.c_float(0), np.empty((96, 256), np.float32)
        x, y, z = (ctypes.c_void_p(values.ctypes.data) for values in (a, b, c))
        sgemm(101, 111, 111, 96, 256, 512, one, x, 512, y, 256, zero, z, 256)
        trial._check()
        print(np.array_equal(before, c), np.array_equal(after, c))
        """
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


@needs_bundled
def test_threads_without_a_product_soon_sleep() -> None:
    """By default OpenBLAS's threads spin for 2**28 cycles first: 60 ms of CPU time and more."""
    done = python(
        """if True:
        import threading, time
        from pathlib import Path
        import mlx.core as mx
        from firn.backends.cpu.openblas import OpenBlas, libraries
        from firn.models.patches import Patches
        library = next(lib for lib in libraries() if lib.kind == "bundled")
        OpenBlas(library, n_threads=2).attach(Patches())
        a = mx.random.normal((512, 512))
        mx.eval(a @ a)
        own = str(threading.get_native_id())
        others = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
        def sleep():
            states = (task.joinpath("stat").read_text().rpartition(") ")[2][0] for task in others)
            return all(state == "S" for state in states)
        def cpu_ns():
            return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in others)
        began = cpu_ns()
        while not sleep() and cpu_ns() - began < 20e6:
            time.sleep(0.001)
        print(len(others) > 0, sleep(), cpu_ns() - began < 20e6)
        """
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr


@needs_bundled
def test_loading_a_library_leaves_the_environment_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert BUNDLED_HERE is not None
    openblas.OpenBlas(BUNDLED_HERE, n_threads=1)
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"
    assert "OPENBLAS_THREAD_TIMEOUT" not in os.environ


def test_again_ignores_what_was_remembered(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(90)}
    memo = tmp_path / "blas.json"
    attach("auto", patches=Patches(), memo=memo)
    machine["trials"] = {"bundled": trial_of(100), "system": trial_of(900)}
    library: Any = attach("auto", patches=Patches(), memo=memo, again=True).library
    assert library.library.kind == "system"
    remembered: Any = attach("auto", patches=Patches(), memo=memo).library
    assert remembered.library.kind == "system"
    assert len(machine["tried"]) == 4


@needs_bundled
def test_threads_that_wait_for_each_other_do_not_make_a_library_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speeds are MLX's own, that of all threads on a busy machine, and that of one thread."""
    speeds = iter([1.7, 1.8, 84.0])
    monkeypatch.setattr(trial, "gflops", lambda: next(speeds))
    monkeypatch.setattr(trial, "_check", lambda: None)
    monkeypatch.setattr(trial.OpenBlas, "attach", lambda self, patches: None)
    assert BUNDLED_HERE is not None
    trial.main(BUNDLED_HERE.kind, BUNDLED_HERE.path, BUNDLED_HERE.prefix, "2")
    result = Trial(**json.loads(capsys.readouterr().out))
    assert (result.gflops, result.own_gflops) == (84.0, 1.7)


def test_a_products_speed_does_not_depend_on_how_often_it_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("firn.backends.cpu.trial.time.perf_counter", lambda: next(clock) / 1000)
    m, k, n = trial.SIZE
    assert trial.gflops() == pytest.approx(2 * m * n * k / 1e6)
