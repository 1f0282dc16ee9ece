"""Models that embed, and options of the server, through the real clients of each API."""

from __future__ import annotations

from pathlib import Path

import anthropic
import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from firn.config import Config
from firn.core.errors import SetupError
from tests.api.real import serving
from tests.models.test_embedder import bert, write
from tests.whole_server import MEMORY, config
from tests.zoo import build, write_folder

__all__ = ["bert"]


# --- embeddings ----------------------------------------------------------------------------


def test_a_decoder_that_pools_also_generates(tmp_path: Path) -> None:
    write_folder("qwen3", tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    with serving(Path(), config=config(str(tmp_path))) as real:
        texts = ["The quick brown fox", "snow", "The server keeps what it has read"]
        found = real.openai().embeddings.create(model="", input=texts)
        model = build("qwen3")
        for text, item in zip(texts, found.data, strict=True):
            ids = real.tokenizer.encode(text, add_special=True)
            hidden = np.array(model.model(mx.array([ids]))[0, -1].astype(mx.float32))
            np.testing.assert_allclose(item.embedding, hidden / np.linalg.norm(hidden), atol=1e-4)
        cut = real.openai().embeddings.create(model="", input=texts[0], dimensions=8)
        assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
        assert real.openai().completions.create(model="", prompt="snow", max_tokens=3).choices


def test_an_encoder_refuses_to_generate(bert: Path) -> None:
    with serving(Path(), config=config(str(bert))) as real:
        found = real.openai().embeddings.create(model="", input=["snow", "ice and firn"])
        assert [len(item.embedding) for item in found.data] == [32, 32]
        with pytest.raises(openai.BadRequestError, match="cannot generate text"):
            real.openai().completions.create(model="", prompt="snow")
        with pytest.raises(anthropic.BadRequestError):
            real.anthropic().messages.create(
                model="claude", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )


def test_a_model_that_only_generates_makes_no_embeddings() -> None:
    with (
        serving(Path(), config=config("firn-demo")) as real,
        pytest.raises(openai.BadRequestError, match="its folder has no pooling configuration"),
    ):
        real.openai().embeddings.create(model="", input="snow")


# --- options -------------------------------------------------------------------------------


def test_parsers_and_origins_can_be_chosen(tmp_path: Path) -> None:
    write_folder("qwen3", tmp_path)
    wanted = config(str(tmp_path), tool_call_parser="mistral", reasoning_parser="magistral")
    origin = "https://app.example"
    server = type(wanted.server)(allow_origins=(origin,))
    chosen = Config(server=server, model=wanted.model, cache=MEMORY)
    with serving(Path(), config=chosen) as real:
        form = real.server.services.reply_format
        assert form.tool == "mistral"
        assert form.think is not None
        assert form.think.open == "[THINK]"
        asked = {"origin": origin, "access-control-request-method": "POST"}
        allowed = httpx.options(f"{real.url}/v1/messages", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == origin
        other = httpx.get(f"{real.url}/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_one_line(tmp_path: Path, option: str) -> None:
    write_folder("qwen3", tmp_path)
    with (
        pytest.raises(SetupError, match="'klingon'; choose one of: auto, none"),
        serving(Path(), config=config(str(tmp_path), **{option: "klingon"})),
    ):
        pass
