"""Records to store: small, chained like real ones, with bytes derived from their names.

`Direct` stores them in a tier as the cache does, packed and verified, but on the caller's thread.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from firn.cache.parts import Part
from firn.cache.storage.container import (
    Header,
    Loaded,
    Name,
    TensorSpec,
    TierEntry,
    derived_key,
)
from firn.cache.storage.faults import Damaged, Missing, TierFault
from firn.cache.storage.orders import ReadOrder, RootCleared, WriteOrder
from firn.cache.storage.places import places_of
from firn.cache.storage.seal import Seal
from firn.cache.storage.tier_records import TierRecords
from firn.cache.tiers import Gone, Tier, TierOptions, TierUsage, WriteResult
from firn.cache.tiers.ssd import SsdTier
from firn.core.keys import Key, root_key
from firn.core.values import Namespace
from tests.clocks import SetClock

FINGERPRINT = hashlib.sha256(b"a model").digest()
LAYOUT = "kv;bfloat16;block8;full"
BLOCK = 8
Layers = tuple[tuple[TensorSpec | None, ...], ...]
"""Each layer's slots. Every one that is not empty has a tensor of its own here."""
LAYERS: Layers = (
    (TensorSpec("BF16", (1, 2, BLOCK, 16)), TensorSpec("BF16", (1, 2, BLOCK, 16))),
    (TensorSpec("U32", (1, 2, BLOCK, 4)), None, TensorSpec("F16", (1, 2, BLOCK, 1))),
    (TensorSpec("F32", (0, 4)), TensorSpec("U8", (3,))),
)


@dataclass(frozen=True)
class Record:
    header: Header
    buffers: list[bytes]

    def __repr__(self) -> str:
        return f"<{self.header.key.hex()[:6]}.{self.header.part.value}>"

    @property
    def name(self) -> Name:
        return self.header.name

    def fetch(self) -> list[bytes]:
        return self.buffers


def root(namespace: str = "ns", fingerprint: bytes = FINGERPRINT) -> Key:
    return root_key(fingerprint=fingerprint, layout=LAYOUT, namespace=Namespace(namespace))


def tensors_of(layers: Layers) -> tuple[TensorSpec, ...]:
    """Stacks of one."""
    present = (spec for slots in layers for spec in slots if spec is not None)
    return tuple(TensorSpec(spec.dtype, (1, *spec.shape)) for spec in present)


def distinct(layers: Layers) -> tuple[tuple[int | None, ...], ...]:
    numbers = itertools.count()
    return tuple(
        tuple(None if spec is None else next(numbers) for spec in slots) for slots in layers
    )


def header(
    tokens: Sequence[int] = range(BLOCK),
    *,
    parent: Record | None = None,
    part: Part = Part.PAGES,
    layers: Layers = LAYERS,
    namespace: str = "ns",
    fingerprint: bytes = FINGERPRINT,
    mark: int = 2,
) -> Header:
    top = root(namespace, fingerprint)
    above = top if parent is None else parent.header.key
    values = np.array(list(tokens), dtype=np.uint64)
    made = Header(
        key=above,
        parent=above,
        root=top,
        part=part,
        start=0 if parent is None else parent.header.start + len(parent.header.tokens),
        tokens=values,
        fingerprint=fingerprint,
        namespace=hashlib.sha256(namespace.encode()).hexdigest(),
        layout=LAYOUT,
        tensors=tensors_of(layers),
        places=places_of(distinct(layers)),
        created=1_700_000_000.25,
        mark=mark,
    )
    return replace(made, key=derived_key(made, above))


def record(tokens: Sequence[int] = range(BLOCK), **more: Any) -> Record:
    made = header(tokens, **more)
    return Record(made, fill(made))


def fill(header: Header) -> list[bytes]:
    """Bytes that no other record has."""
    seed = header.key + header.part.value.encode()
    buffers: list[bytes] = []
    for i, spec in enumerate(header.tensors):
        piece = hashlib.shake_128(seed + bytes([i % 256])).digest(4096)
        buffers.append((piece * (spec.nbytes // len(piece) + 1))[: spec.nbytes])
    return buffers


def of_size(nbytes: int, n: int = 0, **more: Any) -> Record:
    """The n-th record with a single tensor of `nbytes` bytes."""
    layers: Layers = ((TensorSpec("U8", (nbytes,)),),)
    tokens = more.pop("tokens", range(n * BLOCK, n * BLOCK + BLOCK))
    return record(tokens, layers=layers, **more)


def chain(n: int, *, first: int = 0, nbytes: int | None = None) -> list[Record]:
    """n blocks of pages, each the parent of the next."""
    records: list[Record] = []
    for i in range(n):
        above = records[-1] if records else None
        tokens = range(first + i * BLOCK, first + (i + 1) * BLOCK)
        layers = LAYERS if nbytes is None else ((TensorSpec("U8", (nbytes,)),),)
        records.append(record(tokens, parent=above, layers=layers))
    return records


def beside(pages: Record, part: Part) -> Record:
    """Another part of the same block."""
    made = replace(pages.header, part=part)
    return Record(made, fill(made))


class Direct:
    """Writes records to a tier and reads them back. Raises its faults."""

    def __init__(
        self, tier: Tier, *, seal: Seal | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self.tier = tier
        self.records = TierRecords(tier, seal=seal)
        self.wall = wall

    def write(self, one: Record, *, used_at: float | None = None) -> WriteResult[Name]:
        at = self.stamp(one) if used_at is None else used_at
        return self.records.write(WriteOrder(one.header, one, at))

    def stamp(self, one: Record) -> float:
        """As the tree stamps: a child below its parent, a state below its pages."""
        depth = one.header.start // BLOCK
        return self.wall() - 4.0 * depth - 2.0 * (one.header.part is not Part.PAGES)

    def read(self, one: Record) -> Loaded:
        return self.records.read(ReadOrder(one.name, one.header.tokens))

    def scan(self) -> list[TierEntry | Gone[Name] | RootCleared]:
        return [change for some in self.records.scan() for change in some]

    def names(self) -> set[Name]:
        """What a scan finds."""
        return {e.name for e in self.scan() if isinstance(e, TierEntry)}

    def delete(self, one: Record) -> None:
        self.tier.delete(str(one.name))

    def touch(self, records: Iterable[Record], *, at: float | None = None) -> None:
        self.tier.touch({str(r.name): self.stamp(r) if at is None else at for r in records})

    def usage(self) -> TierUsage:
        return self.records.usage()

    def holds(self, one: Record) -> bool:
        """Whether it comes back, bit for bit. Anything else that comes back is a failure."""
        try:
            loaded = self.read(one)
        except (Missing, Damaged, TierFault):
            return False
        assert_same(loaded.header, one.header)
        assert [bytes(b) for b in loaded.buffers] == one.buffers
        return True


class Folder(Direct):
    """`Direct` on an SSD tier."""

    tier: SsdTier

    def __init__(
        self,
        folder: Path,
        limit_nbytes: int = 64 << 20,
        *,
        write_budget_nbytes: int | None = None,
        seal: Seal | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        **more: Any,
    ) -> None:
        options = TierOptions(str(folder), limit_nbytes, write_budget_nbytes)
        tier = SsdTier(options, clock=SetClock(clock, wall), **more)
        super().__init__(tier, seal=seal, wall=wall)

    def evict_to(self, nbytes: int) -> int:
        return self.tier.evict_to(nbytes)


def assert_same(a: Header, b: Header) -> None:
    assert a == b
    assert np.array_equal(a.tokens, b.tokens)
    assert a.tokens.dtype == b.tokens.dtype == np.uint64
