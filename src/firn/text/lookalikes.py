"""Notices a reply with a call in it that no parser has read: a model in a format of its own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from firn.core.events import ChoiceFinished, Event, TextDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.parsers import formats

MIN_MARKER_CHARS = 5
"""Shorter markers ([, {) are found in any text."""


class CallWatch:
    """Owner: one choice of a reply that was offered tools. `see` what is sent, in order."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._said: list[str] = []
        self._has_calls = False

    def see(self, events: Iterable[Event]) -> str | None:
        """The mark of an unread call, once the reply has ended without any that was read."""
        for event in events:
            if isinstance(event, TextDelta):
                self._said.append(event.text)
            elif isinstance(event, ToolCallStarted):
                self._has_calls = True
            elif isinstance(event, ChoiceFinished) and not self._has_calls:
                return mark_of_call("".join(self._said), self._tools)
        return None


def mark_of_call(text: str, tools: Sequence[Tool]) -> str | None:
    """A marker of any known format, or a tool named the way calls name it."""
    for form in formats().values():
        for marker in form.opens:
            if len(marker) >= MIN_MARKER_CHARS and marker in text:
                return marker
    names = "|".join(re.escape(tool.name) for tool in tools)
    named = re.search(rf'"(?:name|function|tool)"\s*:\s*"(?:{names})"', text)
    return named[0] if named else None
