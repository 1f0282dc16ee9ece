"""A restart over many files: headers only, everything found, nothing read twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from firn.cache.storage.container import TensorSpec, TierEntry, pack
from firn.cache.tiers._folder import SUBFOLDERS, Disk, path_of
from tests.cache.tiers.records import Folder, Record, record

GIB = 1 << 30
N_FILES = 2_500


class Counting(Disk):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.n_opened = 0
        self.n_read = 0
        self._lock = threading.Lock()

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        with self._lock:
            self.n_opened += path.endswith(".safetensors")
        return super().open(path, flags)

    def read(self, fd: int, buffer: memoryview) -> int:
        n = super().read(fd, buffer)
        with self._lock:
            self.n_read += n
        return n


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record]]:
    """Chains of fifty blocks, as thousands of files that are mostly tensors."""
    folder = tmp_path_factory.mktemp("full")
    for subfolder in SUBFOLDERS:
        (folder / subfolder).mkdir()
    body = b"\7" * 6_000
    records: dict[str, Record] = {}
    parent: Record | None = None
    for i in range(N_FILES):
        parent = None if i % 50 == 0 else parent
        layers = ((TensorSpec("U8", (len(body),)),),)
        one = record(range(i, i + 256), parent=parent, layers=layers)
        fd = os.open(folder / path_of(str(one.name)), os.O_WRONLY | os.O_CREAT, 0o600)
        os.writev(fd, pack(one.header, [body]).pieces)
        os.close(fd)
        records[path_of(str(one.name))] = one
        parent = one
    return folder, records


def test_thousands_of_files(full: tuple[Path, dict[str, Record]]) -> None:
    folder, records = full
    disk = Counting(folder)
    tier = Folder(folder, 10 * GIB, disk=disk)
    entries = {path_of(str(e.name)): e for e in tier.scan() if isinstance(e, TierEntry)}
    assert entries.keys() == records.keys()
    assert disk.n_opened == N_FILES
    assert disk.n_read <= N_FILES * 4096, "the tensors are left alone"
    some = list(records)[::249]
    assert all(np.array_equal(entries[p].label.tokens, records[p].header.tokens) for p in some)
    disk.n_opened = 0
    assert tier.scan() == []
    assert disk.n_opened == 0, "what is known is not read again"


def test_another_process_reads_only_what_is_new(full: tuple[Path, dict[str, Record]]) -> None:
    folder, _ = full
    disk = Counting(folder)
    tier = Folder(folder, 10 * GIB, disk=disk)
    tier.scan()
    disk.n_opened = 0
    new = [record(range(10**6 + i, 10**6 + i + 8)) for i in range(5)]
    other = Folder(folder, 10 * GIB)
    other.scan()
    for one in new:
        other.write(one)
    assert tier.names() == {r.name for r in new}
    assert disk.n_opened == 5
    for one in new:
        assert tier.holds(one)
        other.delete(one)


def test_temp_files_go_and_damaged_labels_are_set_aside(
    full: tuple[Path, dict[str, Record]],
) -> None:
    folder, records = full
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "tmp" / f"{'0' * 64}.pages.1.2.100.tmp").write_bytes(b"x")
    (folder / "tmp" / "a user's own").write_bytes(b"x")
    victims = list(records)[49::500]
    originals = {p: (folder / p).read_bytes() for p in victims}
    for path, raw in originals.items():
        (folder / path).write_bytes(raw[:100] + b"\0\0\0" + raw[103:])
    tier = Folder(folder, 10 * GIB)
    assert len(tier.scan()) == N_FILES - len(victims)
    assert tier.usage().n_quarantined == len(victims)
    assert [file.name for file in (folder / "tmp").iterdir()] == ["a user's own"]
    assert not any((folder / p).exists() for p in victims)


def test_pieces_of_any_number_and_size_are_written(tmp_path: Path) -> None:
    """More than one system call accepts, scaled down: thousands of tensors, or gigabytes."""

    class Small(Disk):
        max_call_nbytes = 1000
        max_pieces = 3

    layers = tuple((TensorSpec("U8", (n % 700,)), None) for n in range(300))
    one = record(layers=layers)
    tier = Folder(tmp_path, GIB, disk=Small(tmp_path))
    tier.write(one)
    assert tier.holds(one)


def test_short_writes_and_reads_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_writes = 0

    def writev(fd: int, pieces: Sequence[memoryview]) -> int:
        nonlocal n_writes
        n_writes += 1
        return os.write(fd, b"".join(pieces)[:777])

    class Short(Disk):
        def read(self, fd: int, buffer: memoryview) -> int:
            return super().read(fd, buffer[:777])

    one = record(layers=tuple((TensorSpec("U8", (n * 50,)),) for n in range(40)))
    tier = Folder(tmp_path, GIB, disk=Short(tmp_path))
    monkeypatch.setattr(os, "writev", writev)
    tier.write(one)
    assert n_writes > 1
    assert tier.holds(one)
