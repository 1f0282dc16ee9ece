"""Calls as JSON between tags: Hermes and Qwen's <tool_call>{...}</tool_call> and its many variants."""

from __future__ import annotations

from dataclasses import dataclass

from firn.text.call_grammar import CallGrammar
from firn.text.calls import Script
from firn.text.json_calls import JsonCallParser, JsonTape, write_json
from firn.text.parsers import Clues, ToolFormat

CLOSERS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|action_start|><|plugin|>": "<|action_end|>",
}


@dataclass(frozen=True, slots=True)
class TagLayout:
    """How calls are written between tags: each in a pair of its own, or all in one list."""

    is_list: bool = True
    before: str = '{"name": '
    between: str = ', "arguments": '
    line: str = ""


LAYOUTS = {
    "<tool_call>": TagLayout(is_list=False, line="\n"),
    "<|action_start|><|plugin|>": TagLayout(is_list=False, between=', "parameters": ', line="\n"),
    "<|START_ACTION|>": TagLayout(
        before='{"tool_call_id": "0", "tool_name": ', between=', "parameters": ', line="\n"
    ),
}


class JsonTags(JsonCallParser):
    def script(self) -> Script[None]:
        closer = CLOSERS[self.marker]
        yield from self.guarded(self._calls(), closer)
        # Models often write an extra bracket; it is harmless.
        yield from self.tape.close(closer, stray="}]")

    def _calls(self) -> Script[None]:
        yield from self.calls()
        json_tape = JsonTape(self.tape)
        while (yield from json_tape.next_char()) in ("{", "["):  # several calls in one pair of tags
            yield from self.calls()


def _matches(clues: Clues) -> bool:
    return any(opening in clues.template for opening in CLOSERS)


def _grammar(g: CallGrammar) -> str:
    opening = next((o for o in CLOSERS if o in g.template), "<tool_call>")
    layout = LAYOUTS.get(opening, TagLayout())
    closer = CLOSERS[opening]
    if closer not in g.template and not g.lark.is_token(closer):  # the reply's end closes it
        closer = ""
    opens, closes = opening + layout.line, layout.line + closer
    call = g.json_call(layout.before, layout.between, "}")
    if layout.is_list:
        calls = g.several(call, ", ")
        return f"{g.opening(opens)} {g.lark.mark('[')} {calls} {g.lark.mark(']' + closes)}"
    return g.in_marks(opens, call, closes, layout.line)


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
        grammar=_grammar,
        write=write_json('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        rank=-10,
    ),
)
