"""One record as bytes: a self-describing safetensors file in which a checksum covers every byte.

    0        u64 little-endian n: the length of the JSON
    8        {"__metadata__":{"firn":"2","meta":N,...,"sum":S},"0":{"dtype":..},"1":..}   padded
    8 + n    the tensors, one after another; `places` maps each layer's slots to entries of tensors

`meta` is the length of the metadata object and `sum` its checksum, so a scan reads and parses a few
hundred bytes and no tensor entries. The metadata holds the checksums of everything else: `entries`
for the JSON after it, `sums` for the tensors; and `nbytes`, the length of the data. The
`safetensors` library can read such a file.

An encrypted record is a safetensors file, too: its metadata lacks tokens and layout, `head` is the
whole JSON above, sealed, and its only tensor, `body`, consists of sealed pieces.

Functions over bytes, and at the end two that read them from a tier. They hash, so they belong on I/O
threads.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from firn.cache.parts import Part
from firn.cache.storage import places as _places
from firn.cache.storage.faults import Damaged, Foreign, Locked, NotEncrypted
from firn.cache.storage.places import Places
from firn.cache.storage.seal import PIECE_NBYTES, SALT_NBYTES, TAG_NBYTES, RecordCipher, Seal
from firn.cache.tiers import Buffer, ScannedRecord, Tier
from firn.core.keys import Key, child_key
from firn.core.values import KeyTokens, PackedTokens

VERSION = "2"
ALIGN = 64
ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Name(NamedTuple):
    """A record's name, the same in every tier: `<key>.<part>`."""

    key: Key
    part: Part

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.part.value}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None: not the name of a record of this version."""
        key, _, part = text.partition(".")
        try:
            return cls(Key(bytes.fromhex(key)), Part(part)) if len(key) == 64 else None
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: str
    """A safetensors code: BF16, U32, ..."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_NBYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What any process can read of a record, even without the encryption key."""

    key: Key
    parent: Key
    root: Key
    part: Part
    start: int
    fingerprint: bytes
    namespace: str
    created: float
    mark: int

    @property
    def name(self) -> Name:
        return Name(self.key, self.part)

    @property
    def above(self) -> Key | None:
        """The block before this one; None at the beginning of a chain."""
        return None if self.start == 0 or self.parent == self.root else self.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Tag):
    """What a scan reads: enough to put the record into the tree."""

    tokens: KeyTokens = field(compare=False, repr=False)
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Label):
    """Everything about a record except its bytes. Its tokens are [start, start + len(tokens))."""

    tensors: tuple[TensorSpec, ...]
    places: Places


class Packed(NamedTuple):
    """A record's bytes, in pieces to be written one after another."""

    pieces: list[Buffer]
    nbytes: int


class Loaded(NamedTuple):
    """A record that was read and verified."""

    header: Header
    buffers: list[memoryview]
    """One for each of `header.tensors`: views of one buffer."""


_BLOCK = re.compile(r"\bblock(\d+)\b")


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A record that a tier has, as a scan or a store reports it."""

    label: Label
    nbytes: int
    used_at: float
    """Unix time."""
    tokens: PackedTokens
    """The label's tokens, packed on the I/O thread to save the engine's time."""

    @property
    def name(self) -> Name:
        return self.label.name


def derived_key(label: Label, parent: Key) -> Key:
    """The key derived from the tokens. A record that begins at 0 may span many blocks."""
    step = max(len(label.tokens), 1)
    if label.parent == label.root and (match := _BLOCK.search(label.layout)):
        step = int(match[1])
    key = parent
    for at in range(0, len(label.tokens), step):
        key = child_key(key, label.tokens[at : at + step])
    return key


# --- packing -------------------------------------------------------------------------------


def pack(header: Header, buffers: Sequence[Buffer], *, seal: Seal | None = None) -> Packed:
    """The record's bytes, in pieces. Tensors are not copied unless they are encrypted."""
    views = [flat(b) for b in buffers]
    sizes = [spec.nbytes for spec in header.tensors]
    if [len(v) for v in views] != sizes:
        raise ValueError(f"{len(views)} buffers do not fit the {len(sizes)} tensors of the header")
    entries = _entries(header.tensors)
    fields = _tag_fields(header) | {
        "layout": header.layout,
        **_token_fields(header.tokens),
        "places": _places.to_text(header.places),
        "nbytes": str(sum(sizes)),
        "entries": xxhash.xxh3_128_hexdigest(entries),
        "sums": "".join(xxhash.xxh3_64_hexdigest(v) for v in views),
    }
    text = _PREFIX + _metadata(fields) + entries
    if seal is not None:
        return _sealed(header, text, views, seal)
    return _framed(text, views)


