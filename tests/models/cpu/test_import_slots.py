"""A library's slots are found from its file, and setting one redirects its calls alone."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from firn.models.cpu import imports
from firn.models.cpu.imports import NoSlot, find_slots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF is for Linux")


def test_what_mlx_multiplies_with() -> None:
    import mlx.core  # noqa: F401 - loads it

    slots = find_slots(imports.MLX, ("cblas_sgemm", "cblas_dgemm"))
    assert len({slot.address for slot in slots.values()}) == 2
    assert all(slot.address % 8 == 0 and slot.get() for slot in slots.values())


@pytest.mark.parametrize(
    ("library", "name", "says"),
    [
        (imports.MLX, "no_such_function", "does not import no_such_function"),
        ("libnothing.so", "cblas_sgemm", "is not loaded"),
    ],
)
def test_what_is_not_there(library: str, name: str, says: str) -> None:
    import mlx.core  # noqa: F401

    with pytest.raises(NoSlot, match=says):
        find_slots(library, (name,))


def test_an_unknown_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports.platform, "machine", lambda: "riscv64")
    with pytest.raises(NoSlot, match="riscv64"):
        find_slots(imports.MLX, ("cblas_sgemm",))


@pytest.mark.parametrize("content", [b"\x7fELF" * 40, b"\x7fELF\x02\x01" + bytes(200)])
def test_a_file_that_is_no_library(tmp_path: Path, content: bytes) -> None:
    """What lies in the file need not be what was loaded: it was replaced meanwhile."""
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
        pytest.raises(NoSlot),
    ):
        imports._Elf(data)


CODE = """if True:
    import ctypes, mmap
    import mlx.core as mx
    from firn.models.cpu.imports import MLX, _protect, find_slots
    libm = ctypes.CDLL("libm.so.6")
    slot = find_slots(MLX, ("powf",))["powf"]
    _protect(slot.address, mmap.PROT_READ)  # as some systems link it
    slot.set(ctypes.cast(libm.fmaxf, ctypes.c_void_p).value)
    _protect(slot.address, mmap.PROT_READ | mmap.PROT_WRITE)  # for the linker's own work
    print(mx.power(mx.array([2.0]), mx.array([5.0])).tolist())
"""


def test_a_slot_is_set_even_where_it_is_sealed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.strip() == "[5.0]", done.stderr
