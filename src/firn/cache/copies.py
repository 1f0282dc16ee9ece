"""Copies out of rows, which records hold from then on.

A copy is lazy until it is computed, and must be computed before the row continues. Where the engine
does not wait for them, the copies of all rows of a step are computed in one dispatch:

    with together:  commit, commit, end of a row   ->   one dispatch

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from firn.cache.arrays.payload import Payload, copies_are_awaited, evaluate
from firn.cache.records import Records
from firn.cache.tree import Record


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _CopyOrder:
    """Records whose copies must be computed, and callbacks for the outcome."""

    records: Sequence[Record]
    done: Callable[[], None]
    failed: Callable[[], None]


class Copies:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._waiting: list[_CopyOrder] | None = None
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
                self._compute_late(orders)

    def _compute_late(self, orders: Sequence[_CopyOrder]) -> None:
        try:
            self._compute(orders)
        except Exception as e:
            self._records.failed("commit", e)

    def compute(
        self,
        records: Sequence[Record],
        *,
        done: Callable[[], None] = _nothing,
        failed: Callable[[], None] = _nothing,
    ) -> None:
        """Compute what these records hold. If that fails they are taken back, and the error is
        raised unless the computation was deferred (see `together`)."""
        order = _CopyOrder(records, done, failed)
        if self._waiting is None:
            self._compute([order])
        elif records:
            self._waiting.append(order)

    def _compute(self, orders: Sequence[_CopyOrder]) -> None:
        records = [record for order in orders for record in order.records]
        try:
            evaluate(r.arrays for r in records if isinstance(r.arrays, Payload))
        except Exception:
            self._records.take_back(records)
            for order in orders:
                order.failed()
            raise
        for order in orders:
            order.done()