def flat(buffer: Buffer) -> memoryview:
    """The buffer as a flat view of bytes."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


_PREFIX = b'{"__metadata__":'
_START = _PREFIX + b'{"firn":"'
_VERSION_START = _START + VERSION.encode() + b'","meta":"'
_META_DIGITS = 10
_SUM_START = b',"sum":"'
_SUM_NBYTES = len(_SUM_START) + 32 + 2


def _tag_fields(tag: Tag) -> dict[str, str]:
    return {
        "key": tag.key.hex(),
        "part": tag.part.value,
        "parent": tag.parent.hex(),
        "root": tag.root.hex(),
        "start": str(tag.start),
        "fingerprint": tag.fingerprint.hex(),
        "namespace": tag.namespace,
        "created": repr(tag.created),
        "mark": str(tag.mark),
    }


def _token_fields(tokens: KeyTokens) -> dict[str, str]:
    """Token ids fit in 32 bits; only the digests that stand for pictures need 64."""
    narrow = not len(tokens) or int(tokens.max()) < 1 << 32
    raw = tokens.astype("<u4" if narrow else "<u8").tobytes()
    return {
        "tokens": base64.b64encode(raw).decode(),
        "token_nbytes": "4" if narrow else "8",
    }


def _entries(tensors: Sequence[TensorSpec]) -> bytes:
    """The JSON after the metadata."""
    entries: list[str] = []
    offset = 0
    for i, spec in enumerate(tensors):
        entries.append(_entry(str(i), spec, offset, offset + spec.nbytes))
        offset += spec.nbytes
    return ("".join(entries) + "}").encode()


def _entry(name: str, spec: TensorSpec, start: int, end: int) -> str:
    shape = ",".join(map(str, spec.shape))
    offsets = f"[{start},{end}]"
    return f',"{name}":{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":{offsets}}}'


def _metadata(fields: dict[str, str]) -> bytes:
    head = {"firn": VERSION, "meta": "0" * _META_DIGITS}
    text = json.dumps(head | fields, separators=(",", ":"))[:-1].encode()
    at = len(_VERSION_START) - len(_PREFIX)
    length = b"%0*d" % (_META_DIGITS, len(text) + _SUM_NBYTES)
    text = text[:at] + length + text[at + _META_DIGITS :]
    return text + _SUM_START + xxhash.xxh3_128_hexdigest(text).encode() + b'"}'


def _framed(text: bytes, data: Sequence[Buffer]) -> Packed:
    """Safetensors allows spaces after the JSON; they align the data."""
    text += b" " * (-(8 + len(text)) % ALIGN)
    head = struct.pack("<Q", len(text)) + text
    return Packed([head, *data], len(head) + sum(len(d) for d in data))


def _sealed(tag: Tag, text: bytes, views: Sequence[memoryview], seal: Seal) -> Packed:
    salt = os.urandom(SALT_NBYTES)
    cipher = seal.cipher(salt)
    body = [cipher.seal(i, piece) for i, piece in _pieces(views)]
    n_body = sum(len(b) for b in body)
    entries = (_entry("body", TensorSpec("U8", (n_body,)), 0, n_body) + "}").encode()
    plain = _tag_fields(tag) | {
        "nbytes": str(n_body),
        "entries": xxhash.xxh3_128_hexdigest(entries),
        "cipher": "AES-256-GCM",
        "key_id": seal.id,
        "salt": salt.hex(),
    }
    head = base64.b64encode(cipher.seal(0, text, _bound(plain))).decode()
    return _framed(_PREFIX + _metadata(plain | {"head": head}) + entries, body)


def _pieces(views: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Each tensor in pieces of bounded size, numbered from 1."""
    index = 0
    for view in views:
        for at in range(0, len(view), PIECE_NBYTES):
            index += 1
            yield index, view[at : at + PIECE_NBYTES]


def _bound(plain: dict[str, str]) -> bytes:
    """The fields that the sealed head authenticates: if one is changed, the head cannot be opened."""
    return json.dumps({k: plain[k] for k in sorted(plain) if k != "head"}).encode()


# --- reading -------------------------------------------------------------------------------


def head_nbytes(head: Buffer, nbytes: int) -> int:
    """How many of a record's first bytes `read_header` needs; `head` has some of its `nbytes`.

    Raises Damaged or Foreign.
    """
    first = bytes(head)
    return 8 + len(_PREFIX) + _meta_nbytes(first[8:], _text_nbytes(first, nbytes))


