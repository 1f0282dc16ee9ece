"""Detects a call in a reply that the parser missed because it is in another format. Pure.

Only a whole call of a tool that was offered counts: not one that was cut short, nor text about calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from firn.core.events import ChoiceFinished, Event, TextDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.calls.json_calls import ARGUMENT_KEYS, NAME_KEYS
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.reply.formats import ReplyFormat, make_splitter
from firn.text.reply.pieces import CallArguments, CallStart

MAX_OBJECTS = 32
"""JSON objects examined in one text."""


class UnreadCalls:
    """Owner: one choice of a reply that was offered tools. `see` every event, in order."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._texts: list[str] = []
        self._has_calls = False

    def observe(self, events: Iterable[Event]) -> str | None:
        """The text to give to `mark`: the whole reply, if it ended by itself, no call was read in it
        and it names a tool. Else None."""
        for event in events:
            if isinstance(event, TextDelta):
                self._texts.append(event.text)
            elif isinstance(event, ToolCallStarted):
                self._has_calls = True
            elif isinstance(event, ChoiceFinished) and event.reason == "stop":
                text = "".join(self._texts)
                named = not self._has_calls and any(tool.name in text for tool in self._tools)
                return text if named else None
        return None

    def mark(self, text: str) -> str | None:
        """See `mark_of_call`. Slow for a long text."""
        return mark_of_call(text, self._tools)


def mark_of_call(text: str, tools: Sequence[Tool]) -> str | None:
    """The marker, or the name, of a call of one of the tools in any format; None without one."""
    if not any(tool.name in text for tool in tools):
        return None
    for form in formats().values():
        markers = [marker for marker in form.opens if marker in text]
        if (markers or form.starts or form.splitter) and _reads_call(form, text, tools):
            return markers[0] if markers else form.name
    return _json_call(text, {tool.name for tool in tools})


def _reads_call(form: ToolFormat, text: str, tools: Sequence[Tool]) -> bool:
    splitter = make_splitter(ReplyFormat(tool=form.name), tuple(tools), "")
    if splitter is None:
        return False
    name, arguments = "", ""
    names = {tool.name for tool in tools}
    for piece in [*splitter.feed(text), *splitter.finish()]:
        if isinstance(piece, CallStart):
            if name in names and _is_object(arguments):
                return True
            name, arguments = piece.name, ""
        elif isinstance(piece, CallArguments):
            arguments += piece.text
    return name in names and _is_object(arguments)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _json_call(text: str, names: set[str]) -> str | None:
    """The name in a call as JSON in the middle of text, as in a block of code."""
    decoder = json.JSONDecoder()
    for match in list(re.finditer(r"\{", text))[:MAX_OBJECTS]:
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        named = next((value[key] for key in NAME_KEYS if isinstance(value.get(key), str)), None)
        if named in names and any(isinstance(value.get(key), dict) for key in ARGUMENT_KEYS):
            return f'"{named}"'
    return None
