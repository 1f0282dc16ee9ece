"""Vision checkpoints: recognised by their config alone, loaded once, refused in one line.

Slow: one test imports every family of mlx-vlm.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models import cache as vlm_cache

from firn.cache.layout import Layout
from firn.core.errors import SetupError
from firn.models.load import loader
from firn.models.load.inspect import inspect_folder
from firn.models.load.recognise import is_vision
from firn.models.vision import load as vision_load
from firn.models.vision.picture import Features
from tests.models.vision import gallery
from tests.zoo import ZOO
from tests.zoo.vision import REFUSED_VISION, VISION
from tests.zoo.vision_parts import VOCAB_SIZE


@pytest.mark.parametrize("name", VISION)
def test_vision_checkpoints_are_recognised(name: str) -> None:
    assert is_vision(VISION[name].config)


@pytest.mark.parametrize("name", ZOO)
def test_text_checkpoints_are_not(name: str) -> None:
    assert not is_vision(ZOO[name].config)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "qwen3_5", "vision_config": None}, False),
        ({"model_type": "qwen3_5", "vision_config": {}}, False),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}, "skip_vision": True}, False),
        ({"model_type": "phi3_v", "img_processor": {"name": "clip"}}, True),
        ({"model_type": "phi3_v"}, True),
        ({"model_type": "llava_qwen2", "mm_vision_tower": "x"}, True),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"vision_config": {"a": 1}}}, True),
        ({"model_type": "deepseek_v4", "vision_n_layers": 4}, True),
        ({"model_type": "deepseek_v4"}, False),
        ({}, False),
    ],
)
def test_odd_configs(config: dict[str, Any], want: bool) -> None:
    assert is_vision(config) is want


def test_every_family_of_mlx_vlm_with_a_tower_is_recognised() -> None:
    """Each family's configuration class says where its tower is described."""
    script = """
import importlib, inspect, json, pkgutil, mlx_vlm.models as m
found = {}
for info in pkgutil.iter_modules(m.__path__):
    try:
        module = importlib.import_module(f"mlx_vlm.models.{info.name}")
    except ImportError:
        continue
    config = getattr(module, "ModelConfig", None)
    speaks = hasattr(getattr(module, "Model", None), "get_input_embeddings")
    if config and hasattr(module, "VisionModel") and speaks:
        found[info.name] = list(inspect.signature(config).parameters)
print(json.dumps(found))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    families = json.loads(run.stdout.splitlines()[-1])
    assert len(families) > 50
    unknown = [
        name
        for name, fields in families.items()
        if not is_vision(
            {"model_type": name, **{f: {"vision_config": 1} for f in fields if f != "skip_vision"}}
        )
    ]
    assert unknown == []


@pytest.mark.parametrize("name", VISION)
def test_it_loads_and_describes_itself(name: str) -> None:
    picture = gallery.processor(name).example.inputs
    loaded = loader.load(gallery.folder(name), served_name="tiny", picture=picture)
    assert loaded.info.vision
    assert loaded.info.batchable, loaded.info.unbatchable_why
    assert loaded.info.whole_pictures == (name == "gemma4")
    assert loaded.info.dtype == "float32"
    assert loaded.arguments is loaded.model


def test_pictures_are_ready_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = copy_of("qwen2_5_vl", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    processor = loader.load_processor(folder, loader.load_tokenizer(folder))
    assert processor is not None


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = mx.load

    def noted(file: Any, *args: Any, **options: Any) -> Any:
        read.append(Path(file).name)
        return load(file, *args, **options)

    monkeypatch.setattr(mx, "load", noted)
    load_all(gallery.folder("qwen2_5_vl"))
    assert read == ["model.safetensors"]


def test_its_records_are_its_own() -> None:
    """The same weights through mlx-lm are another model to the cache."""
    name = "qwen3_5"
    picture = gallery.processor(name).example.inputs
    seeing = loader.load(gallery.folder(name), served_name="tiny", picture=picture)
    blind = loader.load(gallery.folder(name), served_name="tiny")
    assert not blind.info.vision
    assert seeing.info.fingerprint != blind.info.fingerprint


def test_its_records_can_be_kept_quantised() -> None:
    model, make_layers = gallery.build("qwen3_5")()
    layers = make_layers()
    mx.eval(model(mx.array([[70, 77]]), cache=layers))
    assert Layout.of(layers).text == "arrays2,arrays2,arrays2,kv"
    wide = vlm_cache.KVCache()
    wide.update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
    assert Layout.of([wide], kv_bits=8, kv_group_size=64).text == "kv~8x64"


# --- what is wrong is one line ---------------------------------------------------------------


def copy_of(name: str, path: Path) -> Path:
    shutil.copytree(gallery.folder(name), path, dirs_exist_ok=True)
    return path


def load_all(folder: Path) -> None:
    tokenizer = loader.load_tokenizer(folder)
    processor = loader.load_processor(folder, tokenizer)
    assert processor is not None
    loader.load(folder, served_name="tiny", picture=processor.example.inputs)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"size": "large", "patch_size": "x"}', "null"])
def test_damaged_processor_files(tmp_path: Path, file: str, content: str) -> None:
    folder = copy_of("gemma3", tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(SetupError) as fault:
        load_all(folder)
    assert "\n" not in fault.value.message
    assert "processor" in fault.value.message or "pictures" in fault.value.message


def test_no_processor_at_all(tmp_path: Path) -> None:
    folder = copy_of("gemma3", tmp_path / "model")
    for file in ("preprocessor_config.json", "processor_config.json"):
        (folder / file).unlink()
    with pytest.raises(SetupError, match="processor"):
        load_all(folder)


def test_a_family_that_nobody_knows(tmp_path: Path) -> None:
    folder = copy_of("llava", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "telepathy"}))
    with pytest.raises(SetupError, match="telepathy"):
        load_all(folder)


def test_a_missing_tensor(tmp_path: Path) -> None:
    folder = copy_of("llava", tmp_path / "model")
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file))
    del weights["multi_modal_projector.linear_1.weight"]
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    with pytest.raises(SetupError, match="cannot be loaded") as fault:
        load_all(folder)
    assert "\n" not in fault.value.message


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = copy_of("llava", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    tokenizer = loader.load_tokenizer(gallery.folder("llava"))
    with pytest.raises(SetupError, match="trust-remote-code"):
        loader.load_processor(folder, tokenizer)


@pytest.mark.parametrize("name", REFUSED_VISION)
def test_a_family_that_cannot_be_driven_in_chunks(name: str) -> None:
    with pytest.raises(SetupError, match=f"^{name}: its pictures cannot be served .*--text-only"):
        load_all(gallery.folder(name))


def test_pictures_that_come_out_wrong_are_refused() -> None:
    """A model that mixes up its chunks is caught by the check at load."""
    name = "qwen2_5_vl"
    picture = gallery.processor(name).example.inputs
    model, _ = gallery.build(name)()
    vision_load.check_pictures(model, picture, name)
    rope = model._rope
    rope.chunk = lambda prompt, start, end: rope.of_text(model.make_cache(), end - start)
    with pytest.raises(SetupError, match="--text-only"):
        vision_load.check_pictures(model, picture, name)


def test_pictures_that_come_out_as_no_numbers_are_refused() -> None:
    name = "qwen2_5_vl"
    picture = gallery.processor(name).example.inputs
    model, _ = gallery.build(name)()
    run_tower = model.run_tower
    model.run_tower = lambda picture: Features(run_tower(picture).embeds * mx.nan)
    with pytest.raises(SetupError, match="comes out different"):
        vision_load.check_pictures(model, picture, name)


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    """In a process that has neither mlx-vlm nor Pillow; text models do not miss them."""
    script = f"""
