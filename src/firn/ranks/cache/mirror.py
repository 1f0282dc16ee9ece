"""Rank 0's payloads, and the slices that the other ranks hold of them.

Only rank 0 has a tree: it decides what is kept, resumed and evicted. Each payload that it makes is
numbered, and the others are told how it was made, so that they make their slices in the same way;
when it is dropped, they drop theirs. So memory holds the same records on all ranks, and all of them
can resume from it.

Owner: the engine thread. Payloads may be dropped on any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from firn.cache.arrays.payload import Payload
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.core.ports import At, LayerCache
from firn.ranks.calls import Followers

Fill = tuple[str, list[int], int]
"""A part, the numbers of the payloads that filled it, and the row's tokens after that."""
N_DROPPED = 512
"""The most numbers in one call."""


class Mirror:
    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._serial = count(1)
        self._dropped: deque[int] = deque()
        self._fills: list[Fill] = []
        self.row_of: Callable[[Sequence[LayerCache], int], int] = _nobody
        """The number of the row at this index of live layers. The runner sets it."""

    def made(self, payload: Payload, how: str, *args: Any) -> MirroredPayload:
        """Number a payload; `how` and `args` are the call by which the others make theirs."""
        number = next(self._serial)
        self._followers.tell_later(how, number, *args)
        return MirroredPayload(payload.stacks, payload.places, self, number)

    def arrived(self, payload: Payload, read: int) -> MirroredPayload:
        """Number a payload that all ranks read from their tiers. read: the number of that read."""
        return self.made(payload, "arrive", read)

    def filled(self, part: Part, payloads: Sequence[Payload], n_tokens: int) -> None:
        self._fills.append((part.value, [number_of(p) for p in payloads], n_tokens))

    def take_fills(self) -> list[Fill]:
        fills, self._fills = self._fills, []
        return fills

    def drop(self, number: int) -> None:
        """Called on any thread, even in the middle of another call."""
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
    """A payload of which the other ranks hold slices, under the same number."""

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
    """Raises TypeError for a payload that the others have no slices of."""
    if not isinstance(payload, MirroredPayload):
        raise TypeError("a payload that the other ranks do not know of")
    return payload.number


@dataclass(frozen=True, slots=True)
class MirroredLayout(Layout):
    """A layout that tells the other ranks of each cut and fill."""

    mirror: Mirror

    @classmethod
    def over(cls, layout: Layout, mirror: Mirror) -> MirroredLayout:
        return cls(layout.codecs, layout.text, layout.window, layout.smallest_window, mirror)

    @property
    def can_keep_pages_in_rows(self) -> bool:
        """False: records are cut immediately, because pages left in rows have no numbers."""
        return False

    def cut(
        self, part: Part, layers: Sequence[LayerCache], at: At, start: int, end: int
    ) -> Payload:
        payload = Layout.cut(self, part, layers, at, start, end)
        where = (self.mirror.row_of(layers, at.index), at.index, at.n_tokens)
        return self.mirror.made(payload, "cut", part.value, *where, start, end)

    def fill(
        self, part: Part, layers: Sequence[LayerCache], payloads: Sequence[Any], n_tokens: int
    ) -> None:
        Layout.fill(self, part, layers, payloads, n_tokens)
        self.mirror.filled(part, payloads, n_tokens)


def _nobody(layers: Sequence[LayerCache], index: int) -> int:
    raise LookupError("there are no rows yet")
