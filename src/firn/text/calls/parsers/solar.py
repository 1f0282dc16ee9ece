"""Solar Open: a section of calls, each with its own id and a name, arguments as JSON."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import SectionCallParser, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.grammar.call_grammar import CallGrammar, plain

SECTION, SECTION_END = "<|tool_calls|>", "<|calls|>"
CALL, CALL_END = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME, ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"


class Solar(SectionCallParser):
    section, section_end = SECTION, SECTION_END
    call_open, call_end = CALL, CALL_END

    def read_call(self) -> Script[None]:
        call_id = yield from self.header(NAME, limit=256)
        name = yield from self.header(ARGUMENTS, limit=256)
        self.start(name, call_id.strip())
        yield from self.stream_arguments()


def _grammar(g: CallGrammar) -> str:
    def write(tool: Tool) -> str:
        head = g.lark.mark(f"{NAME}{plain(tool.name, tool.param)}{ARGUMENTS}")
        end = g.lark.mark(CALL_END)
        return f"{g.lark.mark(CALL)} /[a-z0-9]{{10}}/ {head} {g.arguments(tool)} {end}"

    return f"{g.opening(SECTION)} {g.several(g.each(write))} {g.lark.mark(SECTION_END)}"


FORMATS = (
    ToolFormat(
        name="solar",
        parser=Solar,
        opens=(SECTION, CALL),
        tokens=(SECTION, SECTION_END, CALL, CALL_END, NAME, ARGUMENTS),
        aliases=("solar_open",),
        example=f"{SECTION}{CALL}a1b2c3d4e5{NAME}get_weather{ARGUMENTS}"
        f'{{"city": "Paris", "days": 3}}{CALL_END}{SECTION_END}',
        matches=lambda clues: CALL in clues.template,
        grammar=_grammar,
        write=write_json(f"{SECTION}{CALL}a1b2c3d4e5{NAME}", ARGUMENTS, CALL_END + SECTION_END),
    ),
)