import importlib.util, sys
def is_gone(name):
    return name.split(".")[0] in ("mlx_vlm", "PIL")
class Gone:
    def find_spec(self, name, path=None, target=None):
        if is_gone(name):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if is_gone(name) else find_spec(name, *a)
from pathlib import Path
from firn.models.load import loader
import firn.app
folder = Path({str(gallery.folder("qwen3_5"))!r})
tokenizer = loader.load_tokenizer(folder)
try:
    loader.load_processor(folder, tokenizer)
except Exception as e:
    print("said:", e)
print("text:", loader.load(folder, served_name="x").info.vision)
print("loaded:", [m for m in ("mlx_vlm", "PIL") if m in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert "pip install 'firn[vision]'" in lines["said"]
    assert "--text-only" in lines["said"]
    assert lines["text"] == "False"
    assert lines["loaded"] == "[]"


def test_doctor_knows_a_vision_folder() -> None:
    report = inspect_folder(gallery.folder("qwen3_5"))
    assert report.library == "mlx-vlm"
    assert report.problems == ()


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_the_size_of_pictures_is_a_setting_of_the_processor(name: str, tmp_path: Path) -> None:
    """The same number of tokens but other pixels: it must not be taken for the same picture."""

    def settings(folder: Path) -> bytes:
        processor = loader.load_processor(folder, loader.load_tokenizer(folder))
        assert processor is not None
        return processor.settings

    folder = Path(shutil.copytree(gallery.folder(name), tmp_path / "model"))
    before = settings(folder)
    assert settings(folder) == before
    path = folder / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config["size"] = {side: n + 8 for side, n in config["size"].items()}
    path.write_text(json.dumps(config))
    assert settings(folder) != before


@gallery.every_family
def test_a_token_in_a_text_is_the_same_by_ids_and_by_embeddings(name: str) -> None:
    """A reply may contain the id that stands for a picture; the next turn reads it beside a picture."""
    model, make_cache = gallery.build(name)()
    for first in range(0, VOCAB_SIZE, 32):
        ids = mx.arange(first, first + 32)[None]
        features = model.text_features(ids)
        given = {} if features.per_layer is None else {"per_layer_inputs": features.per_layer}
        by_ids = model(ids, cache=make_cache())
        by_embeds = model(ids, cache=make_cache(), inputs_embeds=features.embeds, **given)
        assert mx.array_equal(by_ids, by_embeds), f"tokens from {first}"
