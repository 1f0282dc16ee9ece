"""A real model through a live server: its answers are those of mlx-lm, and the cache changes none."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from firn.demo.server import ServerProcess
from firn.models.load.loader import load_tokenizer
from tests.real.asking import Drift, Messages, Reply, ask, ask_together, client, compare, user
from tests.real.conftest import Figure, start
from tests.real.questions import QUESTIONS, SYSTEM, TEXTS

pytestmark = pytest.mark.real

COLD: dict[str, Any] = {"cache": {"read": False, "write": False}}
ABOUT_NOTES: list[Messages] = [user(question, system=SYSTEM) for question in QUESTIONS]
N_REPLY, N_LONG = 16, 48


def by_mlx_lm(reference: tuple[Any, Any], messages: Messages, *, n: int = N_REPLY) -> Reply:
    """mlx-lm's own loop, greedy."""
    model, tokenizer = reference
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids, logprobs, margins, finish = [], [], [], "length"
    for token, scores in generate_step(mx.array(prompt), model, max_tokens=n):
        if int(token) in tokenizer.eos_token_ids:
            finish = "stop"
            break
        best = mx.sort(scores)[-2:]
        ids.append(int(token))
        logprobs.append(float(scores[token]))
        margins.append(float(best[1] - best[0]))
    pieces = tuple(tokenizer.decode([i]) for i in ids)
    text = tokenizer.decode(ids)
    return Reply(text, pieces, tuple(logprobs), tuple(margins), finish, len(prompt), 0)


# --- the same answers ----------------------------------------------------------------------


def test_greedy_replies_are_those_of_mlx_lm(
    server: ServerProcess, reference: tuple[Any, Any], figure: Figure
) -> None:
    asked = [user(question) for question in QUESTIONS]
    theirs = [by_mlx_lm(reference, messages) for messages in asked]
    ours = [ask(server.url, messages, n=N_REPLY, **COLD) for messages in asked]
    assert [r.n_prompt for r in ours] == [r.n_prompt for r in theirs]
    found = compare(theirs, ours)
    figure(f"greedy, beside mlx-lm's loop: {found}")
    assert found.good
    near = max(
        abs(a - b)
        for x, y in zip(theirs, ours, strict=True)
        if x.text == y.text
        for a, b in zip(x.logprobs, y.logprobs, strict=False)
    )
    figure(f"log-probabilities of their tokens lie at most {near:.1e} apart")
    assert near < 1e-2
    assert [r.finish for r in ours] == [r.finish for r in theirs]


@pytest.mark.usefixtures("folder")
def test_cold_warm_restarted_and_in_a_batch(home: Path, figure: Figure) -> None:
    child = start(home, "again")
    try:
        cold = [ask(child.url, messages, n=N_REPLY, **COLD) for messages in ABOUT_NOTES]
        assert not any(reply.n_cached for reply in cold)
        ask(child.url, ABOUT_NOTES[0], n=1)
        warm = [ask(child.url, messages, n=N_REPLY) for messages in ABOUT_NOTES]
        again = [ask(child.url, messages, n=N_REPLY) for messages in ABOUT_NOTES]
        alone = ask_together(child.url, ABOUT_NOTES, n=N_REPLY, **COLD)
        shared = ask_together(child.url, ABOUT_NOTES, n=N_REPLY)
    finally:
        child.stop()
    child = start(home, "again")
    try:
        restarted = [ask(child.url, messages, n=N_REPLY) for messages in ABOUT_NOTES]
    finally:
        child.stop()
    n_prompt = sum(reply.n_prompt for reply in cold)
    for name, replies in {
        "warm": warm, "asked again": again, "in a batch, cold": alone, "in a batch, warm": shared,
        "after a restart": restarted,
    }.items():  # fmt: skip
        found = compare(cold, replies)
        n_cached = sum(reply.n_cached for reply in replies)
        figure(f"{name}: {found} to cold; {n_cached} of {n_prompt} prompt tokens cached")
        assert found.good
        if name != "in a batch, cold":
            assert n_cached > 0.8 * n_prompt


