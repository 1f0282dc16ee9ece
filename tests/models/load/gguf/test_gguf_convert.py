"""A converted folder is the model that the GGUF file was made from: numbers, answers, tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, pre_tokenizers

from firn.models.load.gguf import UnreadableGguf, convert
from firn.models.load.loader import load_tokenizer
from tests.api.real import serving
from tests.models.load.gguf import tiny_gguf
from tests.models.load.gguf.tiny_gguf import TINY, Kind, Tiny

PROMPT = mx.array([[1, 9, 77, 140, 33, 8, 300, 10, 11, 12, 13, 14]])
EXACT = Tiny(Kind.F32, Kind.F32)


def converted(tmp_path: Path, tiny: Tiny = TINY, **changes: Any) -> Path:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", tiny, **changes)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(source.read_bytes(), folder, progress=lambda done, total: None)
    return folder


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(PROMPT).astype(mx.float32))


def test_logits_are_those_of_the_original_weights(tmp_path: Path) -> None:
    """Bit for bit: a wrong order of q or k rows, or one wrong tensor, would show here."""
    model, _ = load_model(converted(tmp_path, EXACT))
    assert np.array_equal(logits(model), logits(tiny_gguf.reference(EXACT)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("matrices", [Kind.Q4_1, Kind.Q8_0])
def test_quantised_weights_are_the_same_numbers(tmp_path: Path, matrices: Kind, tied: bool) -> None:
    tiny = Tiny(matrices, tied=tied)
    folder = converted(tmp_path, tiny)
    arrays = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())["quantization"]
    for name, expected in tiny.weights().items():
        array = arrays.pop(f"{name}.weight")
        if tiny.kind(name) is not Kind.F32:
            scales, biases = arrays.pop(f"{name}.scales"), arrays.pop(f"{name}.biases")
            layer = config | config.get(name, {})
            array = mx.dequantize(
                array, scales, biases, group_size=layer["group_size"], bits=layer["bits"]
            )
        assert array.dtype == mx.float32
        assert np.array_equal(np.array(array), expected), name
    assert not arrays
    model, _ = load_model(folder)
    assert np.abs(logits(model) - logits(tiny_gguf.reference(tiny))).max() < 1e-4


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    seen: list[tuple[int, int]] = []
    convert(source.read_bytes(), folder, progress=lambda *at: seen.append(at))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


# --- words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", " ", "Hello world", "the 2024 report, page 17", "a  b\n\n  c\t", "don't", "Grüße, 世界 🙂",
     "x=1234567890;", "<|im_start|>user\nhi<|im_end|>\n"],
)  # fmt: skip
def test_tokens_are_those_of_the_tokenizer_it_was_made_from(tmp_path: Path, text: str) -> None:
    original = Tokenizer.from_str(tiny_gguf.tokenizer_json())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made = load_tokenizer(converted(tmp_path))
    ids = made.encode(text, add_special=True)
    assert ids == original.encode(text).ids
    assert made.decode(ids) == text


def test_control_tokens_and_the_chat_template_are_converted(tmp_path: Path) -> None:
    made = load_tokenizer(converted(tmp_path))
    tokens = tiny_gguf.vocabulary()
    assert made.eos == {tokens.index("<|im_end|>")}
    assert made.special == {tokens.index(token) for token in tiny_gguf.SPECIAL}
    text = made.render([{"role": "user", "content": "hi"}], tools=None, kwargs={})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (first, *_) = made.encode(text, add_special=False)
    assert first == tokens.index("<|im_start|>")


def test_user_defined_tokens_are_added_but_not_special(tmp_path: Path) -> None:
    types = [
        4 if t == "<think>" else 3 if t in tiny_gguf.SPECIAL else 1 for t in tiny_gguf.vocabulary()
    ]
    made = load_tokenizer(converted(tmp_path, **{"tokenizer.ggml.token_type": types}))
    think = tiny_gguf.vocabulary().index("<think>")
    assert made.encode("a<think>b", add_special=False).count(think) == 1
    assert think not in made.special


# --- the whole -----------------------------------------------------------------------------


def test_the_folder_is_served(tmp_path: Path) -> None:
    with serving(converted(tmp_path)) as real:
        reply = real.openai().chat.completions.create(
            model="", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=4
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens > 0


def test_recommended_sampling_is_written(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    convert(source.read_bytes(), tmp_path, progress=lambda *at: None, sampling={"temperature": 0.2})
    written = json.loads((tmp_path / "generation_config.json").read_text())
    eos = tiny_gguf.vocabulary().index("<|im_end|>")
    assert written == {
        "bos_token_id": eos - 1, "eos_token_id": eos, "pad_token_id": eos, "temperature": 0.2
    }  # fmt: skip


# --- what is refused -----------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"llama.expert_count": 8}, "mixture of experts"),
    ({"split.count": 2}, "one part of several"),
    ({"llama.rope.scaling.type": "yarn"}, "scaled"),
    ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing"),
    ({"llama.block_count": 1}, "what the tensor blk.1."),
    ({"llama.embedding_length": 32}, "has the shape"),
    ({"llama.attention.head_count_kv": None}, "has the shape"),
    ({"llama.attention.head_count": None}, "llama.attention.head_count"),
    ({"llama.attention.head_count": 0}, "0 attention heads"),
    ({"llama.rope.dimension_count": 7}, "heads of width 7"),
    ({"tokenizer.ggml.model": "llama"}, "its tokenizer is llama, smollm"),
    ({"tokenizer.ggml.pre": "qwen2"}, "its tokenizer is gpt2, qwen2"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
    ({"tokenizer.ggml.add_bos_token": True}, "before every text"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "without a type"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "does not fit its merges"),
    ({"tokenizer.ggml.eos_token_id": 384}, "is 384, which is none of its 384 tokens"),
    ({"tokenizer.ggml.padding_token_id": -1}, "is -1, which is none of its 384 tokens"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnreadableGguf) as caught:
        converted(tmp_path, **changes)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert list((tmp_path / "folder").iterdir()) == []  # nothing is written before all is checked


def test_another_architecture_or_type_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()
    with pytest.raises(UnreadableGguf, match="it is gemma; firn converts dense llama models"):
        convert(source.replace(b"llama", b"gemma", 1), tmp_path, progress=lambda *at: None)
    six = tiny_gguf.write(tmp_path / "six.gguf", Tiny(Kind.F16)).read_bytes()
    with pytest.raises(UnreadableGguf, match="is of type F16; firn converts F32, Q4_1, Q8_0"):
        convert(six, tmp_path, progress=lambda *at: None)
