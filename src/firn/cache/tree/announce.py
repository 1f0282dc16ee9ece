"""What the tree tells a listener about the blocks that this server has. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from firn.core.keys import Key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A prompt can resume from a whole block here. parent None: it is the first of its chain."""

    key: Key
    parent: Key | None
    packed: bytes
    width: int
    """Bytes of each token in `packed`."""


@dataclass(frozen=True, slots=True)
class Removed:
    key: Key


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left of what was announced before."""


Announcement = StoredBlock | Removed | Cleared


class Announcer(Protocol):
    def announce(self, event: Announcement) -> None:
        """Called on the engine thread: must not wait."""
        ...

    def close(self) -> None: ...
