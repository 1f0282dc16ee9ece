"""Calls are looked at when they are whole, where no grammar could hold them to their schema. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from firn.core.events import ChoiceFinished, Event, ToolCallDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.schema_check import faults

MAX_FAULTS = 8


class CallCheck:
    """Owner: one choice of a reply. `see` what is sent, in order."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """tools: those that may be called in a way their schema does not allow."""
        self._tools = {tool.name: tool for tool in tools}
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def see(self, events: Iterable[Event]) -> list[str]:
        """What is wrong with the calls of a reply that has ended, one line for each."""
        found: list[str] = []
        for event in events:
            if isinstance(event, ToolCallStarted):
                self._calls[event.index] = (event.name, [])
            elif isinstance(event, ToolCallDelta):
                self._calls[event.index][1].append(event.arguments)
            elif isinstance(event, ChoiceFinished):
                found += filter(None, (self._fault(*call) for call in self._calls.values()))
        return found

    def _fault(self, name: str, pieces: Sequence[str]) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return ""
        try:
            value = json.loads("".join(pieces))
        except ValueError:
            return ""  # cut short, which the finish reason says
        places = faults(value, tool.parameters)[:MAX_FAULTS]
        return (
            f"{tool.param}: a call of {name} does not follow {', '.join(places)}" if places else ""
        )
