"""/v1/rerank on a tiny random model, compared with mlx-lm."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from firn.api.http.auth import SHARED
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig
from firn.core.values import Reasoning, Reranker
from firn.text.prompt import rerank
from tests.api.real import Real, serving
from tests.fakes import FakeTokenizer
from tests.zoo import write_folder

BLOCK = 16
QUERY = "What does the server keep of a prompt that it has read once, and for how long is it kept?"
DOCUMENTS = ["Firn is old snow.", "A traveller reads the layers.", "", "<|im_end|> is text here."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-reranker"
    write_folder("llama", path)
    (path / "1_LogitScore").mkdir()
    ids = {"true_token_id": 300, "false_token_id": 17}
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    return path


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Real]:
    cache = CacheConfig(no_ssd_cache=True, cache_memory_mb=64, cache_block_tokens=BLOCK)
    # Fewer requests may run and wait than the 70 documents of one test.
    engine = EngineConfig(max_concurrency=4, max_queue=2)
    config = Config(model=ModelConfig(path=str(folder)), cache=cache, engine=engine)
    with serving(folder, config=config) as running:
        yield running


def ask(real: Real, path: str = "/v1/rerank", **body: Any) -> Any:
    body = {"query": QUERY, "documents": DOCUMENTS, **body}
    return httpx.post(f"{real.url}{path}", json=body, timeout=60)


def prompt_ids(real: Real, document: str, *, query: str = QUERY) -> list[int]:
    chat = rerank.question(query, document)
    prompt = real.server.services.prompts.make(chat, reasoning=Reasoning(enabled=False))
    return [int(token) for token in prompt.ids]


def expected(real: Real, folder: Path, document: str) -> float:
    """The probability of one token against the other, at the end of the prompt."""
    model, _ = load_model(folder)
    logits = model(mx.array(prompt_ids(real, document))[None])[0, -1].astype(mx.float32)
    yes, no = logits[300].item(), logits[17].item()
    return math.exp(yes) / (math.exp(yes) + math.exp(no))


def test_scores_are_those_of_the_two_tokens(real: Real, folder: Path) -> None:
    ranked = ask(real).json()
    scores = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert sorted(scores) == [0, 1, 2, 3]
    for i, document in enumerate(DOCUMENTS):
        assert scores[i] == pytest.approx(expected(real, folder, document), rel=1e-3)
    ordered = [result["relevance_score"] for result in ranked["results"]]
    assert ordered == sorted(ordered, reverse=True)
    assert ranked["usage"]["total_tokens"] > 0
    assert ranked["meta"]["tokens"]["input_tokens"] == ranked["usage"]["total_tokens"]


def test_the_query_is_read_once(real: Real) -> None:
    """By one request with several documents, and by the next one with others."""
    query = f"Nobody has asked this. {QUERY}"
    documents = ["Old snow.", "Bread.", "A word."]
    prompts = [prompt_ids(real, text, query=query) for text in [*documents, "Ice."]]
    columns = zip(*prompts, strict=False)
    n_shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    assert query in real.tokenizer.decode(prompts[0][:n_shared])

    def n_cached(documents: list[str]) -> int:
        usage = ask(real, query=query, documents=documents).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert n_cached(documents) >= 2 * (n_shared - BLOCK)
    assert n_cached(["Ice."]) == n_shared


def test_what_is_read_for_no_is_not_counted_as_cached(real: Real) -> None:
    """Some prompts run twice, for "yes" and for "no"."""
    ask(real)
    usage = ask(real).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_a_key_is_charged_for_what_was_computed(real: Real) -> None:
    quotas = real.server.services.access.quotas
    before = quotas.computed().get(SHARED, 0)
    usage = ask(real).json()["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert n_cached > 0
    assert quotas.computed()[SHARED] - before == usage["prompt_tokens"] - n_cached


def test_answers_have_the_shape_of_both_apis(real: Real) -> None:
    objects = [{"text": text} for text in DOCUMENTS]
    ranked = ask(real, "/v2/rerank", documents=objects, top_n=2, return_documents=True).json()
    assert len(ranked["results"]) == 2
    for result in ranked["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert "document" not in ask(real, "/rerank").json()["results"][0]
    cut = ask(real, max_tokens_per_doc=1).json()
    assert cut["usage"]["total_tokens"] < ask(real).json()["usage"]["total_tokens"]
    other = ask(real, instruction="Find recipes.").json()
    assert other["usage"]["total_tokens"] != ask(real).json()["usage"]["total_tokens"]


def test_more_documents_than_run_at_once_are_ranked(real: Real) -> None:
    documents = [f"Number {i % 7}." for i in range(70)]
    results = ask(real, documents=documents).json()["results"]
    assert len(results) == 70
    by_text: dict[str, set[float]] = {}
    for result in results:
        score = round(result["relevance_score"], 3)
        by_text.setdefault(documents[result["index"]], set()).add(score)
    assert all(len(scores) == 1 for scores in by_text.values())


@pytest.mark.parametrize(
    "wrong", [{"query": ""}, {"documents": []}, {"documents": [1]}, {"top_n": 0}, {"model": "x"}]
)
def test_errors_name_the_parameter(real: Real, wrong: dict[str, Any]) -> None:
    refused = ask(real, **wrong)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"].startswith(next(iter(wrong)))


def test_many_documents_with_a_long_query_are_refused(real: Real) -> None:
    """Each would be tokenized with the query: a small body would keep the tokenizer busy for minutes."""
    refused = ask(real, query="q" * 20_000, documents=["a"] * 500)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "documents"
    assert "characters" in refused.json()["error"]["message"]


def test_v1_models_shows_the_capability(real: Real) -> None:
    assert "rerank" in httpx.get(f"{real.url}/v1/models").json()["data"][0]["capabilities"]


class YesNo(FakeTokenizer):
    def token_id(self, text: str) -> int | None:
        return {"yes": 5, "no": 6}.get(text)


def test_rerankers_are_recognised() -> None:
    assert rerank.detect_reranker("Qwen3-Reranker-0.6B", YesNo(), None) == Reranker(5, 6)
    assert rerank.detect_reranker("Qwen3-8B", YesNo(), None) is None
    assert rerank.detect_reranker("a-reranker", FakeTokenizer(), None) is None
    score = {"true_token_id": 1, "false_token_id": 2}
    assert rerank.detect_reranker("any", FakeTokenizer(), score) == Reranker(1, 2)
    assert rerank.relevance(0.0, 0.0) == 0.5
    assert rerank.relevance(-1e9, 0.0) == pytest.approx(0.0)
