"""A call that the parser cannot read reaches the client as text, and is logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from firn.text.reply.formats import ReplyFormat
from tests.api.live import Live
from tests.api.scripted import CALLS, PARAMETERS, post, scripted_server

TOOL: Any = {"name": "look", "input_schema": PARAMETERS}
ASK: dict[str, Any] = {"max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}


def warnings(live: Live) -> list[str]:
    return [r.getMessage() for r in live.log.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("format", [ReplyFormat(), ReplyFormat(tool="mistral")])
def test_an_unread_call_is_logged_once(format: ReplyFormat, stream: bool) -> None:
    with scripted_server(f"Sure.\n{CALLS}", format=format) as live:
        answer = post(live, "/v1/messages", ASK | {"tools": [TOOL], "stream": stream})
        assert answer.status_code == 200
        (line,) = warnings(live)
        assert line.startswith(answer.headers["request-id"])
        assert "<tool_call>" in line
        assert f"the parser {format.tool or 'none'} found no call" in line
        assert "--tool-call-parser" in line


def test_a_long_reply_is_searched_too() -> None:
    said, form = "word " * 2000 + CALLS, ReplyFormat(tool="mistral")
    with scripted_server(said, format=form, context_length=1 << 16) as live:
        body = ASK | {"tools": [TOOL], "max_tokens": 20_000}
        answer = post(live, "/v1/messages", body)
        assert answer.json()["stop_reason"] == "end_turn"
        assert "<tool_call>" in live.log.wait_for("found no call")


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (CALLS, {"tools": [TOOL]}),
        ("plain words", {"tools": [TOOL]}),
        (f"[TOOL_CALLS]{CALLS}", {}),
        (f"[TOOL_CALLS]{CALLS}", {"tools": [TOOL], "tool_choice": {"type": "none"}}),
    ],
    ids=["read", "no call", "no tools", "no calls wanted"],
)
def test_replies_without_an_unread_call_are_not_logged(reply: str, body: dict[str, Any]) -> None:
    with scripted_server(reply) as live:
        assert post(live, "/v1/messages", ASK | body).status_code == 200
        assert warnings(live) == []
