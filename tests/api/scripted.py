"""A live server whose model gives a scripted reply, and the frames of its streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from firn.core.values import Job
from firn.text.reply.formats import THINK_TAGS, ReplyFormat
from tests.api.live import Live, serve
from tests.fakes import FakeTokenizer

FORMAT = ReplyFormat(tool="json_tags", think=THINK_TAGS["think"])
THOUGHT, SAID = "hm, weather", "I shall look."
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
)
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALLS}"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}


@contextmanager
def scripted_server(reply: str = REPLY, **options: Any) -> Iterator[Live]:
    """A server that answers every request with this text."""
    tokenizer = options.pop("tokenizer", None) or FakeTokenizer()

    def say(job: Job, choice: int) -> list[int]:
        return tokenizer.encode(reply, add_special=False)

    with serve(
        reply=say, tokenizer=tokenizer, reply_format=options.pop("format", FORMAT), **options
    ) as live:
        yield live


def frames(raw: str) -> list[tuple[str, Any]]:
    """The events of a stream by name, with their data; comments are ("", text)."""
    events: list[tuple[str, Any]] = []
    for frame in raw.split("\n\n")[:-1]:
        lines = frame.split("\n")
        if lines[0].startswith(":"):
            events.append(("", lines[0][1:].strip()))
            continue
        name = lines[0].removeprefix("event: ")
        data = json.loads(lines[-1].removeprefix("data: "))
        assert len(lines) == 2
        assert data["type"] == name
        events.append((name, data))
    return events


def post(live: Live, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json=body, timeout=60, **options)
