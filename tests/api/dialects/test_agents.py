"""Coding agents' conversations, as they send them: fully understood, streamed, and prefix kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from firn.api.dialects import discover
from firn.core.values import GenerateRequest, Job, Namespace, Prompt
from firn.text.prompt.maker import PromptMaker
from firn.text.reply.formats import detect_format
from tests.api.agents import AGENTS, LONG, Body, claude_code, codex, opencode
from tests.api.live import Live, serve
from tests.api.scripted import frames, post
from tests.fakes import CHAT_TEMPLATE, FakeTokenizer
from tests.text.trained import CHATML, byte_level

TURNS = [(path, i, body) for path, bodies in AGENTS.values() for i, body in enumerate(bodies)]
every_turn = pytest.mark.parametrize(
    ("path", "turn", "body"), TURNS, ids=[f"{path} {i}" for path, i, _ in TURNS]
)
CALLS = {
    "/v1/messages": ("Read", {"file_path": "/repo/main.py"}),
    "/v1/chat/completions": ("read", {"file_path": "/repo/main.py"}),
    "/v1/responses": ("shell", {"command": ["ls"], "timeout_ms": 5}),
}


def reply_on(path: str) -> str:
    name, arguments = CALLS[path]
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    template = CHAT_TEMPLATE + "{# <think></think> <tool_call>{{ tool | tojson }}</tool_call> #}"
    tokenizer = FakeTokenizer(chat_template=template)

    def reply(job: Job, choice: int) -> list[int]:
        prompt = tokenizer.decode(job.prompt.ids.tolist())
        tool = {'"Read"': "/v1/messages", "'Read'": "/v1/messages", "'shell'": "/v1/responses"}
        path = next((p for mark, p in tool.items() if mark in prompt), "/v1/chat/completions")
        return tokenizer.encode(reply_on(path), add_special=False)

    with serve(
        reply=reply,
        tokenizer=tokenizer,
        reply_format=detect_format(tokenizer),
        context_length=1 << 16,
    ) as running:
        yield running


# --- what arrives --------------------------------------------------------------------------


@every_turn
def test_every_turn_is_answered_with_a_call(live: Live, path: str, turn: int, body: Body) -> None:
    """Streamed and whole, with calls in each API's own shape."""
    name, arguments = CALLS[path]
    streamed = post(live, path, body)
    assert streamed.status_code == 200, streamed.text
    whole = post(live, path, body | {"stream": False} | _without_stream_options(path))
    assert whole.status_code == 200, whole.text
    called = whole.json()
    if path == "/v1/messages":
        assert called["stop_reason"] == "tool_use"
        assert called["content"][-1]["name"] == name
        assert called["content"][-1]["input"] == arguments
        assert [n for n, _ in frames(streamed.text)][-1] == "message_stop"
    elif path == "/v1/responses":
        assert called["status"] == "completed"
        assert [item["type"] for item in called["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]
        assert json.loads(called["output"][-1]["arguments"]) == arguments
        assert called["output"][0]["summary"][0]["text"] == "hm"
        assert frames(streamed.text)[-1][0] == "response.completed"
    else:
        (choice,) = called["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == name
        assert streamed.text.endswith("data: [DONE]\n\n")


def _without_stream_options(path: str) -> Body:
    return {"stream_options": None} if path == "/v1/chat/completions" else {}


def rendered(live: Live, path: str, body: Body) -> list[dict[str, Any]]:
    post(live, path, body)
    messages: list[dict[str, Any]] = live.tokenizer.rendered[-1]["messages"]
    return messages


def test_what_claude_code_says_reaches_the_template(live: Live) -> None:
    messages = rendered(live, "/v1/messages", claude_code()[2])
    assert [m["role"] for m in messages] == [
        *("system", "user", "assistant", "tool", "tool", "user", "assistant", "user"),
    ]
    system, first, calls, long, failed, noted, done, last = messages
    assert "billing" not in system["content"]
    assert system["content"].startswith("You are Claude Code")
    assert "Working directory: /repo" in system["content"]
    assert first["content"].endswith("</system-reminder>\n\nfix the bug in main.py")
    assert calls["reasoning_content"] == "Look at both."
    assert [c["function"]["name"] for c in calls["tool_calls"]] == ["Read", "Bash"]
    assert long["content"] == LONG
    assert failed["content"] == "Error:\n\nExit code 1\n1 failed"
    assert failed["tool_call_id"] == calls["tool_calls"][1]["id"]
    assert "TODO list" in noted["content"]
    assert done["content"] == "The bug is in function_7."
    assert last["content"] == "and now commit it"
    tools = live.tokenizer.rendered[-1]["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["Bash", "Read", "Edit"]
    assert live.tokenizer.rendered[-1]["kwargs"]["enable_thinking"] is True


def test_what_opencode_says_reaches_the_template(live: Live) -> None:
    messages = rendered(live, "/v1/chat/completions", opencode()[3])
    assert [m["role"] for m in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user", "user", "system"),
    ]
    assert messages[0]["content"].startswith("You are opencode")
    assert messages[-1]["content"].endswith("plan mode."), "a late system message stays where it is"
    assert messages[2]["reasoning_content"] == "Read it first."
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"file_path": "/repo/main.py"}
    assert [m["content"] for m in messages[-3:-1]] == ["thanks.", "plan a test"]


def test_what_codex_says_reaches_the_template(live: Live) -> None:
    messages = rendered(live, "/v1/responses", codex()[2])
    assert [m["role"] for m in messages] == [
        *("system", "user", "user", "assistant", "tool", "assistant", "tool", "assistant", "user"),
    ]
    system, _, asked, shell, output, patch, patched, done, last = messages
    assert system["content"].startswith("You are Codex")
    assert "read-only sandbox" in system["content"]
    assert asked["content"].endswith("make the tests pass")
    assert shell["reasoning_content"] == "Run the tests."
    assert shell["tool_calls"][0]["function"]["arguments"]["timeout_ms"] == 1000
    assert json.loads(output["content"])["output"] == LONG
    assert patch["tool_calls"][0]["function"]["arguments"]["input"].startswith("*** Begin Patch")
    assert patched["content"] == "Success."
    assert done["content"] == "The tests pass now."
    assert last["content"] == "explain the change"
    tools = live.tokenizer.rendered[-1]["tools"]
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["shell", "apply_patch", "multi_agent_v1__spawn_agent"]


PIXELS = "data:image/png;base64,iVBORw0KGgo="
SHOT: dict[str, Body] = {
    "/v1/messages": {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"},
                    }
                ],
            }
        ],
    },
    "/v1/chat/completions": {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": PIXELS}}],
    },
    "/v1/responses": {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": [{"type": "input_image", "image_url": PIXELS}],
    },
}


