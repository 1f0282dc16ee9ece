"""The same weights are the same model wherever they are stored; other weights are another one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.core.errors import SetupError
from firn.models.load import fingerprint as fingerprints
from firn.models.load.fingerprint import Fingerprint, weight_files
from firn.models.load.loader import load
from firn.models.load.page_cache import CachedFile
from firn.models.load.weight_hash import PIECE_NBYTES, WeightHash
from tests.zoo import write_folder

CONFIG = {"model_type": "tiny", "hidden_size": 8, "rope_scaling": {"type": "linear", "factor": 2}}
Tensors = dict[str, tuple[str, list[int], bytes]]


def tensors_of(seed: int = 0) -> Tensors:
    """dtype, shape and bytes by name."""
    rng = np.random.default_rng(seed)
    sizes = {"a": 4, "b.weight": 1024, "c.weight": 2048, "d.weight": 6000, "e": 0}
    return {
        name: ("U8", [size], rng.integers(0, 256, size, dtype=np.uint8).tobytes())
        for name, size in sizes.items()
    }


def write_file(path: Path, tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write(
    folder: Path,
    tensors: Tensors,
    *,
    config: Mapping[str, Any] = CONFIG,
    shards: Sequence[Sequence[str]] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        write_file(folder / "model.safetensors", tensors)
    for i, names in enumerate(shards or ()):
        path = folder / f"model-{i + 1:05}-of-{len(shards or ()):05}.safetensors"
        write_file(path, {n: tensors[n] for n in names})
    return folder


def write_adapter(folder: Path, seed: int, *, rank: int = 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"rank": rank}))
    write_file(folder / "adapters.safetensors", tensors_of(seed))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", tensors_of())


# --- the same model ------------------------------------------------------------------------


def test_another_folder_is_the_same_model(base: Path, tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere" / "x", tensors_of())
    digest = Fingerprint(base).result()
    assert len(digest) == 32
    assert Fingerprint(elsewhere).result() == digest


@pytest.mark.parametrize(
    "shards",
    [
        [["a", "b.weight"], ["c.weight", "d.weight", "e"]],
        [["e", "d.weight"], ["c.weight"], ["b.weight", "a"]],
        [["d.weight", "c.weight", "e", "b.weight", "a"]],
    ],
)
def test_shards_and_order_do_not_count(base: Path, tmp_path: Path, shards: list[list[str]]) -> None:
    other = write(tmp_path / "sharded", tensors_of(), shards=shards)
    assert Fingerprint(other).result() == Fingerprint(base).result()


def test_metadata_and_other_files_do_not_count(base: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", tensors_of())
    write_file(other / "model.safetensors", tensors_of(), metadata={"format": "mlx"})
    (other / "README.md").write_text("a readme")
    (other / "generation_config.json").write_text("{}")
    write_file(other / "consolidated.safetensors", tensors_of(5))  # which the loader never reads
    assert Fingerprint(other).result() == Fingerprint(base).result()


def test_what_tools_write_into_a_config_does_not_count(base: Path, tmp_path: Path) -> None:
    noise = {"_name_or_path": "/home/me/x", "transformers_version": "9.9"}
    shuffled = {**noise, **dict(reversed(CONFIG.items()))}
    other = write(tmp_path / "other", tensors_of(), config=shuffled)
    assert Fingerprint(other).result() == Fingerprint(base).result()


def test_every_process_computes_the_same(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 3)
    script = (
        "import sys, pathlib\n"
        "from firn.models.load.fingerprint import Fingerprint\n"
        "print(Fingerprint(pathlib.Path(sys.argv[1]), adapter=pathlib.Path(sys.argv[2])).result().hex())"
    )
    command = [sys.executable, "-c", script, str(base), str(adapter)]
    for seed in ("0", "1234"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == Fingerprint(base, adapter=adapter).result().hex()


# --- another model -------------------------------------------------------------------------


def flipped(name: str, at: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[name]
        changed = bytearray(data)
        changed[at] ^= 1
        tensors[name] = (dtype, shape, bytes(changed))

    return change


def renamed(tensors: Tensors) -> None:
    tensors["x"] = tensors.pop("b.weight")


def retyped(tensors: Tensors) -> None:
    tensors["b.weight"] = ("I8", *tensors["b.weight"][1:])


def reshaped(tensors: Tensors) -> None:
    tensors["b.weight"] = ("U8", [32, 32], tensors["b.weight"][2])


def exchanged(tensors: Tensors) -> None:
    """The two halves of a tensor change places."""
    data = tensors["c.weight"][2]
    tensors["c.weight"] = ("U8", [2048], data[1024:] + data[:1024])


def dropped(tensors: Tensors) -> None:
    del tensors["e"]


def added(tensors: Tensors) -> None:
    tensors["f"] = ("U8", [0], b"")


@pytest.mark.parametrize(
    "change",
    [
        *(flipped("a", i) for i in range(4)),
        *(flipped("b.weight", i) for i in (0, 511, 1023)),
        *(flipped("c.weight", i) for i in (0, 1023, 1024, 2047)),
        *(flipped("d.weight", i) for i in (0, 1023, 6000 - 1024, 5999)),
        renamed,
        retyped,
        reshaped,
        exchanged,
        dropped,
        added,
    ],
)
def test_other_tensors_are_another_model(
    base: Path, tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = tensors_of()
    change(tensors)
    assert Fingerprint(write(tmp_path / "other", tensors)).result() != Fingerprint(base).result()


def test_two_tensors_that_change_places_are_another_model(tmp_path: Path) -> None:
    one, two = ("U8", [3], b"one"), ("U8", [3], b"two")
    first = write(tmp_path / "a", {"b.weight": one, "c.weight": two})
    other = write(tmp_path / "b", {"b.weight": two, "c.weight": one})
    assert Fingerprint(first).result() != Fingerprint(other).result()


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_size": 9},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"quantization": {"bits": 4, "group_size": 64}},
        {"model_type": "tinier"},
    ],
)
def test_another_config_is_another_model(base: Path, tmp_path: Path, more: Any) -> None:
    other = write(tmp_path / "other", tensors_of(), config={**CONFIG, **more})
    assert Fingerprint(other).result() != Fingerprint(base).result()


def test_weights_replaced_in_place_are_another_model(base: Path) -> None:
    before = Fingerprint(base).result()
    write_file(base / "model.safetensors", tensors_of(1))
    assert Fingerprint(base).result() != before


def test_custom_code_is_a_part_of_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "custom", tensors_of(), config={**CONFIG, "model_file": "model.py"})
    (folder / "model.py").write_text("class Model: ...")
    before = Fingerprint(folder).result()
    (folder / "model.py").write_text("class Model: pass")
    assert Fingerprint(folder).result() != before


def test_an_adapter_makes_another_model(base: Path, tmp_path: Path) -> None:
    """Base, adapter, another one, one replaced under the same name, another rank: five models."""
    first = write_adapter(tmp_path / "adapter", 1)
    digests = [Fingerprint(base).result(), Fingerprint(base, adapter=first).result()]
    digests.append(Fingerprint(base, adapter=write_adapter(tmp_path / "other", 2)).result())
    write_file(first / "adapters.safetensors", tensors_of(3))
    digests.append(Fingerprint(base, adapter=first).result())
    (first / "adapter_config.json").write_text(json.dumps({"rank": 16}))
    digests.append(Fingerprint(base, adapter=first).result())
    assert len(set(digests)) == 5
    again = write_adapter(tmp_path / "again" / "adapter", 1)
    assert Fingerprint(base, adapter=again).result() == digests[1]


def test_checkpoints_beside_an_adapter_do_not_count(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 1)
    before = Fingerprint(base, adapter=adapter).result()
    write_file(adapter / "0000100_adapters.safetensors", tensors_of(2))
    assert Fingerprint(base, adapter=adapter).result() == before


# --- every byte ----------------------------------------------------------------------------

SIZES = {"a": 3, "empty": 0, "b": PIECE_NBYTES - 1, "c": 70_000, "d": 2 * PIECE_NBYTES + 5, "e": 1}
"""Small ones that are read together, and one that is read in pieces."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(7)
    tensors: Tensors = {
        name: ("U8", [n], rng.integers(0, 256, n, dtype=np.uint8).tobytes())
        for name, n in SIZES.items()
    }
    return write(tmp_path_factory.mktemp("large") / "model", tensors) / "model.safetensors"


