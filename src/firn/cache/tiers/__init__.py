"""Storage tiers: where records live as bytes. One file each, found by being here.

A module of this package whose name has no leading underscore defines one class with the methods of
`Tier` and a function `open_tier(folder, limit_nbytes)`; the contract tests pick it up by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from firn.cache.container import Header, Label, Loaded, Tag, TensorSpec
from firn.cache.faults import (
    Damaged,
    Foreign,
    Locked,
    Missing,
    Refused,
    TierError,
    TierFault,
    TierFull,
)
from firn.cache.parts import Part
from firn.core.keys import Key, KeyTokens

__all__ = [
    "Damaged",
    "Entry",
    "Foreign",
    "Gone",
    "Header",
    "Label",
    "Loaded",
    "Locked",
    "Missing",
    "Name",
    "Refused",
    "Status",
    "Stored",
    "Tag",
    "TensorSpec",
    "Tier",
    "TierError",
    "TierFault",
    "TierFull",
    "Usage",
    "discover",
    "name_of",
]


@dataclass(frozen=True, slots=True)
class Name:
    """A record's name: the same in every tier."""

    key: Key
    part: Part


def name_of(tag: Tag) -> Name:
    return Name(tag.key, tag.part)


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that a scan found."""

    label: Label
    nbytes: int
    last_use: float
    """Unix time."""

    @property
    def name(self) -> Name:
        return name_of(self.label)


@dataclass(frozen=True, slots=True)
class Gone:
    """A record that is there no more, by someone else's doing."""

    name: Name


@dataclass(frozen=True, slots=True)
class Stored:
    nbytes: int
    """Bytes that it takes up; 0 when nothing was written."""
    new: bool
    """False: it was there already, or is being written by someone else; nothing was written."""
    evicted: tuple[Name, ...] = ()
    """What had to go to make room. Not told again by a scan."""


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the tier takes writes. Reads go on as far as they can in any state."""

    state: Literal["ok", "paused"] = "ok"
    reason: str = ""
    since: float = 0.0
    """Unix time of the first of the failures that still go on."""


@dataclass(frozen=True, slots=True)
class Usage:
    """All numbers of a tier at one moment. Counts are since the tier was opened."""

    nbytes: int
    """Real bytes taken up, with what is being written and what is in quarantine."""
    limit_nbytes: int
    status: Status = Status()
    n_files: Mapping[Part, int] = field(default_factory=dict)
    part_nbytes: Mapping[Part, int] = field(default_factory=dict)
    n_foreign: int = 0
    """Files of other formats, or encrypted with another key."""
    n_orphans: int = 0
    """Blocks that no prompt can reach, because their parent is not stored."""
    n_quarantined: int = 0
    """In quarantine now; `counts` has how many were moved there."""
    read_nbytes_per_s: float = 0.0
    """Recent, checksums included; 0 while nothing has been read."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """writes, bytes_written, reads, bytes_read, deletes, evictions, bytes_evicted, missing,
    damaged, quarantined, read_faults, touches, stale_temps; those that are 0 may not be there."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Records not written, by reason."""


class Tier(Protocol):
    """Blocking; called from I/O threads only, by several of them at once."""

    def scan(self) -> Iterator[Entry | Gone]:
        """The first time everything that is stored, later what others added or took away since.

        What the caller itself wrote, deleted or was told of by `Stored` is not told again. Raises
        TierFault when not even looking is possible.
        """
        ...

    def write(self, header: Header, buffers: Sequence[Any]) -> Stored:
        """Keep a record. Room is made first: a tier is never over its limit, not for a moment.

        Raises Refused, TierFull, TierFault.
        """
        ...

    def read(self, name: Name, expect: KeyTokens | None = None) -> Loaded:
        """The record, verified: every byte, its name, and its tokens where they are given.

        Raises Missing, Damaged (it is gone then, too), TierFault.
        """
        ...

    def delete(self, name: Name) -> None:
        """Forget a record; one that is not there is no fault. Raises TierFault."""
        ...

    def touch(self, names: Iterable[Name]) -> None:
        """These were just used. Never raises for a record that is not there."""
        ...

    def usage(self) -> Usage:
        """Does not touch the disk, so it may be called from anywhere."""
        ...


OpenTier = Callable[[Path, int], Tier]


def discover() -> dict[str, OpenTier]:
    """How to open each kind of tier on a folder with a limit in bytes."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}").open_tier
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    }
