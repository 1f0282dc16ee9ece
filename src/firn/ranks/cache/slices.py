"""A follower's slices of rank 0's records: payloads by number in memory, files by name in its tier.

A follower decides nothing. It reports what it has written, read, seen and evicted, from which rank
0 knows which records all ranks have. `on_x` handles rank 0's call `x`; on_poll its own.

Owner: the follower's main thread, which makes and frees every array here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firn.cache.arrays.host import PayloadBytes, from_host, to_host
from firn.cache.arrays.payload import Payload, evaluate, joined
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.storage.container import Header, Loaded, Name, TierEntry
from firn.cache.storage.faults import Refused, TierError
from firn.cache.storage.orders import (
    Changes,
    DeleteOrder,
    ReadOrder,
    ReadOver,
    ScanBatch,
    ScanEnded,
    ScanOrder,
    TouchOrder,
    Worker,
    WriteOrder,
    WriteOver,
)
from firn.cache.tiers import Gone, WriteResult
from firn.core.keys import Key
from firn.core.ports import At, LayerCache
from firn.ranks.cache.mirror import Fill
from firn.ranks.cache.worker import REFUSED

Answer = Callable[..., None]


@dataclass(frozen=True, slots=True)
class SlicedPrefix:
    """Implements core.ports.Restored."""

    layout: Layout
    pieces: Sequence[tuple[Part, Sequence[Payload]]]
    n_tokens: int
    nbytes: int = 0

    def fill(self, layers: list[LayerCache]) -> None:
        for part, payloads in self.pieces:
            self.layout.fill(part, layers, payloads, self.n_tokens)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that this rank's records carry in their headers."""

    fingerprint: bytes
    layout: str


