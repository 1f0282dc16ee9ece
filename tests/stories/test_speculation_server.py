"""Drafted tokens as a client of the whole server sees them: faster or not, the text is the same."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest

from firn.assembly.speculation import DRAFT_QUEUE_NBYTES
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig
from firn.core.errors import SetupError
from tests.api.real import Real, serving
from tests.models.speculation.drafters.test_mtp import as_published, random_head
from tests.zoo import build, write_folder

MEMORY = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
PROMPT = "def area(width, height):\n    return width * height\n"


def config(path: Path, *, cache: CacheConfig = MEMORY, **engine: Any) -> Config:
    engine = {"speculation": "auto", **engine}
    return Config(model=ModelConfig(path=str(path)), cache=cache, engine=EngineConfig(**engine))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    path.mkdir()
    write_folder("llama", path)
    return path


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Real]:
    with serving(folder, config=config(folder)) as running:
        yield running


def ask(real: Real, n: int = 60, *, prompt: str = PROMPT, **extra: Any) -> Any:
    create = real.openai().completions.create
    body: dict[str, Any] = {"ignore_eos": True, **extra}
    return create(model="", prompt=prompt, max_tokens=n, temperature=0, extra_body=body)


def accepted(reply: Any) -> int:
    return int(reply.usage.completion_tokens_details.accepted_prediction_tokens)


def health(real: Real) -> Any:
    return httpx.get(f"{real.url}/health").json()["speculation"]


def test_what_was_said_before_is_guessed_and_counted(real: Real) -> None:
    plain = ask(real, speculation="off")
    assert accepted(plain) == 0
    again = ask(real)
    for _ in range(10):  # on a busy machine, step times may keep the gate closed for a reply or two
        again = ask(real)
        assert again.choices[0].text == plain.choices[0].text
        if accepted(again) > 20:
            break
    assert accepted(again) > 20
    off = ask(real, speculation="off")
    assert off.choices[0].text == plain.choices[0].text
    assert accepted(off) == 0
    seen = health(real)
    assert seen["accepted"] >= accepted(again)
    assert seen["taken"] > seen["row_steps"] > seen["steps"] // 2
    text = httpx.get(f"{real.url}/metrics").text
    assert 'firn_speculation_tokens_total{kind="accepted"}' in text
    assert 'firn_tokens_total{kind="accepted"}' in text


def say(real: Real, what: str, **more: Any) -> Any:
    """A reply in capital letters: its text is tokenized as it was generated."""
    encode = real.server.services.tokenizer.encode
    bias = {str(encode(c, add_special=False)[0]): 100 for c in ascii_uppercase}
    messages: Any = [{"role": "user", "content": f"say {what}"}]
    return real.openai().chat.completions.create(
        model="", messages=messages, max_tokens=40, temperature=0, logit_bias=bias, **more
    )


@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_prediction_is_followed(real: Real, n_parts: int) -> None:
    """The reply is new and hardly repeats itself: nothing else could be guessed."""
    n_accepted = 0
    for i in range(10):  # on a busy machine, step times may keep the gate closed for a reply or two
        what = f"something for the {i}th time in {n_parts}"
        plain = say(real, what, extra_body={"speculation": "off"}).choices[0].message.content
        parts = [{"type": "text", "text": plain[:20]}, {"type": "text", "text": plain[20:]}]
        content = plain if n_parts == 1 else parts
        reply = say(real, what, prediction={"type": "content", "content": content})
        assert reply.choices[0].message.content == plain
        n_accepted = max(accepted(reply), n_accepted)
        if n_accepted > 30:
            break
    assert n_accepted > 30


@pytest.mark.parametrize("content", ["SOMETHINGELSEENTIRELY", ""])
def test_a_wrong_prediction_changes_nothing(real: Real, content: str) -> None:
    plain = say(real, f"no {content}", extra_body={"speculation": "off"})
    reply = say(real, f"no {content}", prediction={"type": "content", "content": content})
    assert reply.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    "extra",
    [
        {"prediction": "text"},
        {"prediction": {"type": "content", "content": 7}},
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        {"speculation": "yes"},
    ],
)
def test_a_malformed_prediction_is_refused(real: Real, extra: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
        say(real, "anything", extra_body=extra)


def test_what_was_guessed_behind_a_stop_does_not_count(real: Real) -> None:
    said = ask(real).choices[0].text
    for at in range(8, len(said) - 12, 5):
        cut = ask(real, stop=[said[at : at + 12]])
        assert said.startswith(cut.choices[0].text)
        assert accepted(cut) <= cut.usage.completion_tokens


def test_exact_reuse_guesses_nothing_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "firn"):
        exact = config(folder, cache=replace(MEMORY, reuse="exact"))
        with serving(folder, config=exact) as real:
            ask(real)
            assert accepted(ask(real)) == 0
            assert health(real) == {}
    assert "no tokens are drafted" in caplog.text


def test_a_draft_model_guesses(real: Real, folder: Path) -> None:
    plain = ask(real, speculation="off", prompt="once upon a time")
    small = config(folder, speculation="model", draft_model=str(folder))
    with serving(folder, config=small) as running:
        for _ in range(2):
            reply = ask(running, prompt="once upon a time")
            assert reply.choices[0].text == plain.choices[0].text
        assert health(running)["accepted"] > 0
        parts = running.server.engine.parts
        plan, drafter = parts.planned.plan, parts.speculator.drafters[-1]
        prefixes = drafter._cache.records.memory.limit_nbytes
        assert 0 < prefixes <= plan.draft_cache_nbytes - DRAFT_QUEUE_NBYTES, "its part of the plan"


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"speculation": "model"}, "needs --draft-model"),
        ({"speculation": "lookup", "draft_model": "x"}, "is not used with"),
        ({"speculation": "mtp"}, "no prediction head"),
    ],
)
def test_what_cannot_guess_is_refused(folder: Path, engine: dict[str, Any], why: str) -> None:
    with pytest.raises(SetupError, match=why), serving(folder, config=config(folder, **engine)):
        pass


def test_a_draft_model_with_other_tokens_is_refused(folder: Path) -> None:
    other = config(folder, draft_model="firn-demo")
    with pytest.raises(SetupError, match="a different tokenizer"), serving(folder, config=other):
        pass


def test_a_draft_model_is_looked_for_before_the_model_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """Loading may take minutes; here, the model could not be loaded at all."""
    shutil.copytree(folder, tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(b"none")
    for draft, why in (("firn-demo", "a different tokenizer"), ("./nowhere", "no model folder")):
        wanted = config(tmp_path / "model", draft_model=draft)
        with pytest.raises(SetupError, match=why), serving(tmp_path / "model", config=wanted):
            pass


def test_the_models_own_head_guesses(tmp_path: Path) -> None:
    """The head is stored next to the weights, as published; mlx-lm does not load it."""
    write_folder("glm4_moe", tmp_path)
    head = random_head(build("glm4_moe"), "glm4_moe")
    mx.save_safetensors(str(tmp_path / "model-head.safetensors"), as_published(head, "glm4_moe"))
    with serving(tmp_path, config=config(tmp_path, speculation="off")) as real:
        plain = ask(real)
    with serving(tmp_path, config=config(tmp_path, speculation="mtp")) as real:
        assert ask(real).choices[0].text == plain.choices[0].text
        assert ask(real).choices[0].text == plain.choices[0].text
        assert health(real)["drafted"] > 0
