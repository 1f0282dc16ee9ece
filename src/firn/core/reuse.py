"""Why a prompt reused what it did and no more. Values; only what people read is English."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """The value is how people read it, and the label under which it is counted."""

    NO_CACHE = "no cache"
    SWITCHED_OFF = "reading off"
    COLD = "cold"
    NEW = "new"
    """All that is stored of it was reused, and ends there."""
    DIVERGED = "diverged"
    """Something stored goes on differently there."""
    EVICTED = "evicted"
    NO_STATE = "no state checkpoint"
    OFF_THE_GRID = "whole chunks only"
    NOT_YET = "not yet loaded"
    SLOWER = "slower to load"
    NO_ANSWER = "a store did not answer"
    DAMAGED = "damaged"
    READ_FAILED = "read failed"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Reason:
    cause: Cause
    at: int | None = None
    """The first token with which nothing stored goes on: of NEW and DIVERGED."""

    def __str__(self) -> str:
        if self.at is None:
            return self.cause.value
        return f"{'new from' if self.cause is Cause.NEW else 'diverged at'} token {self.at}"