class Slices:
    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        *,
        answer: Answer,
        worker: Worker | None = None,
    ) -> None:
        """answer: sends rank 0 an answer. worker: of this rank's tier; None: it has none."""
        self._layout = layout
        self._identity = identity
        self._answer = answer
        self._worker = worker
        self._payloads: dict[int, Payload] = {}
        self._fresh: dict[int, Payload] = {}
        """Payloads that are not computed yet."""
        self._lent: dict[WriteOrder, tuple[int, PayloadBytes]] = {}
        """Each write's number, and the arrays that are being written."""
        self._reads: dict[ReadOrder, int] = {}
        """Each read's number."""
        self._loaded: dict[int, Loaded] = {}
        """What was read and rank 0 has not taken yet, by the read's number."""

    # --- payloads --------------------------------------------------------------------------

    def on_cut(
        self, layers: Sequence[LayerCache], number: int, part: str, at: At, start: int, end: int
    ) -> None:
        self._keep(number, self._layout.cut(Part(part), layers, at, start, end))

    def on_tokens(self, number: int, of: int, start: int, end: int) -> None:
        self._keep(number, self._payloads[of].tokens(start, end))

    def on_copied(self, number: int, of: int) -> None:
        self._keep(number, self._payloads[of].copied())

    def on_joined(self, number: int, parts: Sequence[int]) -> None:
        self._keep(number, joined([self._payloads[n] for n in parts]))

    def on_arrive(self, number: int, read: int) -> None:
        header, buffers = self._loaded.pop(read)
        self._payloads[number] = from_host(header.tensors, header.places, buffers)

    def on_drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._payloads.pop(number, None)
            self._fresh.pop(number, None)

    def _keep(self, number: int, payload: Payload) -> None:
        self._payloads[number] = self._fresh[number] = payload

    def compute(self) -> None:
        """Called before a row continues.

        A copy still pending would make the row's next write copy its whole buffer.
        """
        if self._fresh:
            evaluate(self._fresh.values())
            self._fresh.clear()

    def prefix(self, fills: Sequence[Fill], n_tokens: int) -> SlicedPrefix:
        """What rank 0 has filled a new row with, of this rank's slices."""
        pieces = [(Part(part), [self._payloads[n] for n in numbers]) for part, numbers, _ in fills]
        return SlicedPrefix(self._layout, pieces, n_tokens)

    # --- writing ---------------------------------------------------------------------------

    def on_write(
        self, serial: int, number: int, used_at: float, fields: dict[str, Any], tokens: bytes
    ) -> None:
        assert self._worker is not None
        self.compute()
        lent = to_host(self._payloads[number])
        order = WriteOrder(self._header(fields, tokens, lent), lent, used_at)
        if self._worker.submit(order):
            self._lent[order] = serial, lent
        else:
            self._answer("written", serial, [REFUSED, "write queue full"], [])

    def _written(self, order: WriteOrder, result: WriteResult[Name] | TierError) -> None:
        serial, _ = self._lent.pop(order)
        if isinstance(result, WriteResult):
            self._answer("written", serial, None, [str(name) for name in result.evicted])
            return
        kind = REFUSED if isinstance(result, Refused) else "fault"
        self._answer("written", serial, [kind, result.reason], [])

    def _header(self, fields: dict[str, Any], tokens: bytes, lent: PayloadBytes) -> Header:
        return Header(
            key=Key(bytes.fromhex(fields["key"])),
            parent=Key(bytes.fromhex(fields["parent"])),
            root=Key(bytes.fromhex(fields["root"])),
            part=Part(fields["part"]),
            start=fields["start"],
            fingerprint=self._identity.fingerprint,
            namespace=fields["namespace"],
            created=fields["created"],
            mark=fields["mark"],
            tokens=np.frombuffer(tokens, dtype="<u8"),
            layout=self._identity.layout,
            tensors=lent.tensors,
            places=lent.places,
        )

    # --- reading ---------------------------------------------------------------------------

    def on_read(self, serial: int, name: str, tokens: bytes) -> None:
        parsed = Name.parse(name)
        assert self._worker is not None
        assert parsed is not None
        order = ReadOrder(parsed, np.frombuffer(tokens, dtype="<u8"))
        self._reads[order] = serial
        self._worker.submit(order)

    def _read(self, order: ReadOrder, result: Loaded | TierError) -> None:
        serial = self._reads.pop(order)
        if isinstance(result, TierError):
            self._answer("read", serial, result.reason)
        elif result.header.layout != self._identity.layout:
            self._answer("read", serial, "another rank's slice")
        else:
            self._loaded[serial] = result
            self._answer("read", serial, "")

    def on_discard_read(self, serial: int) -> None:
        self._loaded.pop(serial, None)

    # --- what there is ---------------------------------------------------------------------

    def on_scan(self) -> None:
        if self._worker is None:
            self._answer("scanned")
        else:
            self._worker.submit(ScanOrder())

    def _seen(self, changes: Changes) -> None:
        gone = [str(c.name) for c in changes if isinstance(c, Gone)]
        there = [
            str(c.name)
            for c in changes
            if isinstance(c, TierEntry) and c.label.layout == self._identity.layout
        ]
        self._answer("seen", there, gone)

    def on_delete(self, names: Sequence[str]) -> None:
        if self._worker is not None:
            self._worker.submit(DeleteOrder([n for text in names if (n := Name.parse(text))]))

    def on_touch(self, stamps: dict[str, float]) -> None:
        if self._worker is not None:
            known = {n: at for text, at in stamps.items() if (n := Name.parse(text))}
            self._worker.submit(TouchOrder(known))

    def on_defer(self, defer: bool) -> None:
        if self._worker is not None:
            self._worker.defer_writes(defer)

    def on_poll(self) -> None:
        """The tier has done something: tell rank 0."""
        while self._worker is not None and (outcome := self._worker.poll()) is not None:
            match outcome:
                case WriteOver(order, result):
                    self._written(order, result)
                case ReadOver(order, result):
                    self._read(order, result)
                case ScanEnded():
                    self._answer("scanned")
                case ScanBatch(changes):
                    self._seen(changes)

    def close(self) -> None:
        """Write what is queued, in bounded time."""
        if self._worker is not None:
            self._worker.close()
