"""Where each layer's arrays are in a record, which stacks those of one dtype and shape. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

Places = tuple[tuple[tuple[int, int] | None, ...], ...]
"""For each layer and each of its slots: (stack, entry of the stack), or None for an empty slot."""


@lru_cache(maxsize=64)
def places_of(kinds: tuple[tuple[Hashable | None, ...], ...]) -> Places:
    """The places of arrays of these kinds: those of one kind form one stack, in order."""
    numbers: dict[Hashable, int] = {}
    counts: list[int] = []

    def place(kind: Hashable | None) -> tuple[int, int] | None:
        if kind is None:
            return None
        stack = numbers.setdefault(kind, len(numbers))
        if stack == len(counts):
            counts.append(0)
        counts[stack] += 1
        return stack, counts[stack] - 1

    return tuple(tuple(place(kind) for kind in slots) for slots in kinds)


def to_text(places: Places) -> str:
    """The stack of each slot, layer by layer; entries follow from order.  # "0 0;0 0;1 -" """
    return ";".join(" ".join("-" if at is None else str(at[0]) for at in slots) for slots in places)


def from_text(text: str) -> Places:
    """Raises ValueError."""
    layers = text.split(";") if text else []
    return places_of(
        tuple(tuple(None if s == "-" else int(s) for s in slots.split()) for slots in layers)
    )
