"""Copies out of rows, which records hold from then on.

A copy is lazy until it is computed, and must be computed before the row continues. Where the engine
does not wait for them, the copies of all rows of a step are computed in one dispatch:

    with together:  commit, commit, end of a row   ->   one dispatch

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from firn.cache.arrays.payload import Payload, copies_are_awaited, evaluate
from firn.cache.records import Records
from firn.cache.tree import Record


@dataclass(eq=False, slots=True)
class CopyOrder:
    """Records whose copies must be computed. Written by `Copies`."""

    records: Sequence[Record]
    are_new: bool = True
    """They were just committed: once computed they may be spilled."""
    has_failed: bool = False
    """They could not be computed, and were taken back."""


class Copies:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._waiting: list[CopyOrder] | None = None
        """None: each order is computed immediately."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute what is ordered in this context when it ends. Not where copies are awaited: there
        it would only keep the copies of all rows in memory at the same time."""
        if copies_are_awaited() or self._waiting is not None:
            yield
            return
        self._waiting = []
        try:
            yield
        finally:
            orders, self._waiting = self._waiting, None
            if orders:
                with self._records.absorbing("commit"):
                    self._compute(orders)

    def compute(self, order: CopyOrder) -> None:
        """Compute what these records hold. If that fails they are taken back, and the error is
        raised unless the computation was deferred (see `together`)."""
        if self._waiting is None:
            self._compute([order])
        elif order.records:
            self._waiting.append(order)

    def _compute(self, orders: Sequence[CopyOrder]) -> None:
        records = [record for order in orders for record in order.records]
        try:
            evaluate(r.arrays for r in records if isinstance(r.arrays, Payload))
        except Exception:
            self._records.take_back(records)
            for order in orders:
                order.has_failed = True
            raise
        for order in orders:
            if order.are_new:
                self._records.committed([r for r in order.records if r.alive])
