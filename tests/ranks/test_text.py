"""Two ranks answer like one process, whatever the cache and other requests do, and end together.

Slow: each test starts two or four real servers that take part in every step, on few cores.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from firn.cache.storage.container import unpack
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig
from tests import zoo
from tests.api import real
from tests.ranks import deaths, processes
from tests.ranks.processes import Answer, Ranks, ask, client, serving

STORY = "Snow that outlives its season becomes firn. " * 12
FLAGS = ("--cache-block-tokens", "32", "--prefill-chunk", "64")
N_GOOD = 128
"""Tokens whose records the test leaves intact."""
WIDE = {"qwen3": {"head_dim": 64}}
"""Fills a MiB of memory after a few hundred tokens."""
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
    Question("other", "Each winter lays a new sheet over the last." * 8, {"max_tokens": 9}),
)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    entry = zoo.ZOO[request.param]
    config = {**entry.config, **WIDE.get(request.param, {})}
    zoo.folder.write(zoo.build_entry(replace(entry, config=config)), config, path)
    return path


@pytest.fixture
def expected(model: Path) -> dict[str, str]:
    """The answers of a server in one process, without a cache."""
    config = Config(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(speculation="off"),
        cache=CacheConfig(disable_prefix_cache=True),
    )
    with real.serving(model, config=config) as server:
        return {q.name: q.asked_of(server.url).text for q in QUESTIONS}


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    return (*FLAGS, "--ssd-cache-dir", str(tmp_path / "ssd"))


def talk(ranks: Ranks, expected: dict[str, str]) -> None:
    """Ask one after the other, again from the cache, and all together while others come and go."""
    for question in QUESTIONS:
        assert question.asked_of(ranks.url).text == expected[question.name], question.name
    for question in QUESTIONS:
        again = question.asked_of(ranks.url)
        assert again.text == expected[question.name], question.name
        assert again.n_cached >= again.n_prompt // 2
    with ThreadPoolExecutor(8) as pool:
        gone = [pool.submit(leave_early, ranks, n) for n in range(3)]
        answers = {q.name: pool.submit(q.asked_of, ranks.url) for q in QUESTIONS}
        for name, answer in answers.items():
            assert answer.result().text == expected[name], name
        for one in gone:
            one.result()
    assert ask(ranks.url, "hello").text == expected["short"]


def leave_early(ranks: Ranks, number: int) -> None:
    body = {"prompt": STORY * 2 + str(number), "max_tokens": 100, "stream": True}
    with client().stream("POST", f"{ranks.url}/v1/completions", json=body) as reply:
        for i, _ in enumerate(reply.iter_lines()):
            if i > 2 * number:
                return


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_a_model_of_attention_answers_and_restarts_on_two_ranks(
    model: Path, tmp_path: Path, flags: tuple[str, ...], expected: dict[str, str]
) -> None:
    with serving(model, *flags, "--cache-memory-mb", "1", folder=tmp_path / "first") as ranks:
        talk(ranks, expected)
        what_only_rank_0_knows_of(ranks)
        for i in range(2):  # more than memory holds
            ask(ranks.url, f"{i} {STORY * 2}", max_tokens=1)
        assert ask(ranks.url, STORY).text == expected["long"]
        assert "(ssd" in ranks.log(0)
        ranks.processes[1].send_signal(signal.SIGTERM)  # a follower passes it on
        assert ranks.wait() == [0, 0], ranks.log(0)[-3000:] + ranks.log(1)[-3000:]
    assert same_records(tmp_path / "ssd")
    for path in records(tmp_path / "ssd", rank=1):
        data = path.read_bytes()
        if unpack(data).header.start >= N_GOOD:
            path.write_bytes(data[:-8] + b"scribble")
    with serving(model, *flags, folder=tmp_path / "second") as ranks:
        answer = ask(ranks.url, STORY)
        assert answer.text == expected["long"]
        assert 0 < answer.n_cached <= N_GOOD, "one rank cannot read the rest"
        assert ask(ranks.url, STORY).n_cached > N_GOOD, "it is stored again"
        deaths.busy_leader(ranks)


def what_only_rank_0_knows_of(ranks: Ranks) -> None:
    """Asks for logprobs, a grammar, and several replies to one prompt."""
    body = {"prompt": STORY, "max_tokens": 6, "n": 3, "temperature": 1.0, "logprobs": 2}
    reply = client().post(f"{ranks.url}/v1/completions", json=body).json()
    assert len(reply["choices"]) == 3
    scored = {"prompt": "hello there", "max_tokens": 1, "echo": True, "logprobs": 1}
    reply = client().post(f"{ranks.url}/v1/completions", json=scored).json()
    assert reply["choices"][0]["logprobs"]["token_logprobs"][1] < 0
    chat = {
        "messages": [{"role": "user", "content": "a number"}],
        "max_tokens": 40,
        "temperature": 0,  # a sampled reply may begin with a thought
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }
    reply = client().post(f"{ranks.url}/v1/chat/completions", json=chat).json()
    assert reply["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("model", ["qwen3_5"], indirect=True)
def test_a_model_of_recurrent_layers_answers_and_restarts_on_two_ranks(
    model: Path, tmp_path: Path, flags: tuple[str, ...], expected: dict[str, str]
) -> None:
    with serving(model, *flags, folder=tmp_path / "first") as ranks:
        talk(ranks, expected)
        assert ranks.stop() == [0, 0], ranks.log(0)[-3000:] + ranks.log(1)[-3000:]
    assert same_records(tmp_path / "ssd")
    impatient = processes.impatient()
    with serving(model, *flags, folder=tmp_path / "second", program=impatient) as ranks:
        answer = ask(ranks.url, STORY)
        assert answer.text == expected["long"]
        assert answer.n_cached > answer.n_prompt // 2
        deaths.busy_follower(ranks)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_model_of_experts_answers_on_two_ranks(
    model: Path, tmp_path: Path, flags: tuple[str, ...], expected: dict[str, str]
) -> None:
    impatient = processes.impatient()
    with serving(model, *flags, folder=tmp_path / "first", program=impatient) as ranks:
        talk(ranks, expected)
        deaths.idle_follower(ranks)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_frozen_rank_ends_the_group(model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with serving(
        model, *flags, folder=tmp_path / "ranks", program=processes.impatient(beat_s=0.2)
    ) as ranks:
        deaths.frozen_follower(ranks)


def records(folder: Path, *, rank: int) -> list[Path]:
    return sorted((folder / f"rank-{rank}-of-2").glob("??/*.safetensors"))


def same_records(folder: Path) -> bool:
    """Whether both ranks hold slices of the same records."""
    own, others = ([path.name for path in records(folder, rank=rank)] for rank in (0, 1))
    return own == others != []
