from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from firn.core.values import Job
from tests.api.live import GREETING, Live, serve
from tests.fakes import END, START, FakeTokenizer


def echoing(tokenizer: FakeTokenizer) -> Any:
    def reply(job: Job, choice: int) -> list[int]:
        text = tokenizer.decode(job.prompt.ids.tolist())
        return tokenizer.encode(f"{text}/{choice}", add_special=False)

    return reply


def test_a_prompt_may_be_a_text(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(model="fake", prompt="Once")
    assert reply.choices[0].text == GREETING
    assert reply.object == "text_completion"
    assert shared_live.engine.jobs[-1].prompt.ids.tolist() == list(b"Once")


def test_a_prompt_may_be_token_ids(shared_live: Live) -> None:
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


def test_echo_begins_each_reply_with_the_prompt(live: Live) -> None:
    client = live.openai()
    for prompt in ("Once ", list(b"Once ")):
        whole = client.completions.create(model="fake", prompt=prompt, echo=True, n=2)
        assert [choice.text for choice in whole.choices] == [f"Once {GREETING}"] * 2
    chunks = client.completions.create(model="fake", prompt="Once ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"Once {GREETING}"


def test_logprobs_have_tokens_offsets_and_alternatives(shared_live: Live) -> None:
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


# --- the prompt's own tokens ---------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Once", list(b"Once")])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_shows_how_likely_the_prompt_was(
    shared_live: Live, prompt: Any, max_tokens: int
) -> None:
    """As lm-eval-harness asks: the first token has no logprob, and those of the reply follow."""
    reply = shared_live.openai().completions.create(
        model="fake", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens
    )
    choice = reply.choices[0]
    assert choice.text == "Once" + GREETING[:max_tokens]
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(choice.text)
    assert logprobs.token_logprobs == [None, -0.125, -0.25, -0.375, *[-0.25] * max_tokens]
    assert logprobs.text_offset == list(range(4 + max_tokens))
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {"n": -0.125}
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, max_tokens)


def test_a_stream_echoes_with_logprobs_first(live: Live) -> None:
    live.engine.chunk = 2
    chunks = list(
        live.openai().completions.create(
            model="fake", prompt="Once", echo=True, logprobs=0, max_tokens=1, n=2, stream=True
        )
    )
    first, second, *rest = (chunk.choices[0] for chunk in chunks)
    for choice in (first, second):
        assert choice.text == "Once"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, -0.125, -0.25, -0.375]
    assert [first.index, second.index] == [0, 1]
    offsets = [choice.logprobs.text_offset for choice in rest if choice.logprobs]
    assert offsets == [[4], [4]]


