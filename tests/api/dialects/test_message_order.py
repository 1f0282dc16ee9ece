"""Messages keep their places, so that only what a turn adds is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from firn.config import CacheConfig, Config, ModelConfig
from firn.text.reply.formats import ReplyFormat
from tests import families
from tests.api.agents import LONG, reminder, tool_use
from tests.api.live import Live, serve
from tests.api.real import Real, serving, write_family

LATE = "The user has switched to plan mode."
TOOL: Any = {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object"}}
NAMES = ["qwen3", "qwen35", "mistral", "gemma3", "deepseek", "gpt_oss"]


@pytest.fixture(params=NAMES, scope="module")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    tokenizer = families.tokenizer(request.param)
    form = ReplyFormat(tool="json_tags")
    with serve(tokenizer=tokenizer, reply_format=form, context_length=1 << 16) as running:
        yield running


def turn(*messages: Any) -> list[Any]:
    return list(messages)


FIRST = {"role": "user", "content": LONG}
ANSWER = {"role": "assistant", "content": "It has forty functions."}
NEXT = {"role": "user", "content": "and now?"}


def shared(live: Live) -> tuple[int, int]:
    """Length of the last prompt but one, and how many of its tokens the last one begins with."""
    before, after = (job.prompt.ids for job in live.engine.jobs[-2:])
    n = min(len(before), len(after))
    differ = np.flatnonzero(before[:n] != after[:n])
    return len(before), int(differ[0]) if len(differ) else n


HEADER = 12
"""Upper bound for the tokens of a reply's header, which may open a thought that history drops."""


def test_a_late_developer_message_keeps_the_prefix_of_a_chat(live: Live) -> None:
    client = live.openai()
    client.chat.completions.create(model="fake", messages=turn(FIRST))
    late: Any = {"role": "developer", "content": LATE}
    client.chat.completions.create(model="fake", messages=turn(FIRST, ANSWER, late, NEXT))
    assert LATE in live.prompt
    assert (
        live.prompt.index(ANSWER["content"]) < live.prompt.index(LATE) < live.prompt.index("now?")
    )
    n_before, n_shared = shared(live)
    assert n_shared >= n_before - HEADER


def test_a_late_system_message_of_claude_code_keeps_the_prefix(live: Live) -> None:
    client = live.anthropic()
    ask: dict[str, Any] = {"model": "fake", "max_tokens": 9, "tools": [TOOL]}
    calls = {"role": "assistant", "content": [tool_use("1", "Read", file_path="/a")]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": LONG}
    results = {"role": "user", "content": [result, reminder("The TODO list is empty.")]}
    late = {"role": "system", "content": LATE}
    client.messages.create(**ask, messages=turn(NEXT, calls, results))
    messages = turn(NEXT, calls, results, ANSWER, late, {"role": "user", "content": "go on"})
    client.messages.create(**ask, messages=messages)
    assert live.prompt.index("function_39") < live.prompt.index("TODO") < live.prompt.index(LATE)
    n_before, n_shared = shared(live)
    assert n_shared >= min(n_before - HEADER, first_thought(live))


def first_thought(live: Live) -> int:
    """Where the prefix ends if the template drops an earlier thought, even an empty one, at a new
    question."""
    ids = live.engine.jobs[-2].prompt.ids.tolist()
    mark = live.tokenizer.token_id("<think>")
    return ids.index(mark) if mark in ids else len(ids)


def test_a_late_message_of_codex_keeps_the_prefix(live: Live) -> None:
    client = live.openai()
    client.responses.create(model="fake", instructions="Be Codex.", input=turn(FIRST))
    late: Any = {"role": "developer", "content": LATE}
    items: Any = turn(FIRST, ANSWER, late, NEXT)
    client.responses.create(model="fake", instructions="Be Codex.", input=items)
    n_before, n_shared = shared(live)
    assert n_shared >= n_before - HEADER


def test_a_cancelled_turn_keeps_the_prefix(live: Live) -> None:
    """The question was not answered: it is sent again, with another message."""
    client = live.openai()
    client.chat.completions.create(model="fake", messages=turn(FIRST))
    client.chat.completions.create(model="fake", messages=turn(FIRST, NEXT))
    n_before, n_shared = shared(live)
    assert n_shared >= n_before - HEADER - 4


# --- with a model and a cache --------------------------------------------------------------


@pytest.fixture(params=["qwen3", "gemma3"], scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Real]:
    path = tmp_path_factory.mktemp(request.param)
    write_family(path, request.param)
    config = Config(model=ModelConfig(path=str(path)))
    cache = replace(CacheConfig(), no_ssd_cache=True, cache_block_tokens=16)
    with serving(path, config=replace(config, cache=cache)) as running:
        yield running


def test_a_turn_computes_what_it_adds(real: Real) -> None:
    """Also after a reminder, a picture in a tool's result, and a cancelled turn."""
    client = real.anthropic()
    ask: dict[str, Any] = {"model": "", "max_tokens": 4, "tools": [TOOL]}
    pixels: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    shown = {"type": "tool_result", "tool_use_id": "toolu_1",
             "content": [{"type": "image", "source": pixels}]}  # fmt: skip
    calls = {"role": "assistant", "content": [tool_use("1", "Read", file_path="/a.png")]}
    steps: list[Any] = [
        FIRST,
        calls,
        {"role": "user", "content": [shown, reminder("Mind the time.")]},
        ANSWER,
        {"role": "system", "content": LATE},
        NEXT,
        {"role": "user", "content": "I have interrupted you. Once more:"},
    ]
    n_known = 0
    for n in (1, 3, 5, 6, 7):
        usage = client.messages.create(**ask, messages=steps[:n]).usage
        n_read = usage.cache_read_input_tokens or 0
        assert n_read >= n_known - HEADER - 6, n
        n_known = usage.input_tokens + n_read + (usage.cache_creation_input_tokens or 0)
