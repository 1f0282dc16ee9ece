"""A digest is remembered by the identity of its files; any doubt means that it is computed again."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from firn.models.load.fingerprint import Fingerprint
from firn.models.load.weight_hash import identities
from firn.models.load.weight_memory import NAME, WeightMemory
from tests.models.load.test_fingerprint import tensors_of, write, write_file

DIGEST = bytes(range(32))


def later(seconds: float = 60.0) -> Callable[[], float]:
    """A clock by which files written just now have not changed for a while."""
    return lambda: time.time() + seconds


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write(tmp_path / "model", tensors_of()) / "model.safetensors"


@pytest.fixture
def memory(tmp_path: Path) -> WeightMemory:
    return WeightMemory(tmp_path / "cache", min_nbytes=0, clock=later())


def test_the_next_start_reads_no_weights(tmp_path: Path, weights: Path) -> None:
    """A remembered digest is used: here, in place of the weights' real one."""
    memory = WeightMemory(tmp_path / "cache", min_nbytes=0, clock=later())
    first = Fingerprint(weights.parent, memory=memory).result()
    assert Fingerprint(weights.parent).result() == first
    assert Fingerprint(weights.parent, memory=memory).result() == first
    memory.remember(identities([weights]), DIGEST)
    assert Fingerprint(weights.parent, memory=memory).result() != first


def test_the_file_is_private(tmp_path: Path, weights: Path, memory: WeightMemory) -> None:
    memory.remember(identities([weights]), DIGEST)
    (path,) = (tmp_path / "cache").iterdir()
    assert path.name == NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert memory.recall(identities([weights])) == DIGEST


def rewritten(path: Path) -> None:
    """The same length and the same mtime: only ctime tells."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    with path.open("r+b") as f:
        f.write(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(copy, path)


def grown(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x")


@pytest.mark.parametrize("change", [rewritten, replaced, grown, os.utime])
def test_whatever_has_changed_is_hashed_again(
    weights: Path, memory: WeightMemory, change: Callable[[Path], None]
) -> None:
    memory.remember(identities([weights]), DIGEST)
    assert memory.recall(identities([weights])) == DIGEST
    change(weights)
    assert memory.recall(identities([weights])) is None


def test_weights_that_were_rewritten_in_place_are_another_model(
    weights: Path, memory: WeightMemory
) -> None:
    before = Fingerprint(weights.parent, memory=memory).result()
    rewritten(weights)
    assert Fingerprint(weights.parent, memory=memory).result() != before


def test_another_order_of_files_is_another_question(tmp_path: Path, memory: WeightMemory) -> None:
    folder = write(tmp_path / "two", tensors_of(), shards=[["a"], ["b.weight"]])
    files = identities(sorted(folder.glob("*.safetensors")))
    memory.remember(files, DIGEST)
    assert memory.recall(files) == DIGEST
    assert memory.recall(files[::-1]) is None
    assert memory.recall(files[:1]) is None


def test_what_was_just_written_is_not_remembered(tmp_path: Path, weights: Path) -> None:
    """The next change might bear the same time stamp."""
    fresh = WeightMemory(tmp_path / "cache", min_nbytes=0)
    fresh.remember(identities([weights]), DIGEST)
    assert not (tmp_path / "cache").exists()
    from_the_future = WeightMemory(tmp_path / "cache", min_nbytes=0, clock=later(-3600))
    from_the_future.remember(identities([weights]), DIGEST)
    assert not (tmp_path / "cache").exists()


def test_small_weights_leave_no_file_behind(tmp_path: Path, weights: Path) -> None:
    WeightMemory(tmp_path / "cache", clock=later()).remember(identities([weights]), DIGEST)
    assert not (tmp_path / "cache").exists()


def flip(path: Path) -> None:
    """Another digest, well-formed."""
    text = path.read_text()
    path.write_text(text.replace(DIGEST.hex(), DIGEST[::-1].hex()))


DAMAGE: list[Callable[[Path], object]] = [
    lambda p: p.write_bytes(b""),
    lambda p: p.write_bytes(p.read_bytes()[:-5]),
    lambda p: p.write_text("[]"),
    lambda p: p.write_text("[" * 100_000),
    lambda p: p.write_text('{"format": 1, "check": 5, "entries": null}'),
    lambda p: p.write_bytes(os.urandom(200)),
    lambda p: p.write_text(json.dumps({**json.loads(p.read_text()), "format": 2})),
    lambda p: p.write_text(p.read_text() + " " * (5 << 20)),
    lambda p: p.chmod(0o660),
    lambda p: p.unlink(),
    lambda p: (p.unlink(), p.mkdir()),
    flip,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_memory_is_ignored(
    tmp_path: Path, weights: Path, memory: WeightMemory, damage: Callable[[Path], object]
) -> None:
    files = identities([weights])
    memory.remember(files, DIGEST)
    path = tmp_path / "cache" / NAME
    damage(path)
    assert memory.recall(files) is None
    memory.remember(files, DIGEST)
    if not path.is_dir():
        assert memory.recall(files) == DIGEST


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    memory = WeightMemory(tmp_path / "cache", min_nbytes=0, clock=later())
    assert (
        Fingerprint(weights.parent, memory=memory).result() == Fingerprint(weights.parent).result()
    )


def test_the_memory_is_bounded(tmp_path: Path, memory: WeightMemory) -> None:
    paths = []
    for i in range(80):
        paths.append(tmp_path / f"{i}.safetensors")
        write_file(paths[-1], tensors_of())
        memory.remember(identities([paths[-1]]), DIGEST)
    assert memory.recall(identities([paths[-1]])) == DIGEST
    assert memory.recall(identities([paths[0]])) is None
    # The entry of a file's new content replaces the old one.
    write_file(paths[-1], tensors_of(1))
    memory.remember(identities([paths[-1]]), DIGEST[::-1])
    entries = json.loads((tmp_path / "cache" / NAME).read_text())["entries"]
    assert sum(e["files"][0][0] == str(paths[-1]) for e in entries) == 1
