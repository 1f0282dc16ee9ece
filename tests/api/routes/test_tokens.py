"""/v1/tokenize, /v1/detokenize and /v1/embeddings over a fake engine."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st

from firn.api.routes.embeddings import BATCH_TOKENS, MAX_CHARS, batches, cut
from firn.api.routes.tokens import MAX_TEXT_CHARS
from firn.core.errors import StepFailed
from firn.core.values import Chat, GenerateRequest, Namespace, PicturePart, TextPart
from tests.api.live import Live, serve
from tests.api.scripted import post

# --- tokens --------------------------------------------------------------------------------


def test_a_text_is_tokenized_and_detokenized(shared_live: Live) -> None:
    tokenized = post(shared_live, "/v1/tokenize", {"text": "hé<|im_end|>"}).json()
    assert tokenized["ids"] == [104, 195, 169, 256]
    assert tokenized["count"] == len(tokenized["tokens"]) == 4
    assert tokenized["tokens"][0] == "h"
    assert tokenized["tokens"][3] == "<|im_end|>"
    back = post(shared_live, "/v1/detokenize", {"ids": tokenized["ids"]}).json()
    assert back["text"] == "hé<|im_end|>"


def test_a_chat_is_tokenized_as_its_template_renders_it(shared_live: Live) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    tokenized = post(shared_live, "/v1/tokenize", body).json()
    text = post(shared_live, "/v1/detokenize", {"ids": tokenized["ids"]}).json()["text"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    used = post(shared_live, "/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    assert used == tokenized["count"]


def test_texts_longer_than_the_context_can_be_counted(shared_live: Live) -> None:
    assert post(shared_live, "/v1/tokenize", {"text": "x" * 9000}).json()["count"] == 9000


def test_a_text_that_is_too_long_is_refused(shared_live: Live) -> None:
    answer = post(shared_live, "/v1/tokenize", {"text": "x" * (MAX_TEXT_CHARS + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"


def test_a_long_answer_is_encoded_like_a_short_one(shared_live: Live) -> None:
    text = "Grüße <&>\u2028 " * 1000
    answer = post(shared_live, "/v1/tokenize", {"text": text})
    assert answer.headers["content-type"] == "application/json"
    ids = answer.json()["ids"]
    assert post(shared_live, "/v1/detokenize", {"ids": ids}).json()["text"] == text
    assert answer.content == JSONResponse(answer.json()).body


def test_older_names_work(shared_live: Live) -> None:
    assert post(shared_live, "/v1/tokenize", {"prompt": "hi"}).json()["ids"] == [104, 105]
    assert post(shared_live, "/v1/detokenize", {"tokens": [104]}).json()["prompt"] == "h"


def test_the_model_is_checked(shared_live: Live) -> None:
    for path, body in (("tokenize", {"text": "a"}), ("detokenize", {"ids": [1]})):
        assert post(shared_live, f"/v1/{path}", body | {"model": "other"}).status_code == 404


CAT = ["<|im_start|>user", "cat<|im_end|>", "<|im_start|>assistant"]
PICTURE = "https://pictures.example/cat.png"


@asynccontextmanager
async def fetched(request: GenerateRequest, owner: Namespace) -> AsyncIterator[GenerateRequest]:
    """Replace a picture with a word, so that the prompt shows that it was fetched."""
    assert isinstance(request.source, Chat)
    (message,) = request.source.messages
    seen = tuple(TextPart("cat") if isinstance(p, PicturePart) else p for p in message.parts)
    yield replace(request, source=replace(request.source, messages=(replace(message, parts=seen),)))


def test_pictures_are_fetched_for_counting_too() -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    block = {"type": "image", "source": {"type": "url", "url": PICTURE}}
    item = {"type": "input_image", "image_url": PICTURE}
    with serve(gathers=(fetched,)) as live:
        shown = post(live, "/v1/tokenize", {"messages": [{"role": "user", "content": [part]}]})
        assert "".join(shown.json()["tokens"]).split() == CAT
        n_tokens = shown.json()["count"]
        counted = post(
            live,
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [block]}]},
        )
        assert counted.json() == {"input_tokens": n_tokens}
        body = {"input": [{"role": "user", "content": [item]}]}
        counted = post(live, "/v1/responses/input_tokens", body)
        assert counted.json()["input_tokens"] == n_tokens


# --- vectors -------------------------------------------------------------------------------


class FakeEmbedder:
    """A text's vector is its length, its first token, its last token and zero."""

    n_dims = 4
    max_tokens = 10

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()

    def embed(
        self, texts: Sequence[Sequence[int]], *, n_dims: int | None = None
    ) -> Future[list[list[float]]]:
        self.batches.append([list(text) for text in texts])
        future: Future[list[list[float]]] = Future()
        vectors = [[float(len(t)), float(t[0]), float(t[-1]), 0.0][:n_dims] for t in texts]

        def answer() -> None:
            assert self.go_on.wait(30)
            if not future.set_running_or_notify_cancel():
                return
            if self.fails:
                future.set_exception(StepFailed("it broke"))
            else:
                future.set_result(vectors)

        threading.Thread(target=answer).start()
        return future