@pytest.mark.usefixtures("folder")
def test_exact_mode_is_bitwise(home: Path, figure: Figure) -> None:
    flags = ("--reuse", "exact", "--prefill-chunk", "64", "--cache-block-tokens", "64")
    asked = ABOUT_NOTES[:6]
    child = start(home, "exact", *flags)
    try:
        cold = [ask(child.url, messages, n=N_REPLY, **COLD) for messages in asked]
        ask(child.url, asked[0], n=1)
        warm = [ask(child.url, messages, n=N_REPLY) for messages in asked]
    finally:
        child.stop()
    child = start(home, "exact", *flags)
    try:
        restarted = [ask(child.url, messages, n=N_REPLY) for messages in asked]
    finally:
        child.stop()
    for name, replies in {"warm": warm, "after a restart": restarted}.items():
        pairs = zip(cold, replies, strict=True)
        n_same = sum(a.logprobs == b.logprobs and a.text == b.text for a, b in pairs)
        n_numbers = sum(len(reply.logprobs) for reply in replies)
        n_cached = sum(reply.n_cached for reply in replies)
        figure(f"{name}: {n_same} of {len(asked)} bit for bit ({n_numbers} log-probabilities)")
        assert n_same == len(asked)
        assert n_cached > 0.7 * sum(reply.n_prompt for reply in replies)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("bits", [8, 4])
def test_replies_from_quantised_records(bits: int, home: Path, figure: Figure) -> None:
    """A figure rather than a promise: smaller records may change replies."""
    flags = ("--kv-cache-quantization", "--kv-cache-quantization-bits", str(bits))
    child = start(home, f"bits-{bits}", *flags)
    try:
        cold = [ask(child.url, messages, n=N_LONG, **COLD) for messages in ABOUT_NOTES]
        for messages in ABOUT_NOTES:
            ask(child.url, messages, n=1)
    finally:
        child.stop()
    child = start(home, f"bits-{bits}", *flags)
    try:
        restored = [ask(child.url, messages, n=N_LONG) for messages in ABOUT_NOTES]
    finally:
        child.stop()
    assert sum(reply.n_cached for reply in restored) > 0.8 * sum(r.n_prompt for r in restored)
    drift = Drift.between(cold, restored)
    figure(f"{bits} bits: {drift}")
    assert drift.n_first == len(cold) or bits == 4
    assert drift.mean < {8: 0.02, 4: 0.5}[bits]


@pytest.mark.usefixtures("folder")
def test_speculation_keeps_the_replies(home: Path, figure: Figure) -> None:
    child = start(home, "speculation", "--speculation", "lookup")
    try:
        asked = [user(f"Repeat this, word for word: {SYSTEM[:600]}"), *ABOUT_NOTES[:4]]
        off = [ask(child.url, messages, n=N_LONG, speculation="off") for messages in asked]
        on = [ask(child.url, messages, n=N_LONG) for messages in asked]
        together = ask_together(child.url, asked, n=N_LONG)
    finally:
        child.stop()
    for name, replies in {"one by one": on, "together": together}.items():
        found = compare(off, replies)
        n_accepted = sum(reply.n_accepted for reply in replies)
        figure(f"{name}: {found} to the replies without; {n_accepted} tokens were drafted right")
        assert found.good
    assert on[0].n_accepted > N_LONG // 4
    assert not any(reply.n_accepted for reply in off)


def test_a_conversation_reads_each_turn_once(server: ServerProcess, figure: Figure) -> None:
    messages: Messages = user("What is the capital of France?")
    n_prompt, n_new = 0, []
    for question in ("And of Italy?", "Which of the two is larger?", "Thank you!"):
        reply = ask(server.url, messages, n=48)
        assert ask(server.url, messages, n=48, **COLD).text == reply.text
        n_new.append(reply.n_prompt - reply.n_cached)
        n_prompt = reply.n_prompt
        messages = [*messages, {"role": "assistant", "content": reply.text}, *user(question)]
    figure(f"prompt of {n_prompt} tokens at the last turn; {n_new} were read, turn by turn")
    assert n_new[-1] < n_prompt / 2


# --- what a chat needs ---------------------------------------------------------------------


