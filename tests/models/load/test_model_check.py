"""Whether a model can be loaded is found out without its weights in memory."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from firn import app
from firn.config import Config, load
from firn.core.errors import SetupError
from tests import zoo


def config_of(folder: Path) -> Config:
    return load({"model.path": str(folder)}, environ={}, file=None)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "deepseek_v32"])
def test_a_sound_model_passes_and_takes_no_memory(tmp_path: Path, name: str) -> None:
    zoo.write_folder(name, tmp_path)
    weights = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    app.check(config_of(tmp_path))
    assert mx.get_peak_memory() - before < weights / 4


def test_what_prevents_loading_is_found(tmp_path: Path) -> None:
    zoo.write_folder("llama", tmp_path)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text())

    def refuses(what: str, **changed: object) -> None:
        config.write_text(json.dumps({**settings, **changed}))
        with pytest.raises(SetupError, match=what):
            app.check(config_of(tmp_path))

    refuses("cannot be loaded", num_hidden_layers=settings["num_hidden_layers"] + 1)
    refuses("cannot be loaded", hidden_size=settings["hidden_size"] * 2)
    config.write_text(json.dumps(settings))
    app.check(config_of(tmp_path))
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.rename(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="tokenizer"):
        app.check(config_of(tmp_path))
    (tmp_path / "elsewhere").rename(tokenizer)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SetupError, match="cannot be loaded"):
        app.check(config_of(tmp_path))
