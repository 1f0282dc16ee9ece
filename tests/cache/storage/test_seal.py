"""Encryption at rest: nothing of a prompt is readable, other keys are misses, and damage is noticed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors

from firn.cache.parts import Part
from firn.cache.storage.container import (
    _PREFIX,
    Label,
    Tag,
    TensorSpec,
    _framed,
    _metadata,
    head_nbytes,
    pack,
    read_header,
    unpack,
)
from firn.cache.storage.faults import Damaged, Foreign, Locked, Missing
from firn.cache.storage.seal import PIECE_NBYTES, Seal, load_seal
from firn.cache.tiers._folder import path_of
from firn.core.errors import SetupError
from tests.cache.tiers.records import Folder, assert_same, beside, chain, of_size, record
from tests.faulty_tier import put

MIB = 1 << 20
KEY, OTHER = Seal(bytes(range(32))), Seal(b"\1" * 32)


def opened(folder: Path, seal: Seal | None) -> Folder:
    return Folder(folder, 16 * MIB, seal=seal)


def peeked(raw: bytes, seal: Seal | None) -> Tag:
    return read_header(raw[: max(4096, head_nbytes(raw[:4096], len(raw)))], len(raw), seal=seal)


def test_round_trip() -> None:
    one = record(range(40))
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    loaded = unpack(raw, seal=KEY)
    assert_same(loaded.header, one.header)
    assert [bytes(b) for b in loaded.buffers] == one.buffers
    label = peeked(raw, KEY)
    assert isinstance(label, Label)
    assert label.tokens.tolist() == list(range(40))


def test_other_keys_see_the_chain_and_nothing_else() -> None:
    one = record(range(40))
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    for seal in (None, OTHER):
        tag = peeked(raw, seal)
        assert type(tag) is Tag
        assert (tag.key, tag.parent) == (one.header.key, one.header.parent)
        with pytest.raises(Locked):
            unpack(raw, seal=seal)


def test_nothing_of_the_content_is_in_the_file(tmp_path: Path) -> None:
    one = record(range(5, 300))
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    plain = b"".join(pack(one.header, one.buffers).pieces)
    assert one.header.layout.encode() in plain
    for secret in (one.header.layout.encode(), b"BF16", b"tokens", *one.buffers):
        assert not secret or len(secret) < 8 or secret not in raw
    tokens = one.header.tokens.astype("<u4").tobytes()
    assert tokens[:64] not in raw
    assert b"shape" in raw, "it is still a safetensors file"
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with safetensors.safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["body"]
        assert file.metadata()["cipher"] == "AES-256-GCM"


def test_the_same_record_never_looks_the_same() -> None:
    one = record()
    a, b = (b"".join(pack(one.header, one.buffers, seal=KEY).pieces) for _ in range(2))
    assert len(a) == len(b)
    same = sum(x == y for x, y in zip(a[-400:], b[-400:], strict=True))
    assert same < 60


def test_any_flipped_byte_is_noticed() -> None:
    one = record(range(3), layers=((TensorSpec("U8", (50,)), TensorSpec("U8", (0,))),))
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 0x10
        with pytest.raises((Damaged, Foreign)):
            unpack(broken, seal=KEY)


def test_pieces_of_two_records_cannot_be_mixed() -> None:
    a, b = of_size(500, 1), of_size(500, 2)
    raw_a, raw_b = (b"".join(pack(r.header, r.buffers, seal=KEY).pieces) for r in (a, b))
    with pytest.raises(Damaged):
        unpack(raw_a[:-516] + raw_b[-516:], seal=KEY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", "4096"),
        ("parent", "00" * 32),
        ("root", "11" * 32),
        ("namespace", "someone else's"),
        ("fingerprint", "22" * 32),
        ("mark", "5"),
        ("created", "1.0"),
        ("part", "state"),
    ],
)
def test_no_plain_field_of_a_sealed_record_can_be_forged(field: str, value: str) -> None:
    """Servers without the key rely on the plain fields, so the seal covers these as well."""
    one = record(range(40))
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    (n_text,) = struct.unpack("<Q", raw[:8])
    start = len(_PREFIX)
    text = raw[8 : 8 + n_text].rstrip(b" ")
    fields = json.JSONDecoder().raw_decode(text[start:].decode())[0]
    rest = text[start + int(fields["meta"]) :]
    plain = {k: v for k, v in fields.items() if k not in ("firn", "meta", "sum")}
    assert plain[field] != value
    same, forged = (
        b"".join(_framed(_PREFIX + _metadata(plain | more) + rest, [raw[8 + n_text :]]).pieces)
        for more in ({}, {field: value})
    )
    assert same == raw
    assert peeked(forged, None) != peeked(raw, None), "whoever has no key believes it"
    for look in (lambda: peeked(forged, KEY), lambda: unpack(forged, seal=KEY)):
        with pytest.raises(Damaged) as caught:
            look()
        assert caught.value.message == "bad checksum: authentication tag"


def test_a_tensor_larger_than_a_piece() -> None:
    one = of_size(PIECE_NBYTES + 1000)
    raw = b"".join(pack(one.header, one.buffers, seal=KEY).pieces)
    assert bytes(unpack(raw, seal=KEY).buffers[0]) == one.buffers[0]


# --- in the folder -------------------------------------------------------------------------


def test_a_folder_with_a_key(tmp_path: Path) -> None:
    records = [*chain(3), beside(chain(1)[0], Part.STATE)]
    tier = opened(tmp_path, KEY)
    for one in records:
        tier.write(one)
    fresh = opened(tmp_path, KEY)
    assert fresh.names() == {r.name for r in records}
    assert all(fresh.holds(r) for r in records)


@pytest.mark.parametrize("seal", [None, OTHER], ids=["no key", "wrong key"])
def test_without_the_key_files_are_misses_kept_and_evictable(
    tmp_path: Path, seal: Seal | None
) -> None:
    records = chain(3, nbytes=100_000)
    tier = opened(tmp_path, KEY)
    for one in records:
        tier.write(one)
    other = opened(tmp_path, seal)
    assert other.scan() == []
    usage = other.usage()
    assert usage.n_foreign == 3
    assert usage.nbytes > 300_000
    for one in records:
        with pytest.raises(Missing):
            other.read(one)
    assert other.usage().n_quarantined == 0
    assert all(tier.holds(r) for r in records)
    assert other.evict_to(0) > 300_000
    assert not any(tier.holds(r) for r in records)


def test_with_a_key_nothing_else_counts(tmp_path: Path) -> None:
    """Write access to a store must not be enough to forge a record."""
    records = chain(3)
    plain = opened(tmp_path, None)
    for one in records:
        plain.write(one)
    sealed = opened(tmp_path, KEY)
    assert sealed.scan() == []
    assert sealed.usage().n_foreign == 3
    for one in records:
        with pytest.raises(Missing):
            sealed.read(one)
        sealed.write(one)
    assert all(sealed.holds(r) for r in records), "ours have taken their places"
    assert opened(tmp_path, None).scan() == []


def test_reading_without_a_scan_is_a_miss_too(tmp_path: Path) -> None:
    one = record()
    opened(tmp_path, KEY).write(one)
    other = opened(tmp_path, OTHER)
    with pytest.raises(Missing):
        other.read(one)
    assert (tmp_path / path_of(str(one.name))).exists()
    other.write(one)
    assert other.holds(one)


def test_chains_of_others_still_go_from_their_end(tmp_path: Path) -> None:
    records = chain(4, nbytes=200_000)
    tier = opened(tmp_path, KEY)
    for one in records:
        tier.write(one)
    other = opened(tmp_path, None)
    other.scan()
    for nbytes in (700_000, 500_000, 300_000, 0):
        other.evict_to(nbytes)
        there = [tier.holds(r) for r in records]
        assert there == sorted(there, reverse=True)


def test_damage_with_the_key_is_damage(tmp_path: Path) -> None:
    one = of_size(1000)
    tier = opened(tmp_path, KEY)
    tier.write(one)
    path = tmp_path / path_of(str(one.name))
    raw = path.read_bytes()
    put(path, raw[:-5] + b"?" + raw[-4:])
    with pytest.raises(Damaged):
        tier.read(one)
    assert tier.usage().n_quarantined == 1


# --- key files -----------------------------------------------------------------------------


def key_file(folder: Path, content: bytes) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_key_files(tmp_path: Path) -> None:
    raw = os.urandom(32)
    expected = Seal(raw).id
    assert load_seal(key_file(tmp_path, raw)).id == expected
    assert load_seal(key_file(tmp_path, raw.hex().encode())).id == expected
    assert load_seal(key_file(tmp_path, raw.hex().upper().encode() + b"\n")).id == expected
    phrase = load_seal(key_file(tmp_path, b"correct horse battery staple\n"))
    assert phrase.id == load_seal(key_file(tmp_path, b"correct horse battery staple")).id
    assert phrase.id != load_seal(key_file(tmp_path, b"correct horse battery stapler")).id


@pytest.mark.parametrize("content", [b"", b"short", b"\n\n   \n"])
def test_bad_key_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SetupError, match="passphrase"):
        load_seal(key_file(tmp_path, content))
    with pytest.raises(SetupError, match="cannot be read"):
        load_seal(tmp_path / "none")


def test_a_key_that_others_may_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, os.urandom(32))
    path.chmod(0o644)
    load_seal(path)
    assert "chmod 600" in caplog.text


def test_a_missing_package_is_one_clear_line() -> None:
    script = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "from firn.cache.storage.seal import Seal\n"
        "from firn.core.errors import SetupError\n"
        "try:\n    Seal(bytes(32))\n"
        "except SetupError as e:\n    print(e.message)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "firn[encryption]" in run.stdout
