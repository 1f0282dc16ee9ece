"""Calls as JSON between tags: Hermes and Qwen's <tool_call>{...}</tool_call> and its many variants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape, write_json
from firn.text.calls.parsers import ToolFormat, WriteCall
from firn.text.grammar.call_grammar import CallGrammar


@dataclass(frozen=True, slots=True)
class TagLayout:
    """How calls are written after a tag: each with a tag of its own, or all in one list.

    closer: the closing tag, if there is one. clue: what a template of the format contains; "": the tag.
    """

    closer: str = ""
    is_list: bool = True
    before: str = '{"name": '
    between: str = ', "arguments": '
    line: str = ""
    clue: str = ""


TAGS = {
    "<tool_call>": TagLayout("</tool_call>", is_list=False, line="\n"),
    "<|tool_call|>": TagLayout("<|/tool_call|>"),
    "<tool_calls>": TagLayout("</tool_calls>"),
    "<TOOLCALL>": TagLayout("</TOOLCALL>"),
    "<|START_ACTION|>": TagLayout(
        "<|END_ACTION|>",
        before='{"tool_call_id": "0", "tool_name": ',
        between=', "parameters": ',
        line="\n",
    ),
    "<|action_start|><|plugin|>": TagLayout(
        "<|action_end|>", is_list=False, between=', "parameters": ', line="\n"
    ),
    "<function_call>": TagLayout("</function_call>", is_list=False),
}
"""Markup by its look: these share a format, since models mix them."""
MARKS = {
    "<|function_call|>": TagLayout(is_list=False),
    "function call<|role_sep|>": TagLayout(is_list=False, line="\n", clue="<|role_sep|>"),
    "<|message_sep|>\n\nfunction call<|role_sep|>": TagLayout(is_list=False, line="\n"),
    "functools": TagLayout(clue="functools["),
    "Action:\n```json": TagLayout(
        "```",
        before='{"tool_name": ',
        between=', "parameters": ',
        line="\n",
        clue="Action:\\n```json",
    ),
}


_LAYOUTS = {**TAGS, **MARKS}


class JsonTags(JsonCallParser):
    def script(self) -> Script[None]:
        closer = _LAYOUTS[self.marker].closer
        yield from self.guarded(self._calls(), *filter(None, [closer]))
        # Models often write a bracket or a comma too many; it is harmless.
        yield from self.tape.close(closer, stray="}],")

    def _calls(self) -> Script[None]:
        yield from self.calls()
        json_tape = JsonTape(self.tape)
        while (yield from json_tape.next_char()) in ("{", "["):  # several calls in one pair of tags
            yield from self.calls()


def _opening(layouts: Mapping[str, TagLayout], template: str) -> str | None:
    return next((o for o, layout in layouts.items() if (layout.clue or o) in template), None)


def _format(
    name: str, layouts: Mapping[str, TagLayout], example: str, write: WriteCall, *aliases: str
) -> ToolFormat:
    def grammar(g: CallGrammar) -> str:
        opening = _opening(layouts, g.template) or next(iter(layouts))
        layout = layouts[opening]
        closer = layout.closer
        if closer not in g.template and not g.lark.is_token(closer):  # the reply's end closes it
            closer = ""
        opens, closes = opening + layout.line, layout.line + closer if closer else ""
        call = g.json_call(layout.before, layout.between, "}")
        if layout.is_list:
            calls = g.several(call, ", ")
            return f"{g.opening(opens)} {g.lark.mark('[')} {calls} {g.lark.mark(']' + closes)}"
        return g.in_marks(opens, call, closes, layout.line)

    closers = (c for c in (layout.closer for layout in layouts.values()) if c.startswith("<"))
    # <|message_sep|> stays hidden: it also ends a text.
    tokens = re.findall(r"<[^<>]*>", " ".join(o for o in layouts if "\n" not in o))
    return ToolFormat(
        name=name,
        parser=JsonTags,
        opens=tuple(layouts),
        tokens=tuple(dict.fromkeys([*closers, *tokens])),
        aliases=aliases,
        example=example,
        matches=lambda clues: _opening(layouts, clues.template) is not None,
        grammar=grammar,
        write=write,
        rank=-10,
    )


FORMATS = (
    _format(
        "json_tags",
        TAGS,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        write_json('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        "hermes",
        "qwen",
        "qwen2_5",
        "qwen3",
        "json_tools",
        "granite",
        "granite4",
        "granite_20b_fc",
        "granite-20b-fc",
        "ernie45",
        "internlm",
        "cohere_command3",
        "cohere_command4",
        "nemotron",
        "jamba",
        "hunyuan_a13b",
    ),
    _format(
        "json_marks",
        MARKS,
        '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
        write_json('<|function_call|>{"name": "', '", "arguments": ', "}"),
        "gigachat3",
        "phi4_mini_json",
        "command_r",
    ),
)