@pytest.fixture(scope="module")
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture(scope="module")
def live(embedder: FakeEmbedder) -> Iterator[Live]:
    with serve(embedder=embedder) as running:
        yield running


def test_the_client_gets_floats_from_base64(live: Live) -> None:
    embedded = live.openai().embeddings.create(model="fake", input="hi")
    assert [item.embedding for item in embedded.data] == [[2.0, 104.0, 105.0, 0.0]]
    assert (embedded.usage.prompt_tokens, embedded.usage.total_tokens) == (2, 2)
    assert embedded.model == "fake"
    raw = post(live, "/v1/embeddings", {"input": "hi", "encoding_format": "base64"}).json()
    assert isinstance(raw["data"][0]["embedding"], str)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_come_in_the_order_of_the_texts(live: Live, form: Any) -> None:
    texts = ["abc", "d", "ef", "abcdefgh"]
    embedded = live.openai().embeddings.create(model="fake", input=texts, encoding_format=form)
    assert [item.index for item in embedded.data] == [0, 1, 2, 3]
    given: list[Any] = [item.embedding for item in embedded.data]
    if form == "base64":
        given = [list(struct.unpack("<4f", base64.b64decode(text))) for text in given]
    assert given == [[len(t), ord(t[0]), ord(t[-1]), 0] for t in texts]
    assert embedded.usage.prompt_tokens == 14


def test_token_ids_are_embedded_like_texts(live: Live, embedder: FakeEmbedder) -> None:
    client = live.openai()
    client.embeddings.create(model="fake", input=[1, 2, 3])
    client.embeddings.create(model="fake", input=[[1, 2], [3]])
    assert embedder.batches[-2:] == [[[1, 2, 3]], [[3], [1, 2]]]


def test_dimensions_shorten_the_vectors(live: Live) -> None:
    embedded = live.openai().embeddings.create(model="fake", input="hi", dimensions=2)
    assert embedded.data[0].embedding == [2.0, 104.0]


def test_a_long_text_is_refused_or_truncated(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="11 tokens, the model accepts at most 10"):
        live.openai().embeddings.create(model="fake", input=["a", "x" * 11])
    embedded = live.openai().embeddings.create(
        model="fake", input="abcdefghijk", extra_body={"truncate": True}
    )
    assert embedded.data[0].embedding == [10.0, 97.0, 106.0, 0.0]
    assert embedded.usage.prompt_tokens == 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [""]}, "input[0]"),
        ({"input": [None]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"input": [99999]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * (MAX_CHARS + 1)}, "input"),
        ({"input": ["a" * (MAX_CHARS // 2 + 1)] * 2}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate": "yes"}, "truncate"),
        ({"input": "a", "model": 5}, "model"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_parameter(
    live: Live, body: dict[str, Any], param: str
) -> None:
    answer = post(live, "/v1/embeddings", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_embeddings_end_when_their_client_hangs_up(live: Live, embedder: FakeEmbedder) -> None:
    """There are several batches; only the first is begun."""
    n_before = len(embedder.batches)
    embedder.go_on.clear()
    body = json.dumps({"input": ["x" * 10] * 2000}).encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        while len(embedder.batches) == n_before:
            live.on_loop(lambda: None)
    assert "/v1/embeddings" in live.log.wait_for("client gone")
    embedder.go_on.set()
    assert len(embedder.batches) == n_before + 1
    assert post(live, "/v1/embeddings", {"input": "a"}).status_code == 200


def test_a_fault_in_the_model_is_a_named_error(live: Live, embedder: FakeEmbedder) -> None:
    embedder.fails = True
    answer = post(live, "/v1/embeddings", {"input": "a"})
    embedder.fails = False
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "it broke")


def test_a_model_without_pooling_refuses_embeddings(shared_live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="does not compute embeddings"):
        shared_live.openai().embeddings.create(model="fake", input="hi")


@given(st.lists(st.integers(1, BATCH_TOKENS * 2), min_size=1, max_size=50))
def test_batches_are_bounded_and_lose_nothing(lengths: list[int]) -> None:
    chosen = list(batches(lengths))
    assert sorted(i for piece in chosen for i in piece) == list(range(len(lengths)))
    for piece in chosen:
        padded = max(lengths[i] for i in piece) * len(piece)
        assert len(piece) == 1 or padded <= BATCH_TOKENS


def test_a_closing_control_token_survives_the_cut() -> None:
    assert cut([1, 2, 3, 4, 9], 3, special=frozenset({9})) == [1, 2, 9]
    assert cut([1, 2, 3, 4, 5], 3, special=frozenset({9})) == [1, 2, 3]
    assert cut([1, 9], 3, special=frozenset({9})) == [1, 9]
