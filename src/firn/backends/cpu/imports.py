"""The functions that a loaded shared library imports, as slots that can be set.

An ELF library calls an imported function through a slot in its global offset table, which the
dynamic linker fills in. The file lists where the slots are; this process's memory holds them.
Setting a slot redirects the library's calls to another function of the same signature, for this
process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MLX = "libmlx.so"
PT_LOAD, PT_DYNAMIC = 1, 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
SLOT_TYPES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
"""GLOB_DAT and JUMP_SLOT: relocations that store a function's plain address."""


class NoSlot(Exception):
    """The library's calls cannot be redirected here; the message says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a library keeps the address of one imported function."""

    address: int

    def get(self) -> int:
        return int(ctypes.c_uint64.from_address(self.address).value)

    def set(self, function: int) -> None:
        """Eight aligned bytes: a concurrent call reaches the old or the new function."""
        with _writable(self.address):
            ctypes.c_uint64.from_address(self.address).value = function


def find_slots(library: str, names: tuple[str, ...]) -> dict[str, Slot]:
    """The slots of these functions in a loaded library. Raises NoSlot.

    library: the name of its file, without the folder.
    """
    types = SLOT_TYPES.get(platform.machine())
    if types is None:
        raise NoSlot(f"{platform.machine()} processors are not supported")
    region = next((r for r in _maps() if Path(r.path).name == library), None)
    if region is None:
        raise NoSlot(f"{library} is not loaded")
    with open(region.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        offsets = _Elf(data).slots(types)
        slots = {name: Slot(region.start + offsets[name]) for name in names if name in offsets}
    missing = [name for name in names if name not in slots]
    if missing:
        raise NoSlot(f"{library} does not import {missing[0]}")
    return slots


class _Elf:
    """The parts of a 64-bit little-endian ELF file that describe its imports."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise NoSlot("not a 64-bit little-endian ELF file")
        self._data = data
        (table,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        headers = [struct.unpack_from("<IIQQQQQQ", data, table + i * size) for i in range(count)]
        # (offset in the file, address in memory, bytes in the file)
        self._loads = [(h[2], h[3], h[5]) for h in headers if h[0] == PT_LOAD]
        dynamic = next((h for h in headers if h[0] == PT_DYNAMIC), None)
        if dynamic is None or min(address for _, address, _ in self._loads) != 0:
            raise NoSlot("not a shared library")
        entries = struct.iter_unpack("<qQ", data[dynamic[2] : dynamic[2] + dynamic[5]])
        self._dynamic = dict(entries)

    def slots(self, types: tuple[int, ...]) -> dict[str, int]:
        """Offsets of the slots from the library's base, by the name of the imported function."""
        symbols, names = self._at(self._dynamic[DT_SYMTAB]), self._at(self._dynamic[DT_STRTAB])
        slots = {}
        for offset, info, addend in self._relocations():
            if info & 0xFFFFFFFF not in types or addend:
                continue
            (name_offset,) = struct.unpack_from("<I", self._data, symbols + (info >> 32) * 24)
            start = names + name_offset
            name = self._data[start : self._data.find(b"\0", start)]
            slots[name.decode("ascii", "replace")] = offset
        return slots

    def _relocations(self) -> Iterator[tuple[int, int, int]]:
        for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
            if table in self._dynamic:
                start = self._at(self._dynamic[table])
                yield from struct.iter_unpack(
                    "<QQq", self._data[start : start + self._dynamic[size]]
                )

    def _at(self, address: int) -> int:
        """The offset in the file of the byte at this address."""
        for offset, start, size in self._loads:
            if start <= address < start + size:
                return int(offset + address - start)
        raise NoSlot("a table is outside the file")


# --- this process's memory -----------------------------------------------------------------


class _Region(NamedTuple):
    start: int
    end: int
    rights: str
    path: str


def _maps() -> Iterator[_Region]:
    """In address order: a library's first region starts at its base."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise NoSlot(f"/proc/self/maps cannot be read: {e.strerror}") from e
    for line in lines:
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) > 5 else ""
        yield _Region(int(start, 16), int(end, 16), fields[1], path)


@contextlib.contextmanager
def _writable(address: int) -> Iterator[None]:
    """Make this address writable inside the block: the linker may have made it read-only."""
    region = next((r for r in _maps() if r.start <= address < r.end), None)
    if region is None or "x" in region.rights:
        raise NoSlot("the slot is not in the library's data")
    sealed = "w" not in region.rights
    if sealed:
        _protect(address, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        yield
    finally:
        if sealed:
            _protect(address, mmap.PROT_READ)


def _protect(address: int, rights: int) -> None:
    page = ctypes.c_void_p(address & ~(mmap.PAGESIZE - 1))
    if ctypes.CDLL(None).mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), rights):
        raise NoSlot("the slot's page cannot be made writable")
