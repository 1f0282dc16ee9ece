"""Apertus: a list of objects, each with one member: the name of a tool, and the arguments."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls.call_parser import NotACall, Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.lark import literal

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


class Apertus(JsonCallParser):
    def script(self) -> Script[None]:
        yield from self.guarded(self._list(), CLOSE)
        yield from self.tape.close(CLOSE, stray="}]")

    def _list(self) -> Script[None]:
        json_tape = JsonTape(self.tape)
        yield from self.tape.skip()
        yield from self.tape.expect("[")
        while True:
            yield from self.tape.skip()
            yield from self.tape.expect("{")
            yield from self.tape.skip()
            name = yield from json_tape.string()
            yield from self.tape.skip()
            yield from self.tape.expect(":")
            if (yield from json_tape.next_char()) != "{":
                raise NotACall
            self.start(name)
            yield from self.stream_arguments()
            yield from self.tape.skip()
            yield from self.tape.expect("}")
            self.tape.keep()
            char = yield from json_tape.next_char()
            self.tape.pos += len(char)
            if char != ",":
                return


def _grammar(g: CallGrammar) -> str:
    def write(tool: Tool) -> str:
        head = g.lark.mark(f"{{{literal(tool.name)}: ")
        return f"{head} {g.arguments(tool)} {g.lark.mark('}')}"

    calls = g.several(g.each(write), ", ")
    return f"{g.opening(OPEN + '[')} {calls} {g.lark.mark(']' + CLOSE)}"


FORMATS = (
    ToolFormat(
        name="apertus",
        parser=Apertus,
        opens=(OPEN,),
        tokens=(OPEN, CLOSE),
        example=f'{OPEN}[{{"get_weather": {{"city": "Paris", "days": 3}}}}]{CLOSE}',
        matches=lambda clues: OPEN in clues.template,
        grammar=_grammar,
        write=write_json(OPEN + '[{"', '": ', "}]" + CLOSE),
    ),
)
