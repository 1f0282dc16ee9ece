"""Functionary 3.2: every part of a reply follows >>>RECIPIENT, and the recipient "all" is the user.

The prompt ends with the first >>>.
"""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls.call_parser import CallParser, NotACall, Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.calls.schema import ToolSchemas
from firn.text.grammar.call_grammar import CallGrammar, plain
from firn.text.grammar.lark import Lark, escaped
from firn.text.reply.splitter import CallMarkers, TagSplitter

MARK, TO_USER = ">>>", "all\n"


class Functionary(JsonCallParser):
    def script(self) -> Script[None]:
        if (yield from JsonTape(self.tape).next_char()) != "{":
            raise NotACall
        self.start(self.marker.removeprefix(MARK))
        yield from self.guarded(self.stream_arguments(), MARK)


def _splitter(schemas: ToolSchemas, prompt_tail: str) -> TagSplitter:
    def make(marker: str, *, known_only: bool) -> CallParser:
        return Functionary(marker, schemas, known_only=known_only)

    opens = tuple(f"{MARK}{tool.name}\n" for tool in schemas.tools)
    calls = CallMarkers(opens, make) if opens else None
    return TagSplitter(None, calls, in_reasoning=False, drop=(MARK + TO_USER,), begun=MARK)


def _grammar(g: CallGrammar) -> str:
    def write(tool: Tool) -> str:
        return f"{g.lark.mark(plain(tool.name, tool.param) + chr(10))} {g.arguments(tool)}"

    return g.several(g.each(write), MARK)


def _reply(lark: Lark, calls: str | None, answer: str | None) -> str:
    said = f"{lark.mark(TO_USER)} {answer}" if answer else None
    return " | ".join(filter(None, (calls, said)))


FORMATS = (
    ToolFormat(
        name="functionary",
        parser=Functionary,
        splitter=_splitter,
        opens=(),
        aliases=("functionary_v32",),
        example='get_weather\n{"city": "Paris", "days": 3}',
        matches=lambda clues: f"{MARK}${{recipient}}" in clues.template,
        grammar=_grammar,
        bare=lambda names: rf"(?s:.*){MARK}({'|'.join(map(escaped, names))})\n(?s:.*)",
        reply=_reply,
        write=write_json("", "\n", ""),
        rank=5,
    ),
)
