"""Sparse prefill as clients of the whole server see it: requested, reported, unseen by others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from firn import app
from firn.api.calls import warm
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig, SparseConfig
from firn.core.errors import SetupError
from tests.api.real import Real, serving
from tests.waiting import wait_until
from tests.zoo import write_folder

HEADER = "x-firn-approximate"
MEMORY = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
ALLOWED = SparseConfig(sparse_prefill=True)
KEEP = {"sparse_prefill": {"keep": 0.3}}


def config(
    path: Path,
    draft: Path | None,
    *,
    sparse: SparseConfig = ALLOWED,
    cache: CacheConfig = MEMORY,
    **engine: Any,
) -> Config:
    small = None if draft is None else str(draft)
    return Config(
        model=ModelConfig(path=str(path)),
        cache=cache,
        engine=EngineConfig(draft_model=small, **engine),
        sparse=sparse,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("models"), {}
    for name in ("llama", "qwen3", "qwen3_next", "gemma3_text", "mamba2"):
        found[name] = root / name
        found[name].mkdir()
        write_folder(name, found[name])
    return found


@pytest.fixture(scope="module")
def real(folders: dict[str, Path]) -> Iterator[Real]:
    """Target and draft are different models with the same tokenizer."""
    with serving(folders["llama"], config=config(folders["llama"], folders["qwen3"])) as running:
        yield running


def wait_idle(real: Real) -> None:
    engine = real.server.engine
    wait_until(lambda: not engine.call(lambda _: engine._loop.busy).result(60))


def long(seed: int, n: int = 150) -> str:
    return " ".join(f"{seed} line {i * seed % 97}." for i in range(n))


def chat(seed: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": long(seed)},
        {"role": "assistant", "content": "read"},
        {"role": "user", "content": "and now?"},
    ]


def skipped(usage: Any) -> int:
    found = getattr(usage, "approximate", None)
    return 0 if found is None else int(found["skipped_tokens"])


# --- what is said --------------------------------------------------------------------------


def test_openai_chat_says_that_it_is_approximate(
    real: Real, caplog: pytest.LogCaptureFixture
) -> None:
    create = real.openai().chat.completions.with_raw_response.create
    with caplog.at_level(logging.INFO, "firn"):
        raw = create(model="", messages=chat(2), max_tokens=4, extra_body=KEEP)  # type: ignore[arg-type]
        wait_until(lambda: "finish=" in caplog.text)  # logged once everything is sent
    usage = raw.parse().usage
    assert usage is not None
    n = skipped(usage)
    assert 0.6 * usage.prompt_tokens < n < 0.75 * usage.prompt_tokens
    assert raw.headers[HEADER] == f"keep=0.3, skipped={n}"
    wait_idle(real)
    assert f"skipped={n} (approximate)" in caplog.text
    text = httpx.get(f"{real.url}/metrics").text
    assert 'firn_tokens_total{kind="skipped"}' in text
    again = create(model="", messages=chat(2), max_tokens=4, extra_body=KEEP)  # type: ignore[arg-type]
    assert HEADER not in again.headers, "it was read in full meanwhile"
    assert skipped(again.parse().usage) == 0


def test_streams_say_so_before_their_first_token(real: Real) -> None:
    body = {"messages": chat(3), "max_tokens": 4, "stream": True, **KEEP}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{real.url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.headers[HEADER] == "keep=0.3"
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[-1][6:])["usage"]["approximate"]["skipped_tokens"] > 100


def test_anthropic_and_its_streams(real: Real) -> None:
    client = real.anthropic()
    messages: Any = chat(4)[1:]
    raw = client.messages.with_raw_response.create(
        model="claude", max_tokens=4, system="be brief", messages=messages, extra_body=KEEP
    )
    assert raw.headers[HEADER].startswith("keep=0.3, skipped=")
    assert skipped(raw.parse().usage) > 100
    messages = chat(5)[1:]
    with client.messages.stream(
        model="claude", max_tokens=4, messages=messages, extra_body=KEEP
    ) as stream:
        final = stream.get_final_message()
        assert stream.response.headers[HEADER] == "keep=0.3"
    assert final.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": long(6), "max_tokens": 4}),
        ("/v1/responses", {"input": chat(7), "max_output_tokens": 16}),
        ("/api/chat", {"messages": chat(8), "stream": False, "options": {"num_predict": 4}}),
        ("/api/generate", {"prompt": long(9), "raw": True, "stream": False}),
    ],
)
def test_every_api_takes_it_and_says_it(real: Real, path: str, body: dict[str, Any]) -> None:
    model = real.server.engine.model.name
    reply = httpx.post(f"{real.url}{path}", json={"model": model, **body, **KEEP}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER].startswith("keep=0.3, skipped=")
    answer = reply.json()
    assert answer.get("usage", answer)["approximate"]["skipped_tokens"] > 100


def test_activity_shows_it(real: Real) -> None:
    body = {"messages": chat(10), "max_tokens": 2, **KEEP}
    reply = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=60)
    id = reply.headers["x-request-id"]
    with httpx.stream("GET", f"{real.url}/v1/activity", timeout=60) as watching:
        lines = watching.iter_lines()
        assert "event: calls" in lines
        line = next(lines)
    call = next(c for c in json.loads(line[6:]) if c["id"] == id)
    assert call["approximate"] is True
    assert call["skipped_tokens"] > 100
    assert call["read_tokens"] <= call["prompt_tokens"]


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        0.3,
        "yes",
        {},
        {"keep": 0},
        {"keep": -1},
        {"keep": 1.5},
        {"keep": "0.3"},
        {"keep": True},
        [0.3],
    ],
)
def test_bad_values_are_told(real: Real, given: Any) -> None:
    body = {"messages": chat(1), "max_tokens": 2, "sparse_prefill": given}
    reply = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "sparse_prefill" in reply.json()["error"]["message"]


def test_a_prompt_whose_tokens_are_scored_is_read_in_full_or_refused(real: Real) -> None:
    create = real.openai().completions.create
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        create(model="", prompt=long(1), echo=True, logprobs=1, max_tokens=1, extra_body=KEEP)
    whole = {"sparse_prefill": {"keep": 1.0}}
    reply = create(model="", prompt="a b c", echo=True, logprobs=1, max_tokens=1, extra_body=whole)
    assert reply.choices[0].logprobs is not None


def test_a_server_that_does_not_allow_it_says_so(folders: dict[str, Path]) -> None:
    with serving(
        folders["llama"], config=config(folders["llama"], None, sparse=SparseConfig())
    ) as off:
        with pytest.raises(openai.BadRequestError, match="--sparse-prefill"):
            off.openai().completions.create(model="", prompt="a", max_tokens=1, extra_body=KEEP)
        with pytest.raises(anthropic.BadRequestError, match="--sparse-prefill"):
            off.anthropic().messages.create(
                model="claude",
                max_tokens=1,
                messages=[{"role": "user", "content": "a"}],
                extra_body=KEEP,
            )
        off.openai().completions.create(model="", prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    ("model", "draft", "more", "why"),
    [
        ("llama", None, {}, "needs --draft-model"),
        ("qwen3_next", "llama", {}, "recurrent"),
        ("gemma3_text", "llama", {}, "sliding-window"),
        ("llama", "mamba2", {}, "cannot score prompts"),
        (
            "llama",
            "qwen3",
            {"cache": CacheConfig(no_ssd_cache=True, reuse="exact")},
            "reuse is exact",
        ),
        (
            "llama",
            None,
            {"sparse": SparseConfig(sparse_prefill_over=100)},
            "needs --sparse-prefill",
        ),
    ],
)
def test_what_cannot_be_is_told_at_the_start(
    folders: dict[str, Path], model: str, draft: str | None, more: dict[str, Any], why: str
) -> None:
    wanted = config(folders[model], folders[draft] if draft else None, **more)
    with pytest.raises(SetupError, match=why):
        app.build(wanted)


# --- rules ---------------------------------------------------------------------------------


def prompt_tokens(real: Real, messages: Sequence[Any], **more: Any) -> tuple[int, str | None]:
    raw = real.openai().chat.completions.with_raw_response.create(
        model="", messages=messages, max_tokens=3, **more
    )  # type: ignore[call-overload]
    return skipped(raw.parse().usage), raw.headers.get(HEADER)


def test_short_prompts_and_a_share_of_one_are_read_in_full(real: Real) -> None:
    short = [{"role": "user", "content": "hello"}]
    assert prompt_tokens(real, short, extra_body=KEEP) == (0, None)
    whole = {"sparse_prefill": {"keep": 1.0}}
    assert prompt_tokens(real, chat(12), extra_body=whole) == (0, None)
    assert prompt_tokens(real, chat(13)) == (0, None), "nobody asked for it"


def test_the_middle_of_one_long_message_is_skipped(real: Real) -> None:
    pasted = [{"role": "user", "content": f"{long(14, 400)} Which line is the last?"}]
    n, header = prompt_tokens(real, pasted, extra_body=KEEP)
    assert n > 1000
    assert header == f"keep=0.3, skipped={n}"


def test_a_rule_for_long_cold_prompts(folders: dict[str, Path], tmp_path: Path) -> None:
    rule = SparseConfig(sparse_prefill=True, sparse_prefill_over=1100, sparse_prefill_keep=0.5)
    wanted = config(folders["llama"], folders["qwen3_next"], sparse=rule, speculation="auto")
    with serving(folders["llama"], config=wanted) as real:
        n, header = prompt_tokens(real, chat(2))
        assert n > 300
        assert header == f"keep=0.5, skipped={n}"
        n, header = prompt_tokens(real, chat(3), extra_body={"sparse_prefill": {"keep": 1}})
        assert (n, header) == (0, None), "a request may want all of it"
        shorter = [{"role": "user", "content": long(4, 60)}]
        assert prompt_tokens(real, shorter) == (0, None)
        pinned = httpx.post(f"{real.url}/v1/cache/pin", json={"messages": chat(5)}, timeout=60)
        assert pinned.json()["pinned_tokens"] > 1000, "of a thinned prompt nothing is stored"
        prompts = tmp_path / "warm.json"
        prompts.write_text(json.dumps([chat(6)]))
        asyncio.run(warm.compute(real.server.services, warm.read(prompts)))
        assert prompt_tokens(real, chat(6)) == (0, None), "what is warm is stored as a whole"


def test_an_api_key_sees_nothing_of_another_ones(folders: dict[str, Path]) -> None:
    keys = replace(
        config(folders["llama"], folders["qwen3"]), server=ServerConfig(api_keys=("a-1", "b-2"))
    )
    with serving(folders["llama"], config=keys) as real:

        def cached(key: str) -> int:
            body = {"messages": chat(2), "max_tokens": 3, **KEEP}
            reply = httpx.post(
                f"{real.url}/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=60,
            ).json()
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("a-1") == 0
        wait_idle(real)
        assert cached("b-2") == 0
        assert cached("a-1") > 1000


def test_clients_that_go_away_while_it_is_scored_leave_nothing(real: Real) -> None:
    body = {"messages": chat(20), "max_tokens": 200, "stream": True, **KEEP}
    for seed in range(20, 24):
        body["messages"] = chat(seed)
        with httpx.stream(
            "POST", f"{real.url}/v1/chat/completions", json=body, timeout=60
        ) as reply:
            assert reply.headers[HEADER] == "keep=0.3"
    engine = real.server.engine

    def is_left() -> bool:
        return bool(engine._loop.inflight.sequences or engine._loop.busy)

    wait_until(lambda: not engine.call(lambda _: is_left()).result(60))
    assert engine.call(lambda parts: parts.budget.reserved_nbytes).result(60) == 0


def test_it_survives_a_restart_with_its_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    cache = CacheConfig(ssd_cache_dir=tmp_path / "ssd", cache_memory_mb=64)
    wanted = config(folders["llama"], folders["qwen3"], cache=cache)
    with serving(folders["llama"], config=wanted) as real:
        assert prompt_tokens(real, chat(2), extra_body=KEEP)[0] > 100
        plain = real.openai().chat.completions.create(
            model="",
            messages=chat(2),
            max_tokens=8,
            temperature=0,  # type: ignore[arg-type]
        )
    with serving(folders["llama"], config=wanted) as real:
        again = real.openai().chat.completions.create(
            model="",
            messages=chat(2),
            max_tokens=8,
            temperature=0,  # type: ignore[arg-type]
        )
        assert again.choices[0].message.content == plain.choices[0].message.content
        assert prompt_tokens(real, chat(3), extra_body=KEEP)[0] > 100


def test_the_draft_model_scores_and_guesses(folders: dict[str, Path]) -> None:
    """One model with one prefix cache: what it has read to score, it need not reread to draft."""

    def say(real: Real, seed: int) -> Any:
        reply = real.openai().chat.completions.create(
            model="",
            messages=chat(seed),  # type: ignore[arg-type]
            max_tokens=40,
            temperature=0,
            extra_body={"ignore_eos": True, **KEEP},
        )
        assert skipped(reply.usage) > 100
        return reply

    def drafted(real: Real) -> int:
        return int(httpx.get(f"{real.url}/health").json()["speculation"]["drafted"])

    path = folders["llama"]
    with serving(path, config=config(path, folders["qwen3"])) as real:
        plain = say(real, 2)
    with serving(path, config=config(path, folders["qwen3"], speculation="model")) as real:
        reply = say(real, 2)
        assert reply.choices[0].message.content == plain.choices[0].message.content
        wait_idle(real)
        parts = real.server.engine.parts
        stats = parts.speculator.drafters[-1]._cache.stats
        assert stats.n_lookups == 2, "to score, and to draft"
        assert stats.n_tokens_cached == reply.usage.prompt_tokens - 1
        for seed in range(3, 13):  # on a busy machine, drafts may look too slow for a reply or two
            if drafted(real):
                break
            say(real, seed)
        assert drafted(real) > 0
