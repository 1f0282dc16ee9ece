"""A library's slots are found from its file, and setting one redirects only its own calls."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from firn.backends.cpu import imports
from firn.backends.cpu.imports import NoSlot, find_slots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF is for Linux")


def test_the_slots_of_mlx_products_are_found() -> None:
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
def test_a_missing_function_or_library_has_no_slot(library: str, name: str, says: str) -> None:
    import mlx.core  # noqa: F401

    with pytest.raises(NoSlot, match=says):
        find_slots(library, (name,))


def test_an_unknown_processor_has_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports.platform, "machine", lambda: "riscv64")
    with pytest.raises(NoSlot, match="riscv64"):
        find_slots(imports.MLX, ("cblas_sgemm",))


@pytest.mark.parametrize("content", [b"\x7fELF" * 40, b"\x7fELF\x02\x01" + bytes(200)])
def test_a_file_that_is_not_a_library_has_no_slots(tmp_path: Path, content: bytes) -> None:
    """The file may have been replaced since it was loaded."""
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
    from firn.backends.cpu.imports import MLX, _protect, find_slots
    libm = ctypes.CDLL("libm.so.6")
    slot = find_slots(MLX, ("powf",))["powf"]
    _protect(slot.address, mmap.PROT_READ)  # as some systems link it
    slot.set(ctypes.cast(libm.fmaxf, ctypes.c_void_p).value)
    _protect(slot.address, mmap.PROT_READ | mmap.PROT_WRITE)  # for the linker's own work
    print(mx.power(mx.array([2.0]), mx.array([5.0])).tolist())
"""


def test_a_slot_is_set_even_on_a_read_only_page() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.strip() == "[5.0]", done.stderr