def read_header(head: Buffer, nbytes: int, *, seal: Seal | None = None) -> Tag:
    """What a scan needs, from the first bytes of a record of `nbytes`. Tensors are not read.

    Returns a Label, or only a Tag if the record is encrypted with another key. Raises Damaged or
    Foreign.
    """
    first = bytes(head)
    n_text = _text_nbytes(first, nbytes)
    fields, _ = _fields(first[8:], n_text)
    try:
        if 8 + n_text + int(fields["nbytes"]) != nbytes:
            raise Damaged("wrong length", f"{nbytes} bytes")
        if "cipher" not in fields:
            return _label(_plain(fields, seal))
        if seal is None or seal.id != fields["key_id"]:
            return _tag(fields)
        text = _open_head(fields, seal.cipher(bytes.fromhex(fields["salt"])))
        return _label(_fields(text, len(text))[0])
    except (ValueError, KeyError, TypeError) as e:
        raise Damaged("unreadable header", str(e)) from e


def unpack(buffer: Buffer, *, seal: Seal | None = None) -> Loaded:
    """The record in these bytes, with every checksum and length verified.

    Tensors are not copied unless they are encrypted. Raises Damaged, Foreign, Locked.
    """
    view = flat(buffer)
    n_text = _text_nbytes(view, len(view))
    fields, rest = _fields(bytes(view[8 : 8 + n_text]), n_text)
    data = view[8 + n_text :]
    try:
        if int(fields["nbytes"]) != len(data):
            raise Damaged("wrong length", f"{len(view)} bytes")
        if "cipher" in fields:
            return _unsealed(fields, rest, data, seal)
        header = _header(_plain(fields, seal), rest)
        sums = _sums(fields, header)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise Damaged("unreadable header", str(e)) from e
    buffers: list[memoryview] = []
    at = 0
    for spec, want in zip(header.tensors, sums, strict=True):
        end = at + spec.nbytes
        buffers.append(_checked(data[at:end], want))
        at = end
    if at != len(data):
        raise Damaged("wrong length", f"{len(data) - at} bytes too many")
    return Loaded(header, buffers)


def _plain(fields: dict[str, str], seal: Seal | None) -> dict[str, str]:
    if seal is not None:
        raise NotEncrypted
    return fields


def _unsealed(fields: dict[str, str], rest: bytes, data: memoryview, seal: Seal | None) -> Loaded:
    if seal is None or seal.id != fields["key_id"]:
        raise Locked
    if xxhash.xxh3_128_hexdigest(rest.rstrip(b" ")) != fields["entries"]:
        raise Damaged("bad checksum", "entries")
    cipher = seal.cipher(bytes.fromhex(fields["salt"]))
    text = _open_head(fields, cipher)
    inner, inner_rest = _fields(text, len(text))
    header = _header(inner, inner_rest)
    buffers: list[memoryview] = []
    at, index = 0, 0
    for spec, want in zip(header.tensors, _sums(inner, header), strict=True):
        opened: list[bytes] = []
        for start in range(0, spec.nbytes, PIECE_NBYTES):
            index += 1
            end = at + min(PIECE_NBYTES, spec.nbytes - start) + TAG_NBYTES
            opened.append(cipher.open(index, data[at:end]))
            at = end
        plain = opened[0] if len(opened) == 1 else b"".join(opened)
        buffers.append(_checked(memoryview(plain), want))
    if at != len(data):
        raise Damaged("wrong length", f"{len(data) - at} bytes too many")
    return Loaded(header, buffers)


def _checked(view: memoryview, want: str) -> memoryview:
    if xxhash.xxh3_64_hexdigest(view) != want:
        raise Damaged("bad checksum", "tensor")
    return view


def _text_nbytes(first: Buffer, nbytes: int) -> int:
    """The length of the JSON."""
    if len(first) < 8 or bytes(first[8:9]) != b"{":
        raise Damaged("unreadable header", "not a safetensors file")
    n_text: int = struct.unpack("<Q", first[:8])[0]
    if 8 + n_text > nbytes:
        raise Damaged("wrong length", f"{nbytes} bytes")
    return n_text


