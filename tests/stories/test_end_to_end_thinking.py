"""Thinking through the real clients of each API, on a tiny random model that rarely stops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.real import Real, serving
from tests.whole_server import GREEDY, config
from tests.zoo import write_folder


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A random model whose template begins the thinking, which it would hardly ever end."""
    folder = tmp_path_factory.mktemp("thinker")
    write_folder("qwen3", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace(
        "<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    )
    assert "assistant\\n<think>" in settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(Path(), config=config(str(folder))) as running:
        yield running


@pytest.mark.parametrize("budget", [0, 5, 50])
def test_a_budget_ends_thinking_at_the_same_token_each_time(thinker: Real, budget: int) -> None:
    closing = thinker.tokenizer.encode("\n</think>\n\n", add_special=False)
    seen = set()
    for _ in range(3):
        response = thinker.openai().responses.create(
            model="",
            input="hi",
            temperature=0,
            max_output_tokens=budget + 30,
            extra_body={"thinking_budget": budget, "ignore_eos": True},
        )
        assert response.usage is not None
        n_thought = response.usage.output_tokens_details.reasoning_tokens
        # The tag itself counts as thinking, up to the token that completes it.
        assert budget < n_thought <= budget + len(closing)
        assert response.output_text
        seen.add(json.dumps([item.model_dump(exclude={"id"}) for item in response.output]))
    assert len(seen) == 1


Thought = tuple[str, str, int, int]
"""The reasoning, the answer, the prompt's tokens, and how many of them came from the cache."""


def brief(real: Real) -> Any:
    """A few tokens of thinking, once: a random model might begin again, or end the reply."""
    ids = [real.tokenizer.token_id("<think>"), *real.tokenizer.eos]
    return {"thinking_budget": 5, "logit_bias": {str(token): -100 for token in ids}, **GREEDY}


def think_by_chat(real: Real, history: list[Any], *, stream: bool) -> Thought:
    body: Any = {"model": "", "messages": history, "max_tokens": 16, "extra_body": brief(real)}
    create = real.openai().chat.completions.create
    thought = said = ""
    if stream:
        for chunk in create(**body, stream=True, stream_options={"include_usage": True}):
            usage: Any = chunk.usage
            for choice in chunk.choices:
                thought += choice.delta.model_dump().get("reasoning_content") or ""
                said += choice.delta.content or ""
    else:
        done: Any = create(**body)
        usage = done.usage
        thought, said = done.choices[0].message.reasoning_content, done.choices[0].message.content
    return thought, said, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def think_by_messages(real: Real, history: list[Any], *, stream: bool) -> Thought:
    def blocks(message: Any) -> Any:
        if "reasoning_content" not in message:
            return message
        thought = {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
        said = {"type": "text", "text": message["content"]}
        return {"role": "assistant", "content": [thought, said]}

    body: Any = {
        "model": "claude",
        "messages": [blocks(message) for message in history],
        "max_tokens": 16,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "extra_body": brief(real),
    }
    client = real.anthropic().messages
    if stream:
        with client.stream(**body) as running:
            done: Any = running.get_final_message()
    else:
        done = client.create(**body)
    thinking, text = done.content
    assert (thinking.type, text.type) == ("thinking", "text")
    usage = done.usage
    n_prompt = usage.input_tokens + usage.cache_read_input_tokens
    return thinking.thinking, text.text, n_prompt, usage.cache_read_input_tokens


def think_by_responses(real: Real, history: list[Any], *, stream: bool) -> Thought:
    items: list[Any] = []
    for message in history:
        if "reasoning_content" in message:
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
        items.append({"role": message["role"], "content": message["content"]})
    body: Any = {"model": "", "input": items, "max_output_tokens": 16, "extra_body": brief(real)}
    done: Any = real.openai().responses.create(**body, stream=stream)
    if stream:
        *_, last = done
        assert last.type == "response.incomplete"
        done = last.response
    thought, _ = done.output
    usage = done.usage
    cached = usage.input_tokens_details.cached_tokens
    return thought.content[0].text, done.output_text, usage.input_tokens, cached


THINKERS: dict[str, Callable[..., Thought]] = {
    "chat": think_by_chat,
    "messages": think_by_messages,
    "responses": think_by_responses,
}


@pytest.mark.parametrize("keeps", [True, False], ids=["sent back", "left out"])
@pytest.mark.parametrize("route", THINKERS)
def test_the_turn_after_some_thinking_is_cached(thinker: Real, route: str, keeps: bool) -> None:
    """Whether or not the client sends the old thoughts along, streamed or not."""
    think = THINKERS[route]
    history: list[Any] = [{"role": "user", "content": f"{route} {keeps} " + "word " * 40}]
    thought, said, n_first, _ = think(thinker, history, stream=False)
    assert thought
    assert said
    assert (thought, said) == think(thinker, history, stream=True)[:2]
    answer = {"role": "assistant", "content": said}
    history.append(answer | {"reasoning_content": thought} if keeps else answer)
    history.append({"role": "user", "content": "And then?"})
    for stream in (True, False):
        thought, said, n_prompt, n_cached = think(thinker, history, stream=stream)
        assert n_prompt > n_first
        assert n_cached > n_first - 8, "all but what opens the reply"
        assert "<think>" not in said + thought
