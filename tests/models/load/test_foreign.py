"""Models of other programs, and folders that lack something: one line that says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firn.core.errors import SetupError
from firn.models.load.inspect import inspect_folder
from firn.models.load.loader import load, load_tokenizer, read_config, resolve
from tests.cli.test_commands import firn
from tests.zoo import write_folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zoo") / "llama"
    write_folder("llama", path)
    return path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.mark.parametrize("name", ["model.gguf", "MODEL.GGUF", "blob-without-a-name"])
def test_a_gguf_file_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(SetupError, match=r"is a GGUF file.*mlx_lm\.convert") as caught:
        resolve(str(file))
    assert "\n" not in caught.value.message
    assert inspect_folder(file).problems == (caught.value.message,)


@pytest.mark.parametrize("with_config", [False, True])
def test_a_folder_with_gguf_files_is_refused_with_advice(tmp_path: Path, with_config: bool) -> None:
    (tmp_path / "qwen3-8b-q4_k_m.gguf").write_bytes(b"GGUF")
    if with_config:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(SetupError, match=r"holds qwen3-8b-q4_k_m\.gguf") as caught:
            load(tmp_path, served_name="x")
    else:
        with pytest.raises(SetupError, match=r"holds qwen3-8b-q4_k_m\.gguf") as caught:
            read_config(tmp_path)
    assert "mlx-community" in caught.value.message
    assert any("llama.cpp" in problem for problem in inspect_folder(tmp_path).problems)


def test_a_folder_with_pytorch_weights_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(SetupError, match=r"weights for PyTorch.*convert"):
        load(tmp_path, served_name="x")


def test_mlx_weights_beside_others_are_served(folder: Path) -> None:
    (folder / "also.gguf").write_bytes(b"GGUF")
    assert load(folder, served_name="x").info.name == "x"


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SetupError) as caught:
        load_tokenizer(folder)
    missing = "The tokenizer is missing: none of tokenizer.json, tokenizer.model, tiktoken.model, "
    assert caught.value.message.startswith(f"{folder}: {missing}")
    assert any(problem.startswith(missing) for problem in inspect_folder(folder).problems)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(SetupError, match=r"merges\.txt is missing"):
        load_tokenizer(folder)


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    run = firn("serve", str(file), "--port", "0")
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(
        f"firn: {file} is a GGUF file, llama.cpp's format; firn serves MLX"
    )


def test_max_context_shortens_the_context(folder: Path) -> None:
    whole = load(folder, served_name="x").info
    short = load(folder, served_name="x", max_context=64).info
    assert (short.context_length, short.fingerprint) == (64, whole.fingerprint)
    more = load(folder, served_name="x", max_context=1 << 30).info
    assert more.context_length == whole.context_length
