"""Rank 0's payloads, and what the other ranks hold in their place.

The tree is rank 0's alone: it decides what is kept, resumed and evicted. Each payload it makes has a
number, and the others are told how it was made, so that they make their slice of it in the same way; and
when it is dropped, they drop theirs. So whatever memory holds here, it holds everywhere, and a resume
from memory is a resume on all ranks.

Owner: the engine thread. Payloads may die on any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from firn.cache.arrays.payload import Payload
from firn.cache.codecs import At
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.core.ranks import Followers

Fill = tuple[str, list[int], int]
N_DROPPED = 512
"""Numbers in one call."""


class Mirror:
    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._serial = count(1)
        self._dropped: deque[int] = deque()
        self._fills: list[Fill] = []
        self.row_of: Callable[[Sequence[Any], int], int] = _nobody
        """The number of the row at a place of live layers; the runner knows."""

    def made(self, payload: Payload, how: str, *args: Any) -> MirroredPayload:
        """The others make theirs in this way."""
        number = next(self._serial)
        self._followers.tell_later(how, number, *args)
        return MirroredPayload(payload.stacks, payload.places, self, number)

    def arrived(self, payload: Payload, read: int) -> MirroredPayload:
        """It was read from a tier, as were the others' slices of it."""
        return self.made(payload, "arrive", read)

    def filled(self, part: Part, payloads: Sequence[Payload], n_tokens: int) -> None:
        self._fills.append((part.value, [number_of(p) for p in payloads], n_tokens))

    def take_fills(self) -> list[Fill]:
        fills, self._fills = self._fills, []
        return fills

    def drop(self, number: int) -> None:
        """Any thread, also in the midst of another call."""
        self._dropped.append(number)

    @property
    def is_over(self) -> bool:
        return self._followers.is_lost

    def tell_dropped(self) -> None:
        while self._dropped:
            n = min(len(self._dropped), N_DROPPED)
            self._followers.tell_later("drop", [self._dropped.popleft() for _ in range(n)])


@dataclass(frozen=True, eq=False)
class MirroredPayload(Payload):
    mirror: Mirror
    number: int

    def tokens(self, start: int, end: int) -> Payload:
        return self.mirror.made(super().tokens(start, end), "tokens", self.number, start, end)

    def copied(self) -> Payload:
        return self.mirror.made(super().copied(), "copied", self.number)

    def joined(self, others: Sequence[Payload]) -> Payload:
        numbers = [self.number, *map(number_of, others)]
        return self.mirror.made(super().joined(others), "joined", numbers)

    def __del__(self) -> None:
        self.mirror.drop(self.number)


def number_of(payload: Any) -> int:
    """Raises TypeError for what the others have no part of."""
    if not isinstance(payload, MirroredPayload):
        raise TypeError("a payload that the other ranks do not know of")
    return payload.number


@dataclass(frozen=True, slots=True)
class MirroredLayout(Layout):
    """Cuts and fills are told as they are made."""

    mirror: Mirror

    @classmethod
    def over(cls, layout: Layout, mirror: Mirror) -> MirroredLayout:
        return cls(layout.codecs, layout.text, layout.window, layout.smallest_window, mirror)

    @property
    def lies_in_rows(self) -> bool:
        """Records are cut at once: what lies in rows is not known by numbers."""
        return False

    def cut(self, part: Part, layers: Sequence[Any], at: At, start: int, end: int) -> Payload:
        payload = Layout.cut(self, part, layers, at, start, end)
        where = (self.mirror.row_of(layers, at.index), at.index, at.n_tokens)
        return self.mirror.made(payload, "cut", part.value, *where, start, end)

    def fill(
        self, part: Part, layers: Sequence[Any], payloads: Sequence[Any], n_tokens: int
    ) -> None:
        Layout.fill(self, part, layers, payloads, n_tokens)
        self.mirror.filled(part, payloads, n_tokens)


def _nobody(layers: Sequence[Any], index: int) -> int:
    raise LookupError("there are no rows yet")
