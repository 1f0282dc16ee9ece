"""The reader compared with the `gguf` package's, and its errors for files that it cannot read."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.models.load.gguf.file import GgufFile, UnreadableGguf, parse
from tests.models.load.gguf import tiny_gguf


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def fault(data: bytes) -> str:
    with pytest.raises(UnreadableGguf) as caught:
        parse(data)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_it_reads_what_the_gguf_package_reads(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    theirs, ours = gguf.GGUFReader(path), parse(data)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.metadata) == len(theirs.fields) - 3  # theirs include the version and two counts
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.kind == tensor.tensor_type.name
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert own.blocks.tobytes() == tensor.data.tobytes()


def test_tensors_are_found_at_another_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", tiny_gguf.Tiny().weights()["model.norm"])
    writer.add_tensor("b", tiny_gguf.Tiny(seed=1).weights()["model.norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = parse((tmp_path / "x.gguf").read_bytes()).tensors
    for name, seed in (("a", 0), ("b", 1)):
        expected = tiny_gguf.Tiny(seed=seed).weights()["model.norm"]
        assert tensors[name].blocks.tobytes() == expected.tobytes()


def test_nested_arrays_are_read() -> None:
    array = struct.pack("<IQ", 9, 2)  # of arrays
    for values in ([1, 2], [3]):
        array += struct.pack(f"<IQ{len(values)}I", 4, len(values), *values)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    assert parse(head + struct.pack("<I", 9) + array).metadata == {"k": [[1, 2], [3]]}


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"", "truncated"),
        (b"GGUF", "truncated"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"version https://git-lfs", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),  # the other byte order
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"k", 8, 1, b"\xff"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 14, 0), "type Q6_K"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 3, 0), "blocks of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 1 << 63, 0, 0), "truncated"),
    ],
)
def test_a_broken_file_is_one_line(begin: bytes, said: str) -> None:
    assert said in fault(begin)


def test_a_file_that_is_cut_off_anywhere_is_unreadable(data: bytes) -> None:
    for n in [*range(0, len(data) - 1, 211), len(data) - 1]:
        fault(data[:n])


@given(st.data())
def test_damaged_bytes_are_unreadable_or_read(draw: st.DataObject) -> None:
    head = bytearray(
        b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + struct.pack("<Q1sIQ2s", 1, b"a", 8, 2, b"hi")
        + struct.pack("<Q1sIIQ2I", 1, b"b", 9, 4, 2, 5, 6) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0)
    )  # fmt: skip
    head += bytes(64)
    for _ in range(draw.draw(st.integers(1, 4))):
        head[draw.draw(st.integers(4, len(head) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(UnreadableGguf):
        assert isinstance(parse(bytes(head)), GgufFile)


def test_a_value_of_another_type_is_named(data: bytes) -> None:
    file = parse(data)
    for get, key in (
        (file.integer, "tokenizer.ggml.model"),
        (file.integer, "tokenizer.ggml.add_bos_token"),
        (file.integer, "no.such.key"),
        (file.number, "llama.block_count"),
        (file.text, "llama.block_count"),
        (file.texts, "tokenizer.ggml.token_type"),
        (file.integers, "tokenizer.ggml.tokens"),
    ):
        with pytest.raises(UnreadableGguf, match=key):
            get(key)
    assert file.number("llama.attention.layer_norm_rms_epsilon") == 1e-5