def test_it_answers(server: ServerProcess) -> None:
    reply = ask(server.url, user("What is the capital of France?"), n=64)
    assert reply.text == "The capital of France is Paris."
    assert reply.finish == "stop"  # by its end token, which is not shown
    assert len(reply.tokens) < 64


def test_firn_chat_answers(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "firn", "chat", "What is the capital of France?"]
    flags = ["--url", server.url, "--temperature", "0"]
    run = subprocess.run(
        [*command, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert run.stdout == "The capital of France is Paris.\n"


def test_a_stream_is_the_same_text(server: ServerProcess) -> None:
    messages = user(QUESTIONS[2])
    stream = client(server.url).chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=N_REPLY,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == ask(server.url, messages, n=N_REPLY).text
    assert len([piece for piece in pieces if piece]) > 5


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(server: ServerProcess) -> None:
    def drawn(seed: int) -> str:
        made = client(server.url).chat.completions.create(
            model="smollm2",
            messages=user(QUESTIONS[5]),  # type: ignore[arg-type]
            temperature=0.8,
            seed=seed,
            max_tokens=12,
        )
        return made.choices[0].message.content or ""

    alone = [drawn(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, range(4))) == alone
    assert len(set(alone)) > 1


def test_a_json_schema_is_respected(server: ServerProcess, figure: Figure) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 24},
            "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "population", "capital"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    cities = ("Paris", "Oslo", "Lima", "Cairo")
    for city in cities:
        question = f"Describe {city} as JSON with the keys city, population and capital."
        reply = ask(server.url, user(question), n=96, response_format=wanted)
        assert reply.finish == "stop"
        jsonschema.validate(json.loads(reply.text), schema)
    figure(f"{len(cities)} of {len(cities)} replies follow the schema")


def test_logprobs_are_those_of_the_model(
    server: ServerProcess, reference: tuple[Any, Any], figure: Figure
) -> None:
    messages = user(QUESTIONS[0])
    made = client(server.url).chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=20,
    )
    assert made.choices[0].logprobs is not None
    parts = made.choices[0].logprobs.content or []
    model, tokenizer = reference
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    reply = tokenizer.encode(made.choices[0].message.content, add_special_tokens=False)
    logits = model(mx.array([prompt + reply]))[0, len(prompt) - 1 :]
    exact = np.array(logits.astype(mx.float32)).astype(np.float64)  # MLX's own sum is off by 2e-4
    expected = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    worst = 0.0
    for part, row in zip(parts, expected, strict=False):
        top = [entry.logprob for entry in part.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert len(top) == 20
        assert sum(np.exp(top)) <= 1 + 1e-5
        assert part.top_logprobs[0].token == part.token  # greedy takes the likeliest
        assert part.logprob == top[0] <= 0
        worst = max(worst, float(np.abs(np.sort(row)[::-1][:20] - top).max()))
    figure(f"{len(parts)} x 20 log-probabilities within {worst:.1e} of mlx-lm's")
    assert worst < 1e-2


# --- beside llama.cpp ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def other() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "llama_cpp.json").read_bytes()))


def test_tokens_are_those_of_llama_cpp(folder: Path, other: dict[str, Any], figure: Figure) -> None:
    tokenizer = load_tokenizer(folder)
    ours = [tokenizer.encode(text, add_special=False) for text in TEXTS]
    n_same = sum(a == b for a, b in zip(ours, other["tokens"], strict=True))
    figure(f"{n_same} of {len(TEXTS)} texts have llama.cpp's tokens")
    assert n_same == len(TEXTS)
    assert [tokenizer.decode(ids) for ids in ours] == list(TEXTS)


def test_replies_beside_llama_cpp(
    server: ServerProcess, other: dict[str, Any], figure: Figure
) -> None:
    """A figure, not a promise: llama.cpp rounds activations to 8 bits, and replies soon differ."""
    ours = [ask(server.url, user(question), n=32).text for question in QUESTIONS]
    pairs = list(zip(ours, other["replies"], strict=True))
    n_first = sum(a.split()[:1] == b.split()[:1] for a, b in pairs)
    n_same = sum(a == b for a, b in pairs)
    figure(f"{n_same} of {len(pairs)} replies are llama.cpp's, {n_first} begin with the same word")
    assert n_first > len(pairs) / 2
