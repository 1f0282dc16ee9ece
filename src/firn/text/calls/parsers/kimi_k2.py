"""Kimi K2: a section of calls, each with its own id functions.NAME:INDEX, arguments as JSON."""

from __future__ import annotations

import re

from firn.core.values import Tool
from firn.text.calls.call_parser import NotACall, Script
from firn.text.calls.json_calls import SectionCallParser, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.grammar.call_grammar import CallGrammar, plain

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiK2(SectionCallParser):
    section, section_end = SECTION, SECTION_END
    call_open, call_end = CALL, CALL_END

    def read_call(self) -> Script[None]:
        header = yield from self.header(ARGUMENTS, limit=512)
        call_id = header.strip()
        match = _ID.fullmatch(call_id)
        if not match:
            raise NotACall
        self.start(match[1], call_id)
        yield from self.stream_arguments()


def _grammar(g: CallGrammar) -> str:
    def write(tool: Tool) -> str:
        head = g.lark.mark(f"{CALL}functions.{plain(tool.name, tool.param)}:")
        arguments = f"{g.lark.mark(ARGUMENTS)} {g.arguments(tool)}"
        return f"{head} /[0-9]{{1,3}}/ {arguments} {g.lark.mark(CALL_END)}"

    calls = g.several(g.each(write))
    return f"{g.opening(SECTION)} {calls} {g.lark.mark(SECTION_END)}"


FORMATS = (
    ToolFormat(
        name="kimi_k2",
        parser=KimiK2,
        opens=(SECTION, CALL),
        tokens=(SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS),
        aliases=("kimi",),
        example=f"{SECTION}{CALL}functions.get_weather:0{ARGUMENTS}"
        f'{{"city": "Paris", "days": 3}}{CALL_END}{SECTION_END}',
        matches=lambda clues: SECTION in clues.template,
        grammar=_grammar,
        write=write_json(f"{SECTION}{CALL}functions.", f":0{ARGUMENTS}", CALL_END + SECTION_END),
        rank=5,
    ),
)
