"""Documents, and prompts that are too long for the model, sent by the real clients."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from firn.media.documents import Documents
from tests import families
from tests.api.agents import tool_use
from tests.api.live import Live, serve
from tests.media.test_documents import pdf


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    documents = Documents()
    with serve(
        tokenizer=Counting(families.tokenizer("qwen3")),
        context_length=4096,
        gathers=(documents.gather,),
    ) as running:
        yield running


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def document(data: bytes, **more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": coded(data)}
    return {"type": "document", "source": source, **more}


def said(live: Live, *content: Any) -> None:
    live.anthropic().messages.create(
        model="claude-x", max_tokens=4, messages=[{"role": "user", "content": list(content)}]
    )


def test_a_pdf_is_read_as_text(live: Live) -> None:
    said(
        live, document(pdf("Firn is old snow."), title="snow.pdf"), {"type": "text", "text": "so?"}
    )
    assert "Firn is old snow." in live.prompt
    assert "snow.pdf" in live.prompt
    plain = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "ice"},
    }
    said(live, plain, {"type": "text", "text": "so?"})
    assert "ice" in live.prompt


def test_files_from_openais_client_are_read_as_text(live: Live) -> None:
    data = f"data:application/pdf;base64,{coded(pdf('Firn is old snow.'))}"
    file: Any = {"type": "file", "file": {"filename": "snow.pdf", "file_data": data}}
    client = live.openai()
    client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": [file]}])
    assert "Firn is old snow." in live.prompt
    item: Any = {"type": "input_file", "filename": "snow.pdf", "file_data": data}
    client.responses.create(model="gpt-x", input=[{"role": "user", "content": [item]}])
    assert "Firn is old snow." in live.prompt


def test_a_pdf_without_text_is_refused_once_and_ends_no_session(live: Live) -> None:
    scanned = document(pdf(""))
    with pytest.raises(anthropic.BadRequestError, match="contains no text, only pictures"):
        said(live, scanned)
    audio: Any = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="input_audio"):
        live.openai().chat.completions.create(
            model="gpt-x", messages=[{"role": "user", "content": [audio]}]
        )
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [scanned]}
    live.anthropic().messages.create(
        model="claude-x",
        max_tokens=4,
        messages=[
            {"role": "user", "content": [scanned]},
            {"role": "assistant", "content": [tool_use("1", "Read", file_path="/a.pdf")]},
            {"role": "user", "content": [result]},
        ],
    )
    assert live.prompt.count("[A document was here. It could not be read as text.]") == 2
    live.log.wait_for("It was replaced by a short text.")
    past: Any = [{"role": "user", "content": [audio]}, {"role": "assistant", "content": "what?"},
                 {"role": "user", "content": "never mind"}]  # fmt: skip
    live.openai().chat.completions.create(model="gpt-x", messages=past)
    assert "input_audio was here" in live.prompt


# --- too long ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["word " * (16 * 2**20 // 5), "\u4e16" * (4 * 2**20)])
def test_sixteen_megabytes_are_refused_before_they_are_tokenized(live: Live, text: str) -> None:
    before = n_encoded(live)
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().chat.completions.create(
            model="gpt-x", messages=[{"role": "user", "content": text}]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as raw:
        live.openai().completions.create(model="gpt-x", prompt=text)
    assert raw.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        said(live, {"type": "text", "text": text})
    assert n_encoded(live) - before < 4 * 2**20
    assert live.openai().completions.create(model="gpt-x", prompt="a").choices


def n_encoded(live: Live) -> int:
    """Characters that the tokenizer has been given so far."""
    return counted(live).n_chars


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.n_chars = 0
        self._lock = threading.Lock()

    def encode(self, text: str, **more: Any) -> list[int]:
        with self._lock:
            self.n_chars += len(text)
        ids: list[int] = self._inner.encode(text, **more)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def counted(live: Live) -> Counting:
    assert isinstance(live.tokenizer, Counting)
    return live.tokenizer


def test_token_ids_outside_the_vocabulary_are_refused(live: Live) -> None:
    n_ids = live.engine.model.n_ids or live.engine.model.vocab_size
    for prompt in ([1, n_ids], [1, 2**31 - 1]):
        with pytest.raises(openai.BadRequestError, match="no token"):
            live.openai().completions.create(model="gpt-x", prompt=prompt)
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": [1, 2**70]})
    assert answer.status_code == 400
