"""What the tree tells those who want to know which blocks a server has. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from firn.core.keys import Key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A whole block can be resumed from here. parent None: it is the first. text: as in a node."""

    key: Key
    parent: Key | None
    text: bytes
    width: int


@dataclass(frozen=True, slots=True)
class Removed:
    key: Key


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left of what was announced so far."""


Announcement = StoredBlock | Removed | Cleared


class Announcer(Protocol):
    def announce(self, event: Announcement) -> None:
        """On the engine thread: must not wait."""
        ...

    def close(self) -> None: ...
