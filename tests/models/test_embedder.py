"""Embeddings of real (tiny) models: pooling as the folder says, batched as if alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from firn.core.errors import BadRequest, SetupError
from firn.models import embedder
from firn.models.embedder import Recipe
from tests.zoo import VOCAB_SIZE, build, write_folder
from tests.zoo.folder import tokenizer_json

TEXTS = [[20, 30, 40], [50], [60, 70, 80, 90, 100, 110, 120], [130, 140]]


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_N"}
    return [
        {"idx": i, "type": f"sentence_transformers.models.{kind}", "path": paths[kind]}
        for i, kind in enumerate(kinds)
    ]


# --- what the folder says ------------------------------------------------------------------


def test_a_folder_without_pooling_has_no_recipe(tmp_path: Path) -> None:
    assert embedder.read_recipe(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_pooling_modes_are_read(tmp_path: Path, config: Any, pooling: str) -> None:
    write(tmp_path, "1_Pooling/config.json", config)
    recipe = embedder.read_recipe(tmp_path)
    assert recipe is not None
    assert (recipe.pooling, recipe.normalises, recipe.dense) == (pooling, True, ())


def test_modules_make_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", modules("Transformer", "Pooling", "Dense"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 100})
    assert embedder.read_recipe(tmp_path) == Recipe(
        "mean", dense=(tmp_path / "2_Dense",), normalises=False, max_tokens=100
    )


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "magic"},
    ],
)
def test_pooling_that_firn_cannot_do_is_refused(tmp_path: Path, config: Any) -> None:
    write(tmp_path, "1_Pooling/config.json", config)
    with pytest.raises(SetupError, match="not supported"):
        embedder.read_recipe(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(SetupError, match="cannot be read"):
        embedder.read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", 7),
        ("modules.json", [{"path": "1_Pooling"}]),
        ("modules.json", [{"type": "sentence_transformers.models.Pooling", "path": None}]),
        ("1_Pooling/config.json", [1]),
        ("1_Pooling/config.json", {"pooling_mode": []}),
        ("sentence_bert_config.json", {"max_seq_length": "long"}),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path: Path, name: str, content: Any) -> None:
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write(tmp_path, name, content)
    with pytest.raises(SetupError, match="cannot be parsed"):
        embedder.read_recipe(tmp_path)


def test_modules_that_firn_does_not_know_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write(
        tmp_path,
        "modules.json",
        [*modules("Transformer", "Pooling"), {"type": "x.LSTM", "path": "2"}],
    )
    with pytest.raises(SetupError, match="LSTM are not supported"):
        embedder.read_recipe(tmp_path)


# --- decoders ------------------------------------------------------------------------------


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    return np.array(model.model(mx.array([ids]))[0].astype(mx.float32))


POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda h: h.mean(axis=0),
    "lasttoken": lambda h: h[-1],
    "max": lambda h: h.max(axis=0),
    "cls": lambda h: h[0],
}


@pytest.mark.parametrize("pooling", POOLS)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "lfm2"])
def test_a_batch_is_what_each_text_is_alone(name: str, pooling: Any) -> None:
    model = build(name)
    made = embedder.from_decoder(model, Recipe(pooling, normalises=False), context_length=64)
    vectors = made.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        want = POOLS[pooling](hidden(model, text))
        np.testing.assert_allclose(vector, want, rtol=2e-4, atol=2e-5)
    assert made.n_dims == len(vectors[0]) == 64
    assert made.max_tokens == 64


def test_vectors_have_unit_length_also_when_cut() -> None:
    made = embedder.from_decoder(build("qwen3"), Recipe("mean"), context_length=64)
    for n_dims in (None, 10):
        for vector in made.embed(TEXTS, n_dims=n_dims):
            assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5)
            assert len(vector) == (n_dims or 64)


def test_dense_layers_are_applied(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(8, 64)), rng.normal(size=8)
    dense = tmp_path / "2_Dense"
    write(dense, "config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    tensors = {"linear.weight": mx.array(weight), "linear.bias": mx.array(bias)}
    mx.save_safetensors(str(dense / "model.safetensors"), tensors)
    model = build("qwen3")
    recipe = Recipe("mean", dense=(dense,), normalises=False)
    made = embedder.from_decoder(model, recipe, context_length=64)
    pooled = hidden(model, TEXTS[0]).mean(axis=0)
    want = np.tanh(weight @ pooled + bias)
    np.testing.assert_allclose(made.embed(TEXTS[:1])[0], want, rtol=1e-3, atol=1e-4)
    assert made.n_dims == 8


def test_an_unknown_activation_is_named(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"activation_function": "torch.nn.Swish"})
    with pytest.raises(SetupError, match="Swish"):
        embedder.from_decoder(build("qwen3"), Recipe("mean", dense=(tmp_path,)), context_length=64)


def test_an_architecture_without_hidden_states_is_refused() -> None:
    with pytest.raises(SetupError, match="does not expose its hidden states"):
        embedder.from_decoder(object(), Recipe("mean"), context_length=64)


# --- encoders ------------------------------------------------------------------------------

BERT = {
    "model_type": "bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = pytest.importorskip("mlx_vlm.models.bert")
    folder = tmp_path_factory.mktemp("bert")
    mx.random.seed(1)
    model = modules.Model(modules.ModelConfig.from_dict(BERT))
    weights = {name: mx.random.normal(w.shape) for name, w in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write(folder, "config.json", BERT)
    write(folder, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    (folder / "tokenizer.json").write_text(tokenizer_json())
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def test_an_encoder_is_known_by_its_folder(bert: Path, tmp_path: Path) -> None:
    write_folder("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert embedder.needs_encoder(bert, BERT)
    assert not embedder.needs_encoder(tmp_path, config)
    assert embedder.needs_encoder(tmp_path, config | {"use_bidirectional_attention": True})
    assert embedder.needs_encoder(tmp_path, config | {"is_causal": False})


def test_an_encoder_embeds_and_nothing_else(bert: Path) -> None:
    recipe = embedder.read_recipe(bert)
    assert recipe is not None
    made, info = embedder.load_encoder(bert, recipe, BERT, served_name="tiny")
    assert (made.n_dims, made.max_tokens, info.generates) == (32, 40, False)
    assert (info.name, info.vocab_size) == ("tiny", VOCAB_SIZE)
    together = made.embed(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(vector, made.embed([text])[0], rtol=1e-3, atol=1e-5)
        assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-5)
    with pytest.raises(BadRequest):
        embedder.refuse_to_generate()


def test_a_folder_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    write(tmp_path, "config.json", BERT)
    with pytest.raises(SetupError, match="cannot be loaded for embeddings"):
        embedder.load_encoder(tmp_path, Recipe("cls"), BERT, served_name="x")


def test_a_checkpoint_without_the_generators_prefix_embeds_the_same(tmp_path: Path) -> None:
    """As sentence-transformers saves them; mlx-lm cannot load those."""
    pytest.importorskip("mlx_vlm")
    write_folder("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {n.removeprefix("model."): w for n, w in mx.load(str(path)).items()}
    weights.pop("lm_head.weight", None)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    config = json.loads((tmp_path / "config.json").read_text())
    recipe = embedder.read_recipe(tmp_path)
    assert recipe is not None
    assert embedder.needs_encoder(tmp_path, config)
    made, _ = embedder.load_encoder(tmp_path, recipe, config, served_name="x")
    own = embedder.from_decoder(build("qwen3"), Recipe("lasttoken"), context_length=64)
    np.testing.assert_allclose(made.embed(TEXTS[:1]), own.embed(TEXTS[:1]), rtol=1e-3, atol=1e-4)
