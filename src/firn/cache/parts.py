"""The three ways in which model state is cut, and what a model needs of each to resume."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    PAGES = "pages"
    """The layer's slice of a block; every block before the resume point is needed."""
    WINDOW = "window"
    """Likewise, but only blocks that overlap the window before the resume point are needed."""
    STATE = "state"
    """The whole state at one position; exactly the one at the resume point is needed."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model must find at position p to resume there."""

    pages: bool
    window: int
    """Tokens before p that window layers look back on; 0 for no such layers."""
    state: bool
    grid: int = 1
    """Resume only at multiples of this: 1, or the prefill chunk in exact mode."""

    @property
    def by_block(self) -> tuple[Part, ...]:
        """The parts that every block of a prompt gets."""
        found = []
        if self.pages:
            found.append(Part.PAGES)
        if self.window:
            found.append(Part.WINDOW)
        return tuple(found)
