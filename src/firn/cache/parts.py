"""The three ways in which a layer's state is cut into records, and what a model needs to resume."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    __hash__ = object.__hash__  # every record is looked up by its part: Enum's own is in Python
    PAGES = "pages"
    """The layer's slice of a block; every block before the resume point is needed."""
    WINDOW = "window"
    """The layer's slice of a block; those that overlap the window before the resume point are needed."""
    STATE = "state"
    """The whole state at one position; exactly the one at the resume point is needed."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model must find at position p to resume there."""

    pages: bool
    window: int
    """Tokens before p that window layers attend to; 0: there are no such layers."""
    state: bool
    grid: int = 1
    """Resume only at multiples of this: 1, or the prefill chunk in exact mode."""

    @property
    def by_block(self) -> tuple[Part, ...]:
        """The parts that every block of a prompt has. The first carries the chain."""
        wanted = {Part.PAGES: self.pages, Part.WINDOW: bool(self.window)}
        return tuple(part for part in wanted if wanted[part])
