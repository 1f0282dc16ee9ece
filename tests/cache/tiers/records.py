"""Records to store: small, chained like real ones, with bytes that follow from their names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from firn.cache.container import Header, Layers, TensorSpec
from firn.cache.parts import Part
from firn.cache.tiers import Name, Tier, name_of
from firn.core.keys import Key, child_key, root_key
from firn.core.values import Namespace

FINGERPRINT = hashlib.sha256(b"a model").digest()
LAYOUT = "kv;bfloat16;block8;full"
BLOCK = 8
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
        return name_of(self.header)


def root(namespace: str = "ns", fingerprint: bytes = FINGERPRINT) -> Key:
    return root_key(fingerprint=fingerprint, layout=LAYOUT, namespace=Namespace(namespace))


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
    return Header(
        key=child_key(above, values),
        parent=above,
        root=top,
        part=part,
        start=0 if parent is None else parent.header.start + len(parent.header.tokens),
        tokens=values,
        fingerprint=fingerprint,
        namespace=hashlib.sha256(namespace.encode()).hexdigest(),
        layout=LAYOUT,
        layers=layers,
        created=1_700_000_000.25,
        mark=mark,
    )


def record(tokens: Sequence[int] = range(BLOCK), **more: Any) -> Record:
    made = header(tokens, **more)
    return Record(made, fill(made))


def fill(header: Header) -> list[bytes]:
    """Bytes that no other record has."""
    seed = header.key + header.part.value.encode()
    found: list[bytes] = []
    for i, spec in enumerate(header.specs):
        piece = hashlib.shake_128(seed + bytes([i % 256])).digest(4096)
        found.append((piece * (spec.nbytes // len(piece) + 1))[: spec.nbytes])
    return found


def of_size(nbytes: int, n: int = 0, **more: Any) -> Record:
    """A record with one tensor of so many bytes, the n-th of its kind."""
    layers: Layers = ((TensorSpec("U8", (nbytes,)),),)
    return record(range(n * BLOCK, n * BLOCK + BLOCK), layers=layers, **more)


def chain(n: int, *, first: int = 0, nbytes: int | None = None) -> list[Record]:
    """n blocks of pages, each the parent of the next."""
    found: list[Record] = []
    for i in range(n):
        above = found[-1] if found else None
        tokens = range(first + i * BLOCK, first + (i + 1) * BLOCK)
        layers = LAYERS if nbytes is None else ((TensorSpec("U8", (nbytes,)),),)
        found.append(record(tokens, parent=above, layers=layers))
    return found


def beside(pages: Record, part: Part) -> Record:
    """Another part of the same block."""
    made = replace(pages.header, part=part)
    return Record(made, fill(made))


def holds(tier: Tier, one: Record) -> bool:
    """Whether the tier gives it back, bit for bit. Anything else it may give back is a failure."""
    from firn.cache.faults import Damaged, Missing

    try:
        loaded = tier.read(one.name, one.header.tokens)
    except (Missing, Damaged):
        return False
    assert_same(loaded.header, one.header)
    assert [bytes(b) for b in loaded.buffers] == one.buffers
    return True


def assert_same(a: Header, b: Header) -> None:
    assert a == b
    assert np.array_equal(a.tokens, b.tokens)
    assert a.tokens.dtype == b.tokens.dtype == np.uint64