@settings(max_examples=60)
@given(st.data())
def test_one_byte_anywhere_is_another_model(large: Path, data: st.DataObject) -> None:
    nbytes = sum(SIZES.values())
    at = large.stat().st_size - 1 - data.draw(st.integers(0, nbytes - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    before = WeightHash([large]).result()
    with large.open("r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ bit]))
        f.flush()
        assert WeightHash([large]).result() != before
        f.seek(at)
        f.write(bytes([byte]))
    assert WeightHash([large]).result() == before


def test_two_pieces_that_change_places_are_another_model(tmp_path: Path) -> None:
    one, two = bytes(PIECE_NBYTES), b"\1" * PIECE_NBYTES
    first = write(tmp_path / "a", {"w": ("U8", [len(one) * 2], one + two)})
    other = write(tmp_path / "b", {"w": ("U8", [len(one) * 2], two + one)})
    assert Fingerprint(first).result() != Fingerprint(other).result()


def test_a_change_in_the_midst_of_a_tensor_is_another_model(tmp_path: Path) -> None:
    """Through the loader: the fingerprint that a model's records depend on."""
    folder = tmp_path / "model"
    write_folder("llama", folder)
    before = load(folder, served_name="x").info.fingerprint
    assert load(folder, served_name="y").info.fingerprint == before
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    assert load(folder, served_name="x").info.fingerprint != before


def test_weights_that_change_while_they_load_are_not_served(base: Path) -> None:
    pending = Fingerprint(base)
    write_file(base / "model.safetensors", tensors_of(1))
    with pytest.raises(SetupError, match="changed while they were loaded"):
        pending.result()


def test_weights_that_are_short_for_a_moment_are_said_to_have_changed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer truncates first, and the hash may read the file just then."""
    weights = base / "model.safetensors"
    whole, read = weights.read_bytes(), CachedFile.read

    def truncated_first(file: CachedFile, view: memoryview, start: int) -> None:
        weights.write_bytes(whole[: start + len(view) - 1])
        read(file, view, start)

    monkeypatch.setattr(CachedFile, "read", truncated_first)
    pending = Fingerprint(base)
    with pytest.raises(SetupError, match="changed while they were loaded"):
        pending.result()


def test_a_header_that_is_rewritten_and_put_back_is_the_same_model(tmp_path: Path) -> None:
    """What mlx-vlm does to files with types that MLX does not read."""
    folder = write(tmp_path / "m", {"w": ("F8_E8M0", [4], b"1234")})
    pending = Fingerprint(folder, vision=True)
    os.utime(folder / "model.safetensors")
    assert pending.result() == Fingerprint(folder, vision=True).result()


# --- which files -----------------------------------------------------------------------------


def test_mlx_vlm_reads_every_shard(base: Path) -> None:
    text, vision = Fingerprint(base).result(), Fingerprint(base, vision=True).result()
    assert text != vision, "another library's model is another model"
    write_file(base / "vision_tower.safetensors", tensors_of(8))
    assert Fingerprint(base).result() == text, "mlx-lm does not read it"
    more = Fingerprint(base, vision=True).result()
    assert more != vision
    write_file(base / "consolidated.safetensors", tensors_of(9))
    assert Fingerprint(base, vision=True).result() == more


def test_mlx_vlm_reads_what_the_index_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tensors_of(), shards=[["a", "b.weight"], ["c.weight"]])
    first, second = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b.weight": first.name}}))
    assert weight_files(folder, vision=True) == [first]
    assert set(weight_files(folder, vision=False)) == {first, second}
    index.write_text("{")
    assert set(weight_files(folder, vision=True)) == {first, second}


def test_of_two_tensors_of_one_name_the_last_one_counts(tmp_path: Path) -> None:
    """Then it matters which one is in which file."""
    mine, other = tensors_of(), tensors_of(1)
    folder = tmp_path / "m"
    write(folder, {"a": mine["a"]})
    write_file(folder / "model-2.safetensors", {"a": other["a"]})
    paths = weight_files(folder, vision=False)
    assert WeightHash(paths).result() != WeightHash(paths[::-1]).result()


def test_quantisation_beside_the_config_counts(base: Path) -> None:
    before = Fingerprint(base).result()
    (base / "hf_quant_config.json").write_text('{"quant_method": "modelopt"}')
    assert Fingerprint(base).result() != before


def test_weights_that_cannot_be_seen_are_never_the_same(base: Path) -> None:
    (base / "offload_index.json").write_text("{}")
    assert Fingerprint(base).result() == Fingerprint(base).result()
    assert Fingerprint(base, vision=True).result() != Fingerprint(base, vision=True).result()


def test_an_adapter_of_mlx_vlm_makes_another_model(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 1)
    (adapter / "adapters.safetensors").rename(adapter / "weights.safetensors")
    before = Fingerprint(base, adapter=adapter, vision=True).result()
    write_file(adapter / "weights.safetensors", tensors_of(2))
    assert Fingerprint(base, adapter=adapter, vision=True).result() != before


@pytest.mark.parametrize("package", ["mlx", "mlx_lm"])
def test_another_version_is_another_model(
    base: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = Fingerprint(base).result(), fingerprints._version
    changed = lambda name: "99.0" if name == package else version(name)  # noqa: E731
    monkeypatch.setattr(fingerprints, "_version", changed)
    assert Fingerprint(base).result() != before


def test_mlx_vlm_counts_for_its_own_models_only(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Fingerprint(base).result(), Fingerprint(base, vision=True).result()
    version = fingerprints._version
    changed = lambda name: "99.0" if name == "mlx_vlm" else version(name)  # noqa: E731
    monkeypatch.setattr(fingerprints, "_version", changed)
    assert Fingerprint(base).result() == before[0]
    assert Fingerprint(base, vision=True).result() != before[1]


def test_a_patched_library_is_another_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sources = Fingerprint(base).result(), fingerprints._sources
    patched = tmp_path / "llama.py"
    patched.write_text("# patched")
    monkeypatch.setattr(fingerprints, "_sources", lambda package: [*sources(package), patched])
    assert Fingerprint(base).result() != before


def test_a_library_that_cannot_be_read_is_never_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other files may have been patched in the meantime."""
    sources, lock = fingerprints._sources, tmp_path / ".#llama.py"
    lock.symlink_to("somebody@somewhere")  # as some editors leave next to a file
    monkeypatch.setattr(fingerprints, "_sources", lambda package: [*sources(package), lock])
    assert Fingerprint(base).result() != Fingerprint(base).result()


# --- broken files ---------------------------------------------------------------------------


def header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        header([]),
        header({"a": 5}),
        header({"a": {"dtype": "U8", "shape": [4]}}),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": 4}}),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": ["x", "y"]}}),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [-9, 0]}}) + b"1234",
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [3, 1]}}) + b"1234",
    ],
)
def test_a_broken_weight_file_is_one_line(base: Path, content: bytes) -> None:
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(SetupError) as caught:
        Fingerprint(base).result()
    assert "model.safetensors" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", "5", ""])
def test_a_broken_adapter_config_is_one_line(base: Path, tmp_path: Path, text: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", 1)
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(SetupError) as caught:
        Fingerprint(base, adapter=adapter).result()
    assert "adapter_config.json" in caught.value.message
    assert "\n" not in caught.value.message