def _meta_nbytes(text: bytes, n_text: int) -> int:
    if not text.startswith(_VERSION_START):
        version = text[len(_START) :].split(b'"', 1)[0]
        if text.startswith(_START) and version.isdigit() and version != VERSION.encode():
            raise Foreign("another format version", version[:8].decode())
        raise Damaged("unreadable header", "not a firn record")
    digits = text[len(_VERSION_START) : len(_VERSION_START) + _META_DIGITS]
    if not digits.isdigit() or len(_PREFIX) + int(digits) > n_text:
        raise Damaged("unreadable header", "length of the metadata")
    return int(digits)


def _fields(text: bytes, n_text: int) -> tuple[dict[str, str], bytes]:
    """The verified metadata, and as much of the JSON after it as `text` contains."""
    end = len(_PREFIX) + _meta_nbytes(text, n_text)
    raw = text[len(_PREFIX) : end]
    body, tail = raw[:-_SUM_NBYTES], raw[-_SUM_NBYTES:]
    if tail != _SUM_START + xxhash.xxh3_128_hexdigest(body).encode() + b'"}':
        raise Damaged("bad checksum", "header")
    try:
        fields: dict[str, str] = json.loads(raw.decode("ascii"))
    except ValueError as e:
        raise Damaged("unreadable header", str(e)) from e
    return fields, text[end:]


def _open_head(fields: dict[str, str], cipher: RecordCipher) -> bytes:
    plain = {k: v for k, v in fields.items() if k not in ("firn", "meta", "sum", "head")}
    return cipher.open(0, base64.b64decode(fields["head"], validate=True), _bound(plain))


def _tag_values(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "key": Key(bytes.fromhex(fields["key"])),
        "parent": Key(bytes.fromhex(fields["parent"])),
        "root": Key(bytes.fromhex(fields["root"])),
        "part": Part(fields["part"]),
        "start": int(fields["start"]),
        "fingerprint": bytes.fromhex(fields["fingerprint"]),
        "namespace": fields["namespace"],
        "created": float(fields["created"]),
        "mark": int(fields["mark"]),
    }


def _tag(fields: dict[str, str]) -> Tag:
    return Tag(**_tag_values(fields))


def _label(fields: dict[str, str]) -> Label:
    return Label(**_tag_values(fields), tokens=_tokens(fields), layout=fields["layout"])


def _tokens(fields: dict[str, str]) -> KeyTokens:
    raw = base64.b64decode(fields["tokens"], validate=True)
    return np.frombuffer(raw, dtype=f"<u{int(fields['token_nbytes'])}").astype(np.uint64)


def _header(fields: dict[str, str], rest: bytes) -> Header:
    """The full header. The tensors' entries are parsed only here."""
    rest = rest.rstrip(b" ")
    if xxhash.xxh3_128_hexdigest(rest) != fields["entries"]:
        raise Damaged("bad checksum", "entries")
    entries: dict[str, Any] = json.loads(b"{" + rest.lstrip(b","))
    ordered = (entries[str(i)] for i in range(len(entries)))
    return Header(
        **_tag_values(fields),
        tokens=_tokens(fields),
        layout=fields["layout"],
        tensors=tuple(TensorSpec(e["dtype"], tuple(e["shape"])) for e in ordered),
        places=_places.from_text(fields["places"]),
    )


def _sums(fields: dict[str, str], header: Header) -> list[str]:
    text, n = fields["sums"], len(header.tensors)
    if len(text) != 16 * n:
        raise Damaged("unreadable header", "number of checksums")
    return [text[16 * i : 16 * i + 16] for i in range(n)]


# --- one record in a tier ------------------------------------------------------------------


def load(tier: Tier, name: Name, *, seal: Seal | None = None) -> Loaded:
    """Read and verify a record. Raises Missing, Foreign, Damaged, TierFault."""
    loaded = unpack(tier.read(str(name)), seal=seal)
    if loaded.header.name != name:
        raise Damaged("another record's bytes")
    return loaded


def label_of(tier: Tier, seen: ScannedRecord, *, seal: Seal | None = None) -> Tag:
    """The header of what a scan has found: a Label, or only a Tag without the key. Raises Missing,
    Foreign, Damaged, TierFault."""
    name = Name.parse(seen.name)
    if name is None:
        raise Foreign("a name of another format")
    head, n_needed = seen.head, head_nbytes(seen.head, seen.nbytes)
    if n_needed > len(head):
        head = tier.read(seen.name, n_needed)
    tag = read_header(head, seen.nbytes, seal=seal)
    if tag.name != name:
        raise Damaged("another record's bytes")
    if isinstance(tag, Label) and derived_key(tag, tag.parent) != tag.key:
        raise Damaged("another record's bytes", "the key does not follow from the tokens")
    return tag
