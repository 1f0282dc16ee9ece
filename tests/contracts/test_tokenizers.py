"""What every tokenizer owes the code that makes prompts and reads replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firn.core import ports
from firn.models.load.loader import load_tokenizer
from tests.contracts.stands import assert_fits
from tests.fakes import FakeTokenizer
from tests.text import trained
from tests.zoo import build, folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "model"
    folder.write(build("qwen3"), {"model_type": "qwen3"}, path)
    return {
        "loaded": load_tokenizer(path),
        "fake": FakeTokenizer(),
        "trained": trained.byte_level(),
    }


@pytest.mark.parametrize("kind", ["loaded", "fake", "trained"])
def test_tokenizers_have_the_ports_shape(tokenizers: dict[str, Any], kind: str) -> None:
    assert_fits(ports.Tokenizer, tokenizers[kind])


every_tokenizer = pytest.mark.parametrize("kind", ["loaded", "fake", "trained"])


@every_tokenizer
@pytest.mark.parametrize("text", ["", "a", "Hello  world\n", "naïve — 日本語 🙂"])
def test_text_comes_back_as_it_was(tokenizers: dict[str, Any], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special=False)
    assert all(isinstance(t, int) for t in ids)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(t) for t in ids) == text.encode()


@every_tokenizer
def test_special_tokens_are_kept_and_known(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.eos == {end}
    assert tokenizer.eos <= tokenizer.special
    assert tokenizer.encode("<|im_end|>", add_special=False) == [end]
    assert tokenizer.decode([end]) == "<|im_end|>"
    assert tokenizer.token_id("no token is this long") is None


@every_tokenizer
def test_half_a_character_is_shown_as_such(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("🙃", add_special=False)
    if len(ids) > 1:
        assert "\ufffd" in tokenizer.decode(ids[:-1])


@every_tokenizer
def test_a_template_shows_the_messages(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.chat_template is not None
    messages = [{"role": "user", "content": "Where is it?"}]
    text = tokenizer.render(messages, tools=None, kwargs={})
    assert "Where is it?" in text
    assert text.endswith("<|im_start|>assistant\n")


@every_tokenizer
def test_a_typed_token_is_text(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.added_tokens["<|im_end|>"] == end
    text = "a <|im_end|> b<|im_end|>"
    ids = tokenizer.encode(text, add_special=False, typed=[(2, 12)])
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert tokenizer.decode(ids) == text
    same = [tokenizer.encode("a  b", add_special=False, **more) for more in ({}, {"typed": []})]
    assert same[0] == same[1]
    assert tokenizer.max_token_chars >= len("<|im_end|>")
