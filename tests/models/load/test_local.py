"""Models that LM Studio or the hub's library has downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firn.core.errors import SetupError
from firn.models.load import loader, local
from firn.models.load.hub import HubRules


def put(home: Path, name: str, *files: str, under: str = ".lmstudio/models") -> Path:
    folder = home / under / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    put(tmp_path, "mlx-community/Qwen3-4B-4bit", "config.json", "model.safetensors")
    put(tmp_path, "lmstudio-community/Gemma-GGUF", "gemma.gguf")
    put(tmp_path, "mlx-community/half", "config.json")
    put(tmp_path, "a/same", "config.json", "model.safetensors")
    put(tmp_path, "b/same", "config.json", "model.safetensors")
    old = ".cache/lm-studio/models"
    put(tmp_path, "old/one", "config.json", "model.safetensors", under=old)
    put(tmp_path, "a/same", "config.json", "model.safetensors", under=old)
    return tmp_path


def test_models_in_lm_studios_folders_are_found(home: Path) -> None:
    folders = {f.name: f.folder for f in local.other_programs_models(home)}
    assert list(folders) == ["a/same", "b/same", "mlx-community/Qwen3-4B-4bit", "old/one"]
    assert ".lmstudio" in str(folders["a/same"]), "the newer place wins"


def test_a_name_stands_for_a_folder_where_it_is_clear_which(home: Path) -> None:
    assert local.find("mlx-community/qwen3-4b-4BIT", home) is not None
    assert local.find("Qwen3-4B-4bit", home, home / "no") is not None
    assert local.find("b/same", home) is not None
    assert local.find("same", home, home / "no") is None, "two owners have one"
    assert local.find("nobody/nothing", home) is None


def test_the_hubs_cache_is_searched_by_a_models_own_name(tmp_path: Path) -> None:
    for name, revision in (("models--a--One-4bit", "abc"), ("models--b--part", "def")):
        repo = tmp_path / name
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(revision)
    folder = put(
        tmp_path, "models--a--One-4bit/snapshots/abc", "config.json", "m.safetensors", under=""
    )
    put(tmp_path, "models--b--part/snapshots/def", "config.json", under="")
    put(tmp_path, "datasets--c--d", under="")
    assert [f.name for f in local.hub_models(tmp_path)] == ["a/One-4bit"]
    assert local.find("one-4bit", tmp_path / "home", tmp_path) == folder
    assert local.find("part", tmp_path / "home", tmp_path) is None
    assert local.hub_models(tmp_path / "gone") == []


def test_a_home_that_was_moved_is_found(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    put(elsewhere, "x/moved", "config.json", "m.safetensors", under="models")
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    assert local.find("x/moved", tmp_path) == elsewhere / "models/x/moved"
    assert local.other_programs_models(tmp_path / "nobody") == []


def test_models_in_omlx_folders_are_found(tmp_path: Path) -> None:
    under = ".omlx/models"
    flat = put(tmp_path, "Qwen3-8B-4bit", "config.json", "m.safetensors", under=under)
    put(tmp_path, "Qwen3-8B-4bit/inner", "config.json", "m.safetensors", under=under)
    put(tmp_path, "mlx-community/owned", "config.json", "m.safetensors", under=under)
    put(tmp_path, "mlx-community/owned", "config.json", "m.safetensors")
    models = {m.name: m for m in local.other_programs_models(tmp_path)}
    assert list(models) == ["Qwen3-8B-4bit", "mlx-community/owned"]
    assert models["Qwen3-8B-4bit"].program == "oMLX"
    assert models["mlx-community/owned"].program == "LM Studio", "the first"
    assert local.find("qwen3-8b-4bit", tmp_path, tmp_path / "no") == flat
    disk = put(tmp_path, "elsewhere", "config.json", "m.safetensors", under="disk")
    settings = {"model": {"model_dirs": [str(disk.parent), 3], "model_dir": str(disk.parent)}}
    (tmp_path / ".omlx" / "settings.json").write_text(json.dumps(settings))
    assert local.find("elsewhere", tmp_path, tmp_path / "no") == disk
    assert local.find("qwen3-8b-4bit", tmp_path, tmp_path / "no") == flat, "its default, too"
    for damaged in ("", "[]", '{"model": []}', '{"model": {"model_dirs": 3}}'):
        (tmp_path / ".omlx" / "settings.json").write_text(damaged)
        assert local.find("qwen3-8b-4bit", tmp_path, tmp_path / "no") == flat


def test_a_model_of_lm_studio_is_served_without_a_download(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = HubRules(offline=True)
    want = home / ".lmstudio/models/mlx-community/Qwen3-4B-4bit"
    assert loader.resolve("mlx-community/Qwen3-4B-4bit", offline) == want
    assert loader.resolve("Qwen3-4B-4bit", offline) == want
    with pytest.raises(SetupError, match="no model folder"):
        loader.resolve("same", offline)
