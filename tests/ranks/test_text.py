"""Two ranks say what one process says, whatever the cache and the neighbours do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from firn.config import CacheConfig, Config, EngineConfig, ModelConfig
from tests import zoo
from tests.api import real
from tests.ranks.processes import Answer, Ranks, ask, serving

MODELS = {"qwen3": "attention", "qwen3_5": "gated delta and attention", "qwen3_moe": "experts"}
STORY = "Snow that outlives its season becomes firn. " * 12
FLAGS = ("--cache-block-tokens", "32", "--prefill-chunk", "64")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass(frozen=True)
class Question:
    name: str
    prompt: str
    more: dict[str, Any]

    def asked_of(self, url: str) -> Answer:
        return ask(url, self.prompt, **self.more)


QUESTIONS = (
    Question("short", "hello", {}),
    Question("long", STORY, {}),
    Question("seeded", STORY + "It is old.", {"temperature": 0.9, "seed": 7}),
    Question("penalised", STORY, {"frequency_penalty": 0.5, "temperature": 0.7, "seed": 3}),
    Question("other", "Each winter lays a new sheet over the last." * 8, {"max_tokens": 60}),
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    zoo.write_folder(request.param, path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """What a server of one process says, without a cache."""
    config = Config(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(speculation="off"),
        cache=CacheConfig(disable_prefix_cache=True),
    )
    with real.serving(model, config=config) as server:
        return {q.name: q.asked_of(server.url).text for q in QUESTIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def flags(folder: Path) -> tuple[str, ...]:
    return (*FLAGS, "--ssd-cache-dir", str(folder / "ssd"))


@pytest.fixture(scope="module")
def ranks(model: Path, folder: Path, flags: tuple[str, ...]) -> Iterator[Ranks]:
    with serving(model, *flags, folder=folder / "first") as started:
        yield started


def test_alone_and_again(ranks: Ranks, expected: dict[str, str]) -> None:
    for question in QUESTIONS:
        assert question.asked_of(ranks.url).text == expected[question.name], question.name
    for question in QUESTIONS:
        again = question.asked_of(ranks.url)
        assert again.text == expected[question.name], question.name
        assert again.n_cached >= again.n_prompt // 2 or question.name == "short"


def test_together_and_some_go(ranks: Ranks, expected: dict[str, str]) -> None:
    def leave_early(number: int) -> None:
        body = {"prompt": STORY * 2 + str(number), "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{ranks.url}/v1/completions", json=body, timeout=60) as reply:
            for i, _ in enumerate(reply.iter_lines()):
                if i > 4 * number:
                    return

    with ThreadPoolExecutor(8) as pool:
        gone = [pool.submit(leave_early, n) for n in range(3)]
        asked = {q.name: pool.submit(q.asked_of, ranks.url) for q in QUESTIONS}
        for name, answer in asked.items():
            assert answer.result().text == expected[name], name
        for one in gone:
            one.result()
    assert ask(ranks.url, "hello").text == expected["short"]


def test_several_choices_scores_and_a_schema(ranks: Ranks) -> None:
    """What only rank 0 knows of: logprobs, grammars, several replies to one prompt."""
    body = {"prompt": STORY, "max_tokens": 6, "n": 3, "temperature": 1.0, "logprobs": 2}
    reply = httpx.post(f"{ranks.url}/v1/completions", json=body, timeout=60).json()
    assert len(reply["choices"]) == 3
    scored = {"prompt": "hello there", "max_tokens": 1, "echo": True, "logprobs": 1}
    reply = httpx.post(f"{ranks.url}/v1/completions", json=scored, timeout=60).json()
    assert reply["choices"][0]["logprobs"]["token_logprobs"][1] < 0
    chat = {
        "messages": [{"role": "user", "content": "a number"}],
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }
    reply = httpx.post(f"{ranks.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert reply["choices"][0]["message"]["content"].startswith("{")


def test_after_a_restart(
    ranks: Ranks, model: Path, folder: Path, flags: tuple[str, ...], expected: dict[str, str]
) -> None:
    """What all ranks have on their disks is resumed; what one of them lost is computed."""
    assert ranks.stop() == [0, 0], ranks.log(0)[-3000:] + ranks.log(1)[-3000:]
    stored = [sorted(_records(folder, rank)) for rank in (0, 1)]
    assert stored[0] == stored[1] != []
    with serving(model, *flags, folder=folder / "second") as again:
        answer = ask(again.url, STORY)
        assert answer.text == expected["long"]
        assert answer.n_cached > answer.n_prompt // 2
        assert again.stop() == [0, 0]
    for name in stored[1]:
        path = _records(folder, 1)[name]
        path.write_bytes(path.read_bytes()[:-8] + b"scribble")
    with serving(model, *flags, folder=folder / "third") as again:
        for question in QUESTIONS:
            assert question.asked_of(again.url).text == expected[question.name], question.name
        assert again.stop() == [0, 0]


def _records(folder: Path, rank: int) -> dict[str, Path]:
    found = (folder / "ssd" / f"rank-{rank}-of-2").glob("??/*.safetensors")
    return {path.name: path for path in found}
