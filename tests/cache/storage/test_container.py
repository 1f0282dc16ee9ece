"""The record file: what goes in comes out, any other byte is noticed, other programs can read it."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.cache.parts import Part
from firn.cache.storage.container import (
    ALIGN,
    ITEM_NBYTES,
    Header,
    Label,
    Name,
    Tag,
    TensorSpec,
    head_nbytes,
    pack,
    read_header,
    unpack,
)
from firn.cache.storage.faults import Damaged, Foreign
from firn.cache.storage.places import places_of
from firn.cache.tiers import PEEK_NBYTES
from firn.core.keys import Key
from tests.cache.tiers.records import Record, assert_same, chain, header, record


def packed(one: Record) -> bytes:
    return b"".join(pack(one.header, one.buffers).pieces)


def label_of(raw: bytes) -> Label:
    label = peeked(raw)
    assert isinstance(label, Label)
    return label


def peeked(raw: bytes | bytearray, nbytes: int | None = None) -> Tag:
    """Read the header as a scan does: a few bytes first."""
    size = len(raw) if nbytes is None else nbytes
    return read_header(raw[: max(PEEK_NBYTES, head_nbytes(raw[:PEEK_NBYTES], size))], size)


specs = st.builds(
    TensorSpec,
    st.sampled_from(sorted(ITEM_NBYTES)),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
)
stacks = st.lists(
    st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=4
).map(tuple)
keys = st.binary(min_size=32, max_size=32).map(Key)
headers = st.builds(
    Header,
    key=keys,
    parent=keys,
    root=keys,
    part=st.sampled_from(Part),
    start=st.integers(0, 2**63),
    tokens=st.lists(st.integers(0, 2**64 - 1), max_size=40).map(
        lambda x: np.array(x, dtype=np.uint64)
    ),
    fingerprint=st.binary(max_size=32),
    namespace=st.text(max_size=10),
    layout=st.text(max_size=30),
    tensors=st.lists(specs, max_size=6).map(tuple),
    places=stacks.map(places_of),
    created=st.floats(0, 1e10),
    mark=st.integers(0, 9),
)


@settings(max_examples=200, deadline=None)
@given(made=headers, data=st.data())
def test_what_goes_in_comes_out(made: Header, data: st.DataObject) -> None:
    buffers = [data.draw(st.binary(min_size=s.nbytes, max_size=s.nbytes)) for s in made.tensors]
    whole = pack(made, buffers)
    raw = b"".join(whole.pieces)
    assert len(raw) == whole.nbytes
    loaded = unpack(raw)
    assert_same(loaded.header, made)
    assert [bytes(b) for b in loaded.buffers] == buffers
    label = label_of(raw)
    assert label == Label(**{f.name: getattr(made, f.name) for f in dataclasses.fields(Label)})
    assert np.array_equal(label.tokens, made.tokens)


def test_nothing_is_copied() -> None:
    one = record()
    arrays = [np.frombuffer(b, dtype=np.uint8).copy() for b in one.buffers]
    pieces = pack(one.header, arrays).pieces
    assert all(
        np.shares_memory(np.frombuffer(piece, dtype=np.uint8), array)
        for piece, array in zip(pieces[1:], arrays, strict=True)
        if len(array)
    )
    raw = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    loaded = unpack(raw)
    assert all(
        np.shares_memory(np.frombuffer(view, dtype=np.uint8), raw)
        for view in loaded.buffers
        if len(view)
    )


def test_arrays_of_any_type_are_taken_as_their_bytes() -> None:
    layers = ((TensorSpec("BF16", (2, 3)), TensorSpec("F32", (2,))),)
    made = header(layers=layers)
    bf16 = np.arange(6, dtype=np.uint16).reshape(2, 3)
    f32 = np.array([1.5, -0.0], dtype=np.float32)
    loaded = unpack(b"".join(pack(made, [bf16, f32]).pieces))
    assert bytes(loaded.buffers[0]) == bf16.tobytes()
    assert bytes(loaded.buffers[1]) == f32.tobytes()


@pytest.mark.parametrize("wrong", ["missing", "short", "long"])
def test_buffers_that_do_not_fit_the_header_are_a_bug(wrong: str) -> None:
    one = record()
    buffers = {
        "missing": one.buffers[:-1],
        "short": [one.buffers[0][:-1], *one.buffers[1:]],
        "long": [one.buffers[0] + b"x", *one.buffers[1:]],
    }[wrong]
    with pytest.raises(ValueError, match="do not fit"):
        pack(one.header, buffers)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    layers = (
        (TensorSpec("F32", (2, 3)), None, TensorSpec("U32", (4,))),
        (TensorSpec("F16", (0, 8)), TensorSpec("U8", (5,))),
    )
    one = record(layers=layers)
    path = tmp_path / "record.safetensors"
    path.write_bytes(packed(one))
    tensors = safetensors.numpy.load_file(path)
    assert set(tensors) == {"0", "1", "2", "3"}
    assert tensors["0"].tobytes() == one.buffers[0]
    assert tensors["2"].shape == (1, 0, 8)
    assert tensors["3"].tobytes() == one.buffers[3]
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata["key"] == one.header.key.hex()
    assert metadata["part"] == "pages"
    (n,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + n) % ALIGN == 0


@pytest.mark.parametrize("one", [record(), record(layers=()), chain(2)[1]], ids=["a", "none", "b"])
def test_any_flipped_byte_is_noticed(one: Record) -> None:
    raw = packed(one)
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 0x40
        with pytest.raises((Damaged, Foreign)):
            unpack(broken)


def test_a_scan_notices_damage_to_what_it_reads() -> None:
    raw = packed(record())
    n_meta = raw.index(b'"sum":"') + 41
    for at in range(n_meta):
        broken = bytearray(raw)
        broken[at] ^= 0x11
        with pytest.raises((Damaged, Foreign)):
            peeked(broken)


def test_any_truncation_is_noticed_by_a_scan_already() -> None:
    raw = packed(record())
    for n in range(len(raw)):
        with pytest.raises(Damaged):
            peeked(raw[:n])
        with pytest.raises(Damaged):
            unpack(raw[:n])
    with pytest.raises(Damaged):
        unpack(raw + b"\0")
    with pytest.raises(Damaged):
        label_of(raw + b"\0")


@settings(max_examples=300, deadline=None)
@given(
    raw=st.binary(max_size=400), start=st.sampled_from([b"", b"{", b'{"__metadata__":{"firn":"'])
)
def test_junk_is_never_a_record(raw: bytes, start: bytes) -> None:
    text = start + raw
    whole = struct.pack("<Q", len(text)) + text
    for junk in (raw, text, whole):
        with pytest.raises((Damaged, Foreign)):
            unpack(junk)
        with pytest.raises((Damaged, Foreign)):
            label_of(junk)


def test_another_version_is_foreign_not_damaged() -> None:
    raw = packed(record()).replace(b'"firn":"2"', b'"firn":"1"', 1)
    with pytest.raises(Foreign):
        unpack(raw)
    with pytest.raises(Foreign):
        label_of(raw)


def test_a_scan_reads_little_and_parses_no_tensor_entries() -> None:
    many = tuple((TensorSpec("BF16", (1,)), TensorSpec("BF16", (1,))) for _ in range(400))
    one = record(range(256), layers=many)
    raw = packed(one)
    entries = raw.index(b'"0":')
    spoilt = raw[:entries] + b"!" * 20 + raw[entries + 20 :]
    assert np.array_equal(label_of(spoilt).tokens, one.header.tokens)
    n_needed = head_nbytes(raw[:100], len(raw))
    assert n_needed < entries
    read_header(raw[:n_needed], len(raw))
    with pytest.raises(Damaged):
        unpack(spoilt)


def test_many_tokens_and_large_ones() -> None:
    long = record(range(200_000), layers=())
    assert np.array_equal(label_of(packed(long)).tokens, long.header.tokens)
    assert len(packed(long)) < 6 * 200_000, "four bytes a token, and base64"
    wide = record([1, 2**63 + 5, 2**64 - 1], layers=())
    assert np.array_equal(label_of(packed(wide)).tokens, wide.header.tokens)


def test_records_past_4_gib() -> None:
    """Pages that were never written to take up no memory, so this costs little but the hashing."""
    spec = TensorSpec("U8", (5 << 30,))
    one = header(layers=((TensorSpec("U8", (3,)), spec), (TensorSpec("U32", (2,)),)))
    zeros = np.zeros(spec.nbytes, dtype=np.uint8)
    whole = pack(one, [b"abc", zeros, b"12345678"])
    head = bytes(whole.pieces[0])
    offsets = json.loads(head[8:])["2"]["data_offsets"]
    assert offsets == [3 + (5 << 30), 11 + (5 << 30)]
    file = np.zeros(whole.nbytes, dtype=np.uint8).data
    file[: len(head)] = head
    file[len(head) : len(head) + 3] = b"abc"
    file[whole.nbytes - 8 :] = b"12345678"
    loaded = unpack(file)
    assert [len(b) for b in loaded.buffers] == [3, 5 << 30, 8]
    assert bytes(loaded.buffers[2]) == b"12345678"
    file[6 << 29] = 1
    with pytest.raises(Damaged):
        unpack(file)


def test_buffers_that_are_not_contiguous_are_not_copied_silently() -> None:
    one = record(layers=((TensorSpec("U8", (8,)),),))
    with pytest.raises((BufferError, TypeError, ValueError)):
        pack(one.header, [np.arange(16, dtype=np.uint8)[::2]])


@given(key=keys, part=st.sampled_from(Part))
def test_names_are_read_back(key: Key, part: Part) -> None:
    name = Name(key, part)
    assert Name.parse(str(name)) == name
    assert len(str(name).partition(".")[0]) == 64


@pytest.mark.parametrize("text", ["", "x", "ab.pages", f"{'ab' * 32}.heads", f"{'zz' * 32}.pages"])
def test_other_names_are_none(text: str) -> None:
    assert Name.parse(text) is None
