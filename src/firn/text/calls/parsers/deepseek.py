"""DeepSeek V3, R1 and V3.1: calls between tags with full-width bars, arguments as JSON.

V3    <...call begin>function<...sep>NAME \\n ```json \\n {...} \\n ``` <...call end>
V3.1  <...call begin>NAME<...sep>{...}<...call end>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firn.core.values import Tool
from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import JsonTape, SectionCallParser, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.grammar.call_grammar import CallGrammar, plain


def _tag(words: str) -> str:
    return f"<｜{words.replace(' ', '▁')}｜>"


SECTION, SECTION_END = _tag("tool calls begin"), _tag("tool calls end")
CALL, CALL_END, SEP = _tag("tool call begin"), _tag("tool call end"), _tag("tool sep")
FENCE = "```"
KIND = "function"
"""V3 states for each call what kind of thing is called."""


class DeepSeek(SectionCallParser):
    section, section_end = SECTION, SECTION_END
    call_open, call_end = CALL, CALL_END
    fence = FENCE

    def read_call(self) -> Script[None]:
        name = yield from self.header(SEP, limit=256)
        char = yield from JsonTape(self.tape).next_char()
        if char != "{" and name.strip() == KIND:
            name, end = yield from self.tape.until("\n", FENCE, "{", limit=256)
            self.tape.pos -= 0 if end == "\n" else len(end)
            yield from self.tape.skip()
            if (yield from self.tape.take(FENCE)):
                yield from self.tape.take("json")
            yield from self.tape.skip()
        self.start(name)
        yield from self.stream_arguments()


@dataclass(frozen=True, slots=True)
class _Form:
    """What is written around the name and the arguments of a call, and between two calls."""

    before: str
    between: str
    after: str
    separator: str

    def grammar(self, g: CallGrammar) -> str:
        def write(tool: Tool) -> str:
            head = g.lark.mark(f"{self.before}{plain(tool.name, tool.param)}{self.between}")
            return f"{head} {g.arguments(tool)} {g.lark.mark(self.after)}"

        calls = g.several(g.each(write), self.separator)
        return f"{g.opening(SECTION)} {calls} {g.lark.mark(SECTION_END)}"

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        before, after = SECTION + self.before, self.after + SECTION_END
        return write_json(before, self.between, after)(name, arguments)


V3 = _Form(f"{CALL}{KIND}{SEP}", f"\n{FENCE}json\n", f"\n{FENCE}{CALL_END}", "\n")
V31 = _Form(CALL, SEP, CALL_END, "")


def _format(name: str, form: _Form, *aliases: str, clue: str, rank: int = 0) -> ToolFormat:
    return ToolFormat(
        name=name,
        parser=DeepSeek,
        opens=(SECTION, CALL),
        tokens=(SECTION, SECTION_END, CALL, CALL_END, SEP),
        aliases=aliases,
        example=form.write("get_weather", {"city": "Paris", "days": 3}),
        matches=lambda clues: SECTION in clues.template and clue in clues.template,
        grammar=form.grammar,
        write=form.write,
        rank=rank,
    )


FORMATS = (
    _format("deepseek", V31, "deepseek_v31", clue=""),
    _format("deepseek_v3", V3, "deepseek_r1", clue=FENCE, rank=1),
)