@pytest.mark.parametrize("path", SHOT)
def test_a_screenshot_ends_no_session_of_a_model_without_eyes(live: Live, path: str) -> None:
    """In tool results and earlier messages a text replaces it, and the log says so."""
    body = next(bodies[-1] for at, bodies in AGENTS.values() if at == path)
    key = "input" if path == "/v1/responses" else "messages"
    shown = [*body[key], SHOT[path]]
    if path == "/v1/chat/completions":
        refused = post(live, path, body | {key: shown})
        assert refused.status_code == 400, "the user has just sent it, and is told"
        assert "this model does not accept images" in refused.json()["error"]["message"]
        shown += [{"role": "user", "content": "without the picture, then"}]
    answer = post(live, path, body | {key: shown})
    assert answer.status_code == 200
    prompt = live.engine.jobs[-1].prompt
    text = live.tokenizer.decode(prompt.ids.tolist())
    assert "[An image was here. This model cannot see images.]" in text
    live.log.wait_for("this model does not accept images. It was replaced by a short text.")


# --- what is kept --------------------------------------------------------------------------


def prompts(path: str, bodies: list[Body]) -> list[Prompt]:
    maker = PromptMaker(byte_level().with_template(CHATML), context_length=1 << 16)
    return [maker.make(decode(path, body).source) for body in bodies]


def decode(path: str, body: Body) -> GenerateRequest:
    dialect = next(d for d in discover() if d.path == path)
    return dialect.decode(body, namespace=Namespace("test")).requests[0]


@pytest.mark.parametrize("agent", AGENTS)
def test_each_turn_begins_with_the_one_before(agent: str) -> None:
    """With its generation prompt, except the last token: the prefix that the cache can reuse."""
    path, bodies = AGENTS[agent]
    made = prompts(path, bodies)
    for before, after in itertools.pairwise(made):
        end = before.boundaries[-1]
        assert end == len(before) - 1
        if agent == "opencode" and after is made[-1]:
            end -= len("assistant")  # no answer follows, so there is no header
        assert np.array_equal(before.ids[:end], after.ids[:end])


def test_what_claude_code_marks_is_a_hint() -> None:
    first, second, third = prompts("/v1/messages", claude_code())
    tools, system, last = first.boundaries
    assert tools < system
    assert first.hints[0] == system
    assert system < first.hints[1] < last == len(first) - 1
    assert set(second.hints[:-1]) <= set(second.boundaries)
    assert second.hints[:2] == first.hints
    assert third.hints[:3] == second.hints[:3]
