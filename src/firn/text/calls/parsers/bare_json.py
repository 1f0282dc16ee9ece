"""Calls as JSON with no markup: the reply is the call, as Llama 3 and xLAM write it.

Any JSON object may be an answer, so only an object that names one of the tools is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import NAME_KEYS, JsonCallParser, JsonTape, write_json
from firn.text.calls.parsers import Clues, ToolFormat
from firn.text.calls.schema import ToolSchemas
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.lark import escaped


class BareJson(JsonCallParser):
    any_key = False

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = True) -> None:
        super().__init__(marker, schemas, known_only=True)

    def script(self) -> Script[None]:
        self.tape.pos = 0  # the marker is the first character of the call
        yield from self.guarded(self.run_of_calls())

    def run_of_calls(self) -> Script[None]:
        """Calls in a row, with spaces, commas or semicolons between them."""
        yield from self.calls()
        while True:
            start = self.tape.position()
            yield from self.tape.skip(" \t\r\n;,")
            char = yield from JsonTape(self.tape).next_char()
            if char not in ("{", "[") or not char:
                self.tape.back_to(start)
                return
            yield from self.calls()


def _matches(clues: Clues) -> bool:
    """Whether the template asks for JSON with a name and parameters, without tags around it."""
    source = clues.template
    asks = re.search(r'\{\\?"name\\?":', source) is not None
    return asks and "parameters" in source and "tool_call>" not in source


def bare_calls(g: CallGrammar) -> str:
    return g.several(g.json_call('{"name": ', ', "parameters": ', "}"), "; ")


def bare_call(names: Sequence[str]) -> str:
    """A regular expression for an object, or a list, that names one of the tools."""
    keys, tools = "|".join(NAME_KEYS), "|".join(map(escaped, names))
    return rf'\s*[\[{{](?s:.*)"({keys})"\s*:\s*"({tools})"(?s:.*)'


write_bare = write_json('{"name": "', '", "parameters": ', "}")

FORMATS = (
    ToolFormat(
        name="bare_json",
        parser=BareJson,
        opens=(),
        starts=("{", "["),
        aliases=("llama3_json", "llama4_json", "xlam"),
        example='{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        matches=_matches,
        grammar=bare_calls,
        bare=bare_call,
        write=write_bare,
        rank=-20,
    ),
)
