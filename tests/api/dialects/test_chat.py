"""The real openai client, streaming and not, against the real app."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from firn.core.values import Job
from tests.api.live import GREETING, Live, serve
from tests.fakes import FakeTokenizer

HI: list[Any] = [{"role": "user", "content": "hi"}]


def test_a_whole_reply_has_text_usage_and_reason(shared_live: Live) -> None:
    reply = shared_live.openai().chat.completions.create(model="fake", messages=HI)
    assert reply.choices[0].message.content == GREETING
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.model == "fake"
    assert reply.usage is not None
    n_prompt = len(shared_live.engine.jobs[-1].prompt)
    assert reply.usage.prompt_tokens == n_prompt
    assert reply.usage.completion_tokens == len(GREETING.encode())
    assert reply.usage.total_tokens == n_prompt + len(GREETING.encode())


def test_a_stream_has_the_text_of_the_whole_reply(shared_live: Live) -> None:
    chunks = list(
        shared_live.openai().chat.completions.create(model="fake", messages=HI, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == GREETING
    assert "\ufffd" not in "".join(pieces)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_at_the_end_of_a_stream(live: Live) -> None:
    live.engine.n_cached = 4
    *chunks, last = live.openai().chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(GREETING.encode())
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 4


def test_cached_tokens_are_a_part_of_the_prompt(live: Live) -> None:
    live.engine.n_cached = 7
    usage = live.openai().chat.completions.create(model="fake", messages=HI).usage
    assert usage is not None
    assert usage.prompt_tokens == len(live.engine.jobs[0].prompt)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 7


def test_choices_have_their_own_texts() -> None:
    tokenizer = FakeTokenizer()

    def reply(job: Job, choice: int) -> list[int]:
        return tokenizer.encode("abc"[: choice + 1], add_special=False)

    with serve(reply=reply, tokenizer=tokenizer) as live:
        client = live.openai()
        whole = client.chat.completions.create(model="fake", messages=HI, n=3)
        assert [(c.index, c.message.content) for c in whole.choices] == [
            (0, "a"),
            (1, "ab"),
            (2, "abc"),
        ]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        texts: dict[int, str] = {}
        roles: list[int] = []
        for chunk in client.chat.completions.create(model="fake", messages=HI, n=3, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.delta.role:
                roles.append(choice.index)
        assert texts == {0: "a", 1: "ab", 2: "abc"}
        assert sorted(roles) == [0, 1, 2]
        assert len(live.engine.jobs) == 2  # one job per call, whatever n is


def test_logprobs_have_bytes_and_alternatives(shared_live: Live) -> None:
    client = shared_live.openai()
    ask: dict[str, Any] = {
        "model": "fake", "messages": HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 5,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [token.token for token in whole.content] == list("Hello")
    assert [token.bytes for token in whole.content] == [[ord(c)] for c in "Hello"]
    assert all(token.logprob == -0.25 and len(token.top_logprobs) == 2 for token in whole.content)
    streamed = [
        token
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == whole.content


def test_length_is_a_finish_reason(shared_live: Live) -> None:
    reply = shared_live.openai().chat.completions.create(model="fake", messages=HI, max_tokens=5)
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "length"


def test_half_a_character_at_the_limit_is_not_shown(shared_live: Live) -> None:
    n = len(b"Hello, world! Gr") + 1
    client, claude = shared_live.openai(), shared_live.anthropic()
    reply = client.chat.completions.create(model="fake", messages=HI, max_tokens=n)
    assert reply.choices[0].message.content == "Hello, world! Gr"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == n
    stream = client.chat.completions.create(model="fake", messages=HI, max_tokens=n, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello, world! Gr"
    raw = client.completions.create(model="fake", prompt="hi", max_tokens=n)
    assert raw.choices[0].text == "Hello, world! Gr"
    response = client.responses.create(model="fake", input="hi", max_output_tokens=n)
    assert response.output_text == "Hello, world! Gr"
    hi: Any = HI
    (block,) = claude.messages.create(model="fake", messages=hi, max_tokens=n).content
    assert block.type == "text"
    assert block.text == "Hello, world! Gr"
    with claude.messages.stream(model="fake", messages=hi, max_tokens=n) as said:
        assert "".join(said.text_stream) == "Hello, world! Gr"


def test_parameters_reach_the_engine(live: Live) -> None:
    live.openai().chat.completions.create(
        model="fake",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        logit_bias={"65": 5},
        max_completion_tokens=9,
        extra_body={"top_k": 10_000, "ignore_eos": True, "cache": {"write": False}},
    )
    (job,) = live.engine.jobs
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.seed) == (0.5, 0.9, 3)
    assert job.sampling.top_k == 0  # more than the vocabulary: off
    assert job.sampling.logit_bias == ((65, 5.0),)
    assert job.max_tokens == 9
    assert job.eos == frozenset()
    assert not job.cache.write


def test_reasoning_and_template_arguments_reach_the_template(live: Live) -> None:
    live.openai().chat.completions.create(
        model="fake",
        messages=HI,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"tone": "dry"}},
    )
    kwargs = live.tokenizer.rendered[-1]["kwargs"]
    assert kwargs["reasoning_effort"] == "low"
    assert kwargs["enable_thinking"] is True
    assert kwargs["tone"] == "dry"


def test_a_reply_fills_the_context_at_most() -> None:
    with serve(context_length=40) as live:
        live.openai().chat.completions.create(model="fake", messages=HI, max_tokens=1000)
        (job,) = live.engine.jobs
        assert len(job.prompt) + job.max_tokens == 40


# --- stop strings --------------------------------------------------------------------------

STOPPED = "one two STOP three"


def splits(text: str) -> Iterator[list[str]]:
    """The text split in two at every position, and one character at a time."""
    for at in range(len(text) + 1):
        yield [piece for piece in (text[:at], text[at:]) if piece]
    yield list(text)


def test_stop_strings_at_every_split() -> None:
    cases = list(splits(STOPPED))
    pieces = sorted({piece for case in cases for piece in case})
    tokenizer = FakeTokenizer(pieces)
    first = tokenizer.vocab_size - len(pieces)
    ids = {piece: first + i for i, piece in enumerate(pieces)}

    def reply(job: Job, choice: int) -> list[int]:
        case = int(tokenizer.decode(job.prompt.ids.tolist()))
        return [ids[piece] for piece in cases[case]]

    with serve(reply=reply, tokenizer=tokenizer) as live:
        client = live.openai()
        for case in range(len(cases)):
            ask: dict[str, Any] = {"model": "fake", "prompt": str(case), "stop": ["nope", "STOP"]}
            whole = client.completions.create(**ask).choices[0]
            assert (whole.text, whole.finish_reason) == ("one two ", "stop")
            chunks = list(client.completions.create(**ask, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "one two "
            assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_ends_one_choice_and_not_the_others() -> None:
    tokenizer = FakeTokenizer()

    def reply(job: Job, choice: int) -> list[int]:
        text = "abXcdefgh" if choice == 0 else "abcdefghi"
        return tokenizer.encode(text, add_special=False)

    with serve(reply=reply, tokenizer=tokenizer) as live:
        whole = live.openai().chat.completions.create(model="fake", messages=HI, n=2, stop="X")
        assert [c.message.content for c in whole.choices] == ["ab", "abcdefghi"]
        (job,) = live.engine.jobs
        assert live.engine.stopped == [(job.id, 0)]
        assert live.engine.cancelled == []


def test_stopping_all_choices_ends_the_job() -> None:
    tokenizer = FakeTokenizer()
    with serve(reply=lambda *_: tokenizer.encode("abXc" * 50, add_special=False)) as live:
        live.engine.hold("decode", after=20)
        whole = live.openai().chat.completions.create(model="fake", messages=HI, stop="X")
        assert whole.choices[0].message.content == "ab"


# --- many at once --------------------------------------------------------------------------


def test_fifty_streams_at_once() -> None:
    tokenizer = FakeTokenizer()

    def reply(job: Job, choice: int) -> list[int]:
        text = tokenizer.decode(job.prompt.ids.tolist())
        return tokenizer.encode(f"you said {text!r}, I say é" * 3, add_special=False)

    async def one(client: Any, i: int) -> None:
        stream = await client.completions.create(
            model="fake", prompt=f"number {i}", stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.text for choice in chunk.choices)
        expected = f"you said 'number {i}', I say é" * 3
        assert text == expected
        assert usage is not None
        assert usage.completion_tokens == len(expected.encode())

    with serve(reply=reply, tokenizer=tokenizer) as live:
        live.engine.hold("queue")

        async def all_of_them() -> None:
            async with live.async_openai() as client:
                asks = [asyncio.create_task(one(client, i)) for i in range(50)]
                waiting = asyncio.to_thread(live.engine.wait_for, lambda e: len(e.jobs) == 50)
                await waiting
                live.engine.release("queue")
                await asyncio.gather(*asks)

        asyncio.run(all_of_them())
        assert live.engine.cancelled == []


@pytest.mark.parametrize("n", [1, 2])
def test_the_async_client_works(shared_live: Live, n: int) -> None:
    async def ask() -> None:
        async with shared_live.async_openai() as client:
            reply = await client.chat.completions.create(model="fake", messages=HI, n=n)
            assert [choice.message.content for choice in reply.choices] == [GREETING] * n

    asyncio.run(ask())
