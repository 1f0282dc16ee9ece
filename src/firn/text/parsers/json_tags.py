"""Calls as JSON between tags: Hermes and Qwen's <tool_call>{...}</tool_call> and its many cousins."""

from __future__ import annotations

from firn.text.calls import Script
from firn.text.json_calls import JsonCallParser, JsonTape
from firn.text.parsers import Clues, ToolFormat

CLOSERS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|action_start|><|plugin|>": "<|action_end|>",
}


class JsonTags(JsonCallParser):
    def script(self) -> Script[None]:
        closer = CLOSERS[self.marker]
        yield from self.guarded(self._calls(), closer)
        # A brace too many is common, and means nothing.
        yield from self.tape.close(closer, stray="}]")

    def _calls(self) -> Script[None]:
        yield from self.calls()
        json_tape = JsonTape(self.tape)
        while (yield from json_tape.next_char()) in ("{", "["):  # several calls in one pair of tags
            yield from self.calls()


def _matches(clues: Clues) -> bool:
    return any(opening in clues.template for opening in CLOSERS)


FORMATS = (
    ToolFormat(
        name="json_tags",
        parser=JsonTags,
        opens=tuple(CLOSERS),
        tokens=(*CLOSERS, *CLOSERS.values(), "<|action_start|>", "<|plugin|>"),
        aliases=(
            "hermes",
            "qwen",
            "qwen2_5",
            "qwen3",
            "json_tools",
            "granite",
            "nemotron",
            "jamba",
        ),
        example='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call>",
        matches=_matches,
        rank=-10,
    ),
)
