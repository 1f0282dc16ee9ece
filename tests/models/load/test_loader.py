"""A good folder loads; whatever is wrong with another one is reported in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from firn.core.errors import SetupError
from firn.models.load.loader import load, load_tokenizer, read_config, resolve
from firn.models.load.recognise import DEFAULT_CONTEXT, context_length
from tests.zoo import VOCAB_SIZE, build, write_folder

PROMPT = [[20, 30, 40, 50]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_folder("qwen3", folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def fault(action: Callable[[], object]) -> str:
    with pytest.raises(SetupError) as caught:
        action()
    assert caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


# --- what loads ----------------------------------------------------------------------------


def test_a_good_folder_is_described(pristine: Path) -> None:
    loaded = load(pristine, served_name="mine")
    info = loaded.info
    assert (info.name, info.path, info.architecture) == ("mine", str(pristine), "qwen3")
    assert (info.context_length, info.vocab_size, info.dtype) == (4096, VOCAB_SIZE, "float32")
    assert info.layer_kinds == ("KVCache",) * 3
    assert (info.batchable, info.unbatchable_why) == (True, None)
    weights = tree_flatten(build("qwen3").parameters())
    assert info.weights_nbytes == sum(w.nbytes for _, w in weights)
    assert len(info.fingerprint) == 32
    assert [layer.offset for layer in loaded.probe] == [1, 1, 1]
    assert [layer.offset for layer in loaded.make_layers()] == [0, 0, 0]
    same = loaded.model(mx.array(PROMPT)) == build("qwen3")(mx.array(PROMPT))
    assert mx.all(same).item()


def test_a_model_whose_layers_cannot_batch_says_why(tmp_path: Path) -> None:
    write_folder("llama4", tmp_path / "llama4")
    info = load(tmp_path / "llama4", served_name="x").info
    assert not info.batchable
    assert info.unbatchable_why is not None
    assert "ChunkedKVCache" in info.unbatchable_why


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"max_position_embeddings": 1000}, 1000),
        ({"n_positions": 10}, 10),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({"max_position_embeddings": 5, "text_config": {"max_position_embeddings": 7}}, 5),
        ({"max_position_embeddings": None}, DEFAULT_CONTEXT),
        ({"max_position_embeddings": "many"}, DEFAULT_CONTEXT),
        ({"text_config": None}, DEFAULT_CONTEXT),
        ({}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_length_is_the_configs(config: dict[str, Any], want: int) -> None:
    assert context_length(config) == want


# --- names ---------------------------------------------------------------------------------


def test_a_local_folder_resolves_to_itself(pristine: Path) -> None:
    assert resolve(str(pristine)) == pristine


def test_a_file_is_refused(pristine: Path) -> None:
    assert "is a file" in fault(lambda: resolve(str(pristine / "config.json")))


@pytest.mark.parametrize(
    "name", ["nothing", "./not/there", "/not/there", "~/not-there", "a/b/c", "..", "hf:a/b/c"]
)
def test_a_name_that_is_neither_path_nor_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "..":
        assert "no config.json" in fault(lambda: read_config(resolve(name)))
    else:
        assert name in fault(lambda: resolve(name))


def offline(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as the hub's library reads its settings when it is imported."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    env.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


RESOLVE = (
    "from firn.core.errors import SetupError\n"
    "from firn.models.load.loader import resolve\n"
    "for name in {names!r}:\n"
    "    try:\n        print('found', resolve(name))\n"
    "    except SetupError as e:\n        print('fault', e.message)\n"
)


def test_offline_a_hub_id_is_found_or_refused(tmp_path: Path) -> None:
    """A model that was fetched before is found; one that was not is reported in one line."""
    repo = tmp_path / "hub" / "models--owner--here"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    (repo / "snapshots" / "abc123").mkdir(parents=True)
    (repo / "snapshots" / "abc123" / "config.json").write_text("{}")
    run = offline(RESOLVE.format(names=["owner/here", "owner/gone", "owner/a b"]), tmp_path)
    assert run.returncode == 0, run.stderr
    assert "was interrupted" not in run.stderr, "nothing is tried again"
    here, gone, odd = run.stdout.splitlines()
    assert here == f"found {repo / 'snapshots' / 'abc123'}"
    assert gone == "fault owner/gone is not on this machine and HF_HUB_OFFLINE forbids fetching it."
    assert odd.startswith("fault owner/a b could not be fetched")


# --- broken folders -------------------------------------------------------------------------


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    for action in (
        lambda: read_config(tmp_path),
        lambda: load(tmp_path, served_name="x"),
        lambda: load_tokenizer(tmp_path),
    ):
        assert "no config.json" in fault(action)


@pytest.mark.parametrize("text", ["{", "", "[]", "5", '"qwen3"', "{}", '{"model_typ": "x"}'])
def test_a_config_without_a_model_type_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in fault(lambda: load(folder, served_name="x"))


def test_an_unreadable_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json" in fault(lambda: read_config(folder))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in fault(lambda: read_config(folder))


@pytest.mark.parametrize("kind", ["zork", "base", "../qwen3", 5, None, ["qwen3"]])
def test_an_unknown_architecture_is_refused(folder: Path, kind: object) -> None:
    edit_json(folder / "config.json", model_type=kind)
    assert "cannot be loaded" in fault(lambda: load(folder, served_name="x"))


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "weights are missing" in fault(lambda: load(folder, served_name="x"))
    odd = folder.rename(folder.with_name("model [4bit]"))
    assert "rename it" in fault(lambda: load(odd, served_name="x")), "mlx-lm reads it as a pattern"


def test_a_missing_shard_is_named(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-00002-of-00003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "model-00002-of-00003.safetensors" in fault(lambda: load(folder, served_name="x"))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": null}', '{"weight_map": {"a": 5}}',
             '{"weight_map": {"a": ["x"]}}'],
)  # fmt: skip
def test_a_damaged_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "index.json" in fault(lambda: load(folder, served_name="x"))


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors" in fault(lambda: load(folder, served_name="x"))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 96},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": "three"},
        {"num_attention_heads": 0},
        {"vocab_size": None},
        {"rope_scaling": {"type": "no such thing"}},
        {"quantization": {"bits": 4}},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    folder: Path, changes: dict[str, Any]
) -> None:
    edit_json(folder / "config.json", **changes)
    assert "qwen3" in fault(lambda: load(folder, served_name="x"))


def test_an_incomplete_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert "cannot be loaded" in fault(lambda: load(folder, served_name="x"))


def test_a_model_that_fails_at_its_first_token_is_refused(folder: Path) -> None:
    broken = (
        "from mlx_lm.models.qwen3 import Model as Base, ModelArgs\n"
        "class Model(Base):\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        raise RuntimeError('no back-end\\nfor this')\n"
    )
    (folder / "model.py").write_text(broken)
    edit_json(folder / "config.json", model_file="model.py")
    message = fault(lambda: load(folder, served_name="x", trust_remote_code=True))
    assert message.endswith("does not run on this machine: no back-end")


# --- custom code ---------------------------------------------------------------------------

CUSTOM = "from mlx_lm.models.qwen3 import Model, ModelArgs\n"


def test_custom_code_needs_trust(folder: Path) -> None:
    proof = folder / "ran"
    (folder / "model.py").write_text(f"open({str(proof)!r}, 'w')\n{CUSTOM}")
    edit_json(folder / "config.json", model_file="model.py")
    message = fault(lambda: load(folder, served_name="x"))
    assert "trust" in message
    assert not proof.exists(), "it was run all the same"
    assert load(folder, served_name="x", trust_remote_code=True).info.vocab_size == VOCAB_SIZE
    assert proof.exists()


@pytest.mark.parametrize(
    "code", ["import no_such_module", "def (", "x = y", "1 / 0", "", "raise SystemExit(3)"]
)
def test_custom_code_that_fails_is_refused(folder: Path, code: str) -> None:
    (folder / "model.py").write_text(code)
    edit_json(folder / "config.json", model_file="model.py")
    message = fault(lambda: load(folder, served_name="x", trust_remote_code=True))
    assert "cannot be loaded" in message


def test_missing_custom_code_is_named(folder: Path) -> None:
    edit_json(folder / "config.json", model_file="model.py")
    assert "model.py" in fault(lambda: load(folder, served_name="x", trust_remote_code=True))


# --- adapters ------------------------------------------------------------------------------

LORA = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}


def write_adapter(path: Path, *, seed: int, **changes: Any) -> Path:
    model = build("qwen3")
    linear_to_lora_layers(model, 3, LORA)
    adapters = {k: v for k, v in tree_flatten(model.parameters()) if "lora" in k}
    key = mx.random.key(seed)
    adapters = {k: mx.random.normal(v.shape, key=key) for k, v in adapters.items()}
    path.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / "adapters.safetensors"), adapters)
    config = {"fine_tune_type": "lora", "num_layers": 3, "lora_parameters": LORA, **changes}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_an_adapter_changes_the_answer_and_the_fingerprint(pristine: Path, tmp_path: Path) -> None:
    base = load(pristine, served_name="x")
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    adapted = load(pristine, served_name="x", adapter=adapter)
    write_adapter(tmp_path / "adapter", seed=2)
    replaced = load(pristine, served_name="x", adapter=adapter)
    models = (base, adapted, replaced)
    assert len({m.info.fingerprint for m in models}) == 3
    logits = [m.model(mx.array(PROMPT))[0, -1] for m in models]
    assert mx.abs(logits[0] - logits[1]).max().item() > 0.1
    assert mx.abs(logits[1] - logits[2]).max().item() > 0.1
    again = load(pristine, served_name="x", adapter=adapter)
    assert again.info.fingerprint == replaced.info.fingerprint
    assert mx.array_equal(again.model(mx.array(PROMPT))[0, -1], logits[2])


def test_a_bad_adapter_is_refused(pristine: Path, tmp_path: Path) -> None:
    def loading(adapter: Path) -> Callable[[], object]:
        return lambda: load(pristine, served_name="x", adapter=adapter)

    assert "no adapter_config.json" in fault(loading(tmp_path / "not-there"))
    (tmp_path / "empty").mkdir()
    assert "no adapter_config.json" in fault(loading(tmp_path / "empty"))
    broken = write_adapter(tmp_path / "broken", seed=1)
    (broken / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in fault(loading(broken))
    missing = write_adapter(tmp_path / "missing", seed=1)
    (missing / "adapters.safetensors").unlink()
    fault(loading(missing))
    fault(loading(write_adapter(tmp_path / "rank", seed=1, lora_parameters={**LORA, "rank": 9})))
    fault(loading(write_adapter(tmp_path / "alpha", seed=1, lora_parameters={"alpha": 2})))
    fault(loading(write_adapter(tmp_path / "layers", seed=1, num_layers="all")))


# --- tokenizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": "1.0"}', "\x00\x01"])
def test_a_damaged_tokenizer_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    message = fault(lambda: load_tokenizer(folder))
    assert message.startswith(f"{folder}: The tokenizer cannot be loaded")


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    fault(lambda: load_tokenizer(folder))


def test_a_damaged_tokenizer_config_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    fault(lambda: load_tokenizer(folder))


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 7]}, None, {2, 7}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 9]}, {2, 9}),
        ({"eos_token_id": None}, None, {2}),
    ],
)
def test_end_tokens_come_from_config_and_tokenizer(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, want: set[int]
) -> None:
    edit_json(folder / "config.json", **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_tokenizer(folder).eos == want