def test_the_first_token_of_a_prompt_has_no_logprob(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(
        model="fake", prompt="a", echo=True, logprobs=2, max_tokens=0
    )
    assert reply.choices[0].text == "a"
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.token_logprobs == [None]


def test_every_prompt_of_a_batch_is_scored(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(
        model="fake", prompt=["ab", "cde", "f"], echo=True, logprobs=1, max_tokens=0
    )
    logprobs = [choice.logprobs.token_logprobs for choice in reply.choices if choice.logprobs]
    assert logprobs == [[None, -0.125], [None, -0.125, -0.25], [None]]


def test_tokens_of_one_character_begin_where_it_does(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(
        model="fake", prompt="aüb", echo=True, logprobs=0, max_tokens=0
    )
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.text_offset == [0, 1, 1, 2]


def test_the_bos_token_is_echoed_without_text() -> None:
    with serve(tokenizer=Opening()) as live:
        reply = live.openai().completions.create(
            model="fake", prompt="ab", echo=True, logprobs=0, max_tokens=0
        )
        assert reply.choices[0].text == "ab"
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [START, "a", "b"]
        assert logprobs.text_offset == [0, 0, 1]


class Opening(FakeTokenizer):
    """A tokenizer that begins every raw prompt with a token."""

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        return super().encode(START + text if add_special else text, add_special=False, typed=typed)


def test_max_tokens_zero_only_reads_the_prompt(live: Live) -> None:
    reply = live.openai().completions.create(model="fake", prompt="hello", max_tokens=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("", "length")
    assert live.engine.jobs[-1].max_tokens == 0
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a", "max_tokens": -1})
    assert answer.status_code == 400


def test_logprobs_of_too_many_tokens_are_refused(live: Live) -> None:
    with serve(context_length=100_000) as large:
        client = large.openai()
        with pytest.raises(openai.BadRequestError, match="too many"):
            client.completions.create(
                model="fake", prompt="a" * 20_000, echo=True, logprobs=20, max_tokens=0
            )
        assert large.engine.jobs == []
        with pytest.raises(openai.BadRequestError, match="with fewer prompts"):
            client.completions.create(
                model="fake", prompt=["a" * 20_000] * 8, echo=True, logprobs=1, max_tokens=0
            )
        assert large.engine.jobs == []


@pytest.mark.parametrize("text", ["Grüße 🙂 " * 1500, "\ufb01" * 4000])
def test_a_long_prompt_is_echoed_whole(text: str) -> None:
    """In slices, whose boundaries may split characters, off the asyncio thread."""
    with serve(context_length=100_000) as large:
        client = large.openai()
        ask: Any = {"model": "fake", "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 2}
        whole = client.completions.create(**ask).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
        assert whole.text == text + GREETING[:2]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert whole.logprobs is not None
        assert whole.logprobs.tokens is not None
        assert len(whole.logprobs.tokens) == len(text.encode()) + 2
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
            assert [x for piece in pieces for x in piece] == getattr(whole.logprobs, name)
        assert max(len(chunk.text) for chunk in chunks) <= 1024


def test_the_echo_is_the_text_that_was_sent() -> None:
    """The tokenizer changes the text, but the echo is what was sent."""
    with serve(tokenizer=Lowering(), context_length=100_000) as live:
        ask: Any = {"model": "fake", "prompt": "ABC" * 700, "echo": True, "logprobs": 0}
        whole = live.openai().completions.create(**ask, max_tokens=0).choices[0]
        assert whole.text == "ABC" * 700
        assert whole.logprobs is not None
        assert whole.logprobs.tokens == list("abc" * 700)


class Lowering(FakeTokenizer):
    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        return super().encode(text.lower(), add_special=add_special, typed=typed)


# --- filling in the middle -----------------------------------------------------------------


def coder() -> FakeTokenizer:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    return FakeTokenizer(special=(END, START, *marks))


def test_a_suffix_follows_the_hole() -> None:
    tokenizer = coder()
    with serve(tokenizer=tokenizer) as live:
        reply = live.openai().completions.create(
            model="fake", prompt="def f(", suffix="):\n", max_tokens=4
        )
        assert reply.choices[0].text == GREETING[:4]
        job = live.engine.jobs[-1]
        text = "<|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|>"
        assert tokenizer.decode(job.prompt.ids.tolist()) == text
        # The filling ends where the model would begin another piece.
        ends = {tokenizer.decode([token]) for token in job.eos}
        assert {"<|fim_pad|>", "<|fim_prefix|>", END} <= ends
        echoed = live.openai().completions.create(
            model="fake", prompt="def f(", suffix=")", echo=True, max_tokens=2
        )
        assert echoed.choices[0].text == "def f(" + GREETING[:2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": "a"}, "no tokens for filling in the middle"),
        ({"prompt": [1, 2]}, "needs the prompt as text"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "cannot be combined"),
        ({"prompt": "a", "max_tokens": 0}, "no tokens for filling in the middle"),
    ],
)
def test_a_suffix_that_the_model_cannot_take_is_a_400(
    shared_live: Live, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        shared_live.openai().completions.create(model="fake", suffix="b", **given)


def test_control_tokens_around_a_hole_stay_text() -> None:
    """A file may be about control tokens; a prompt that uses them says so with parse_special."""
    tokenizer = coder()
    mark = tokenizer.token_id("<|fim_middle|>")
    with serve(tokenizer=tokenizer) as live:
        ask: Any = {"model": "fake", "prompt": "a<|fim_middle|>", "suffix": "<|fim_middle|>b"}
        client = live.openai()
        for extra, n_marks in (({}, 1), ({"parse_special": True}, 3)):
            client.completions.create(**ask, max_tokens=4, extra_body=extra)
            ids = live.engine.jobs[-1].prompt.ids.tolist()
            assert ids.count(mark) == n_marks
            assert tokenizer.decode(ids) == (
                "<|fim_prefix|>a<|fim_middle|><|fim_suffix|><|fim_middle|>b<|fim_middle|>"
            )


def test_several_holes_are_filled_even_at_the_start_of_a_text() -> None:
    tokenizer = coder()
    with serve(tokenizer=tokenizer) as live:
        reply = live.openai().completions.create(
            model="fake", prompt=["", "ü"], suffix="b", n=2, max_tokens=4
        )
        assert len(reply.choices) == 4
        texts = [tokenizer.decode(job.prompt.ids.tolist()) for job in live.engine.jobs]
        assert texts[0] == "<|fim_prefix|><|fim_suffix|>b<|fim_middle|>"
        assert texts[1].startswith("<|fim_prefix|>ü<|fim_suffix|>")


@pytest.mark.parametrize("side", ["prompt", "suffix"])
def test_prompt_and_suffix_beyond_the_context_are_refused(side: str) -> None:
    with serve(tokenizer=coder()) as live:
        ask: Any = {"model": "fake", "prompt": "a", "suffix": "b"} | {side: "a" * 5000}
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 4096 tokens"
        ) as caught:
            live.openai().completions.create(**ask)
        assert caught.value.code == "context_length_exceeded"
        assert live.engine.jobs == []


def test_an_empty_suffix_counts_as_absent(shared_live: Live) -> None:
    reply = shared_live.openai().completions.create(model="fake", prompt="a", suffix="")
    assert reply.choices[0].text == GREETING


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
