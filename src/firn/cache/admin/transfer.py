"""A prefix as one file: a tar archive of its records, parents first. Each is verified on import.

An exported file is never encrypted, even if the folder is: the other machine has a different key.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import BinaryIO

from firn.cache.storage.container import Header, Loaded, Name, derived_key, pack, unpack
from firn.cache.storage.faults import Damaged, Foreign
from firn.cache.storage.seal import Seal
from firn.cache.tiers import Tier, Tombstones
from firn.cache.tree import BLOCK_S
from firn.core.keys import Key, root_key
from firn.core.values import Namespace

SUFFIX = ".safetensors"
SECTOR_NBYTES = 512
Progress = Callable[[int], None]
"""Called with the size of each record in bytes."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Records that an import stored, and those that were there already."""

    n_new: int
    n_present: int
    nbytes: int


def export(
    names: Sequence[Name],
    read: Callable[[Name], Loaded],
    path: Path,
    *,
    progress: Progress = lambda nbytes: None,
) -> int:
    """Write the records to a new file; returns its size. Raises what `read` raises, and OSError."""
    temp = path.with_name(f"{path.name}.part")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            for name in names:
                progress(_add(file, name, read(name)))
            file.write(bytes(2 * SECTOR_NBYTES))
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    return path.stat().st_size


def _add(file: BinaryIO, name: Name, loaded: Loaded) -> int:
    packed = pack(loaded.header, loaded.buffers)
    info = tarfile.TarInfo(f"{name}{SUFFIX}")
    info.size, info.mode, info.mtime = packed.nbytes, 0o600, int(loaded.header.created)
    file.write(info.tobuf(tarfile.PAX_FORMAT))
    for piece in packed.pieces:
        file.write(piece)
    file.write(bytes(-packed.nbytes % SECTOR_NBYTES))
    return packed.nbytes


def import_file(
    path: Path,
    tier: Tier,
    *,
    seal: Seal | None = None,
    namespace: str | None = None,
    progress: Progress = lambda nbytes: None,
) -> Imported:
    """Store the records of an exported file. Raises Damaged, Foreign, and what `Tier.write` raises.

    seal: encrypts them. namespace: move them there, which changes their keys.
    """
    n_new = n_present = nbytes = 0
    moved: dict[Key, Key] = {}
    now = time.time()
    cleared = tier.buried() if isinstance(tier, Tombstones) else {}
    for i, loaded in enumerate(_records(path)):
        header = loaded.header
        if derived_key(header, header.parent) != header.key:
            raise Damaged("another record's bytes", "the key does not follow from the tokens")
        if namespace is not None:
            header = _move(header, namespace, moved)
        if header.created < cleared.get(header.root.hex(), -inf):
            header = replace(header, created=now)  # it is wanted again
        pieces = pack(header, loaded.buffers, seal=seal).pieces
        stored = tier.write(str(header.name), pieces, used_at=now - BLOCK_S * i)
        n_new, n_present = n_new + stored.new, n_present + (not stored.new)
        nbytes += stored.nbytes
        progress(sum(len(b) for b in loaded.buffers))
    return Imported(n_new, n_present, nbytes)


def _records(path: Path) -> Iterator[Loaded]:
    """The records one after another: only one is in memory at a time."""
    n_records = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isfile() or not member.name.endswith(SUFFIX):
                    raise Foreign("not an exported prefix", f"it contains {member.name!r}")
                file = tar.extractfile(member)
                assert file is not None
                n_records += 1
                yield unpack(file.read())
    except (tarfile.TarError, EOFError) as e:
        raise Foreign("not an exported prefix", str(e)) from e
    if not n_records:
        raise Foreign("not an exported prefix", "it contains no records")


def _move(header: Header, namespace: str, moved: dict[Key, Key]) -> Header:
    root = root_key(
        fingerprint=header.fingerprint, layout=header.layout, namespace=Namespace(namespace)
    )
    moved[header.root] = root
    if header.parent not in moved:
        raise Foreign("not an exported prefix", "a record comes before its parent")
    parent = moved[header.parent]
    moved[header.key] = derived_key(header, parent)
    return replace(header, key=moved[header.key], parent=parent, root=root, namespace=namespace)
