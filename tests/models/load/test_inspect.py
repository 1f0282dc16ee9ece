"""What `models.load.inspect` finds in whole and in broken model folders, on tiny random models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, mamba2, qwen3

from firn.core.errors import SetupError
from firn.models.load.inspect import CacheCost, inspect_folder, local_folder

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
WINDOW = {"sliding_window": 512, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
MAMBA = {
    "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4, "n_groups": 1,
    "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 1e9],
    "time_step_rank": 4, "expand": 2, "layer_norm_epsilon": 1e-5, "time_step_min": 0.001,
    "time_step_max": 0.1, "chunk_size": 64,
}  # fmt: skip


def write(
    folder: Path, module: Any, name: str, *, dtype: mx.Dtype = mx.float32, **own: Any
) -> Path:
    config = {"model_type": name, **BASE, **own}
    model = module.Model(module.ModelArgs.from_dict(config))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    weights = {k: v.astype(dtype) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    return write(folder, qwen3, "qwen3", dtype=mx.bfloat16)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def test_a_whole_folder_is_described_without_problems(whole: Path) -> None:
    report = inspect_folder(whole)
    assert report.problems == ()
    assert report.notes == ()
    assert (report.architecture, report.library) == ("qwen3", "mlx-lm")
    assert report.dtype == "bfloat16"
    assert report.context_length == 2048
    weights = mx.load(str(whole / "model.safetensors"))
    assert report.weights_nbytes == sum(tensor.nbytes for tensor in weights.values())
    # keys and values, 2 layers, 2 heads of 16, 2 bytes each
    cost = CacheCost(2 * 2 * 2 * 16 * 2, fixed_nbytes=0, n_layers=2, n_window=0, n_state=0)
    assert report.cache == cost
    assert cost.nbytes(10) == 2560


def test_windows_cost_a_fixed_amount(tmp_path: Path) -> None:
    report = inspect_folder(write(tmp_path / "m", gemma3_text, "gemma3_text", **WINDOW))
    per_layer = 2 * 2 * 16 * 4
    assert report.problems == ()
    assert report.cache == CacheCost(per_layer, 512 * per_layer, n_layers=2, n_window=1, n_state=0)


def test_recurrent_states_cost_a_fixed_amount(tmp_path: Path) -> None:
    report = inspect_folder(write(tmp_path / "m", mamba2, "mamba2", **MAMBA))
    assert report.problems == ()
    assert report.cache is not None
    assert report.cache.per_token_nbytes == 0
    assert report.cache.fixed_nbytes > 0
    assert report.cache.n_state == report.cache.n_layers == 2


def test_a_quantised_model_says_how(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_folder(folder).dtype == "4-bit weights in groups of 64, bfloat16"


def test_a_base_model_is_no_problem(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    report = inspect_folder(folder)
    assert report.problems == ()
    assert "no chat template" in report.notes[0]
    (folder / "chat_template.jinja").write_text("x")
    assert inspect_folder(folder).notes == ()


def test_code_in_the_folder_is_pointed_out_and_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    (folder / "evil.py").write_text("raise SystemExit('run')")
    report = inspect_folder(folder)
    assert report.problems == ()
    assert report.cache is None
    assert "--trust-remote-code" in report.notes[0]


# --- broken folders ------------------------------------------------------------------------


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def config_without_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def config_lacks_a_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


def strange_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "never_heard_of"}')


def name_that_is_none(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "../.."}')


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def tokenizer_settings_broken(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damaged_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"?" + path.read_bytes()[9:])


def lfs_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


def index_names_a_missing_file(folder: Path) -> None:
    places = {f"t{i}": f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)}
    _write_index(folder, places)


def index_names_a_missing_tensor(folder: Path) -> None:
    _write_index(folder, {"model.nowhere": "model.safetensors"})


def index_is_broken(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def part_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def tensor_is_missing(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    mx.eval(weights)
    del weights["model.norm.weight"]
    mx.save_safetensors(path, weights)


def tensor_has_another_shape(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    mx.eval(weights)
    mx.save_safetensors(path, weights | {"model.norm.weight": mx.zeros((7,))})


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (no_config, "no config.json"),
        (config_is_no_json, "config.json cannot be read"),
        (config_without_type, "has no model_type"),
        (config_lacks_a_key, "mlx-lm cannot build it"),
        (strange_architecture, "'never_heard_of' is not known to the installed mlx-lm"),
        (name_that_is_none, "is not known to the installed mlx-lm"),
        (no_tokenizer, "The tokenizer is missing"),
        (tokenizer_settings_broken, "tokenizer_config.json cannot be read"),
        (no_weights, "The weights are missing"),
        (cut_off, "model.safetensors: has "),
        (cut_in_the_header, "model.safetensors: is truncated or not a safetensors file"),
        (empty_file, "model.safetensors: is truncated or not a safetensors file"),
        (damaged_header, "model.safetensors: has a damaged header"),
        (lfs_pointer, "git lfs pull"),
        (index_names_a_missing_file, "5 of 5 weight files are missing: model-00001-of-00005"),
        (index_names_a_missing_tensor, "1 tensors are not in the files that the index names"),
        (index_is_broken, "model.safetensors.index.json cannot be read"),
        (part_is_missing, "1 of 2 weight files are missing: model-00002-of-00002.safetensors"),
        (tensor_is_missing, "mlx-lm cannot build it: Missing 1 parameters"),
        (tensor_has_another_shape, "mlx-lm cannot build it: "),
    ],
)
def test_what_is_broken_in_a_folder_is_named(
    folder: Path, break_it: Callable[[Path], None], problem: str
) -> None:
    break_it(folder)
    problems = inspect_folder(folder).problems
    assert any(problem in line for line in problems), problems
    assert all("\n" not in line for line in problems)


def test_all_faults_are_told_at_once(folder: Path) -> None:
    no_tokenizer(folder)
    cut_off(folder)
    assert len(inspect_folder(folder).problems) == 2


def test_no_folder_and_a_file_are_told_apart(tmp_path: Path) -> None:
    assert "There is no folder" in inspect_folder(tmp_path / "none").problems[0]
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in inspect_folder(file).problems[0]


# --- names and devices ---------------------------------------------------------------------


def test_a_name_is_a_folder_or_a_hub_id(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("./none") == Path("none")
    assert local_folder("a/b/c") == Path("a/b/c")
    assert local_folder("firn-tests/no-such-model") is None
    with pytest.raises(SetupError, match="neither a folder nor a hub id"):
        local_folder("not an id!")
