from __future__ import annotations

from typing import Any

import httpx

from firn.core.values import Job
from tests.api.live import GREETING, Live, serve
from tests.fakes import FakeTokenizer


def echoing(tokenizer: FakeTokenizer) -> Any:
    def reply(job: Job, choice: int) -> list[int]:
        text = tokenizer.decode(job.prompt.ids.tolist())
        return tokenizer.encode(f"{text}/{choice}", add_special=False)

    return reply


def test_a_prompt_is_a_text(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(model="fake", prompt="Once")
    assert reply.choices[0].text == GREETING
    assert reply.object == "text_completion"
    assert shared_live.engine.jobs[-1].prompt.ids.tolist() == list(b"Once")


def test_a_prompt_is_token_ids(shared_live: Live) -> None:
    shared_live.openai().completions.create(model="fake", prompt=[72, 105])
    assert shared_live.engine.jobs[-1].prompt.ids.tolist() == [72, 105]


def test_several_prompts_and_choices_are_numbered_in_order() -> None:
    tokenizer = FakeTokenizer()
    with serve(reply=echoing(tokenizer), tokenizer=tokenizer) as live:
        client = live.openai()
        for prompt in (["one", "two", "three"], [list(b"one"), list(b"two"), list(b"three")]):
            whole = client.completions.create(model="fake", prompt=prompt, n=2)
            expected = ["one/0", "one/1", "two/0", "two/1", "three/0", "three/1"]
            assert [choice.text for choice in whole.choices] == expected
            assert [choice.index for choice in whole.choices] == list(range(6))
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == 11
            assert whole.usage.completion_tokens == sum(map(len, expected))
            texts = [""] * 6
            for chunk in client.completions.create(model="fake", prompt=prompt, n=2, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == expected


def test_echo(live: Live) -> None:
    client = live.openai()
    for prompt in ("Once ", list(b"Once ")):
        whole = client.completions.create(model="fake", prompt=prompt, echo=True, n=2)
        assert [choice.text for choice in whole.choices] == [f"Once {GREETING}"] * 2
    chunks = client.completions.create(model="fake", prompt="Once ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"Once {GREETING}"


def test_logprobs(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(
        model="fake", prompt="a", logprobs=3, max_tokens=4
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hell")
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 4


def test_markup_in_a_raw_completion_is_left_alone() -> None:
    tokenizer = FakeTokenizer()
    text = "<think>a</think><tool_call>{}</tool_call>"
    with serve(reply=lambda *_: tokenizer.encode(text, add_special=False)) as live:
        reply = live.openai().completions.create(model="fake", prompt="a")
        assert reply.choices[0].text == text


def test_one_bad_prompt_refuses_all_before_any_is_queued(live: Live) -> None:
    body = {"model": "fake", "prompt": ["a", "b" * 5000]}
    answer = httpx.post(f"{live.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "prompt"
    assert live.engine.jobs == []
