"""DeepSeek V3, R1 and V3.1: calls between tags with full-width bars, arguments as JSON.

V3    <...call begin>function<...sep>NAME \\n ```json \\n {...} \\n ``` <...call end>
V3.1  <...call begin>NAME<...sep>{...}<...call end>
"""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.call_grammar import CallGrammar, plain
from firn.text.calls import Script
from firn.text.json_calls import JsonTape, SectionCallParser, write_json
from firn.text.parsers import ToolFormat


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


def _grammar(g: CallGrammar) -> str:
    before, between, after = "", SEP, ""
    if FENCE in g.template:
        before, between, after = f"{KIND}{SEP}", f"\n{FENCE}json\n", f"\n{FENCE}"

    def write(tool: Tool) -> str:
        head = g.lark.mark(f"{CALL}{before}{plain(tool.name, tool.param)}{between}")
        return f"{head} {g.arguments(tool)} {g.lark.mark(after + CALL_END)}"

    calls = g.several(g.each(write), "\n" if after else "")
    return f"{g.opening(SECTION)} {calls} {g.lark.mark(SECTION_END)}"


FORMATS = (
    ToolFormat(
        name="deepseek",
        parser=DeepSeek,
        opens=(SECTION, CALL),
        tokens=(SECTION, SECTION_END, CALL, CALL_END, SEP),
        aliases=("deepseek_v3", "deepseek_v31", "deepseek_r1"),
        example=f"{SECTION}{CALL}function{SEP}get_weather\n```json\n"
        f'{{"city": "Paris", "days": 3}}\n```{CALL_END}{SECTION_END}',
        matches=lambda clues: SECTION in clues.template,
        grammar=_grammar,
        write=write_json(SECTION + CALL, SEP, CALL_END + SECTION_END),
    ),
)
