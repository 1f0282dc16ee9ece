"""Checks finished calls against their schema, where no grammar could enforce it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from firn.core.events import ChoiceFinished, Event, ToolCallDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.schema_check import TIME_S, violations

MAX_VIOLATIONS = 8


class CallCheck:
    """Owner: one choice of a reply. `see` every event, in order."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """tools: those whose grammar allows calls that their schema does not."""
        self._tools = {tool.name: tool for tool in tools}
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._left_s = TIME_S
        """Time left for all calls of the choice together."""

    def see(self, events: Iterable[Event]) -> list[str]:
        """Once the reply has ended, what is wrong with its calls: one line for each faulty call."""
        lines: list[str] = []
        for event in events:
            if isinstance(event, ToolCallStarted):
                self._calls[event.index] = (event.name, [])
            elif isinstance(event, ToolCallDelta):
                self._calls[event.index][1].append(event.arguments)
            elif isinstance(event, ChoiceFinished):
                lines += filter(None, (self._fault(*call) for call in self._calls.values()))
        return lines

    def _fault(self, name: str, pieces: Sequence[str]) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return ""
        try:
            value = json.loads("".join(pieces))
        except (ValueError, RecursionError):
            return ""  # cut short, as the finish reason shows, or raw text that is not JSON
        began = time.thread_time()
        places = violations(value, tool.parameters, time_s=self._left_s)[:MAX_VIOLATIONS]
        self._left_s -= time.thread_time() - began
        return f"{tool.param}: a call of {name} violates {', '.join(places)}" if places else ""
