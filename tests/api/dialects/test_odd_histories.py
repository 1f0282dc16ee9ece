"""Odd histories left by interrupted agents do not end a session, whatever the template demands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from firn.text.reply.formats import ReplyFormat
from tests import families
from tests.api.live import Live, serve

ARGUMENTS = '{"at": 7}'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


@pytest.fixture(params=families.FAMILIES, scope="module")
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    form = ReplyFormat(tool="json_tags")
    tokenizer = families.tokenizer(request.param)
    with serve(tokenizer=tokenizer, reply_format=form, context_length=1 << 16) as running:
        yield running


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def called(*ids: str, arguments: str = ARGUMENTS) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


ASK, MORE = said("user", "askalder"), said("user", "moreelm")
ONE, RULE = said("assistant", "oneoak"), said("system", "ruleyew")
RESULT = result("c1", "resultlinden")
HISTORIES: dict[str, Any] = {
    "a result that nobody asked for": [ASK, result("zz", "resultlinden"), MORE],
    "a call that was given up": [ASK, called("c1"), MORE],
    "two calls, one given up": [ASK, called("c1", "c2"), result("c2", "resultlinden"), MORE],
    "two answers": [ASK, ONE, said("assistant", "twooak"), MORE],
    "an empty answer": [ASK, said("assistant", ""), MORE],
    "an answer first": [ONE, MORE],
    "a rule and an answer first": [RULE, ONE, MORE],
    "the system last": [ASK, ONE, RULE],
    "the system alone": [RULE],
    "results in another order": [ASK, called("c1", "c2"), result("c2", "twolinden"), RESULT],
    "arguments cut short": [ASK, called("c1", arguments='{"at": '), RESULT],
    "arguments that are no object": [ASK, called("c1", arguments="[7]"), RESULT],
    "a rule between call and result": [ASK, called("c1"), RULE, RESULT],
}  # fmt: skip


def test_odd_histories_are_answered_and_lose_nothing(live: Live) -> None:
    client = live.openai()
    for messages, tools in itertools.product(HISTORIES.values(), ({"tools": TOOLS}, {})):
        client.chat.completions.create(model="fake", messages=messages, **tools)
        for message in messages:
            assert (message.get("content") or "") in live.prompt
        later = [*messages, said("assistant", "fine"), said("user", "goonbirch")]
        client.chat.completions.create(model="fake", messages=later, **tools)
        assert live.prompt.index("fine") < live.prompt.index("goonbirch")
