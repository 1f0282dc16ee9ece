"""Mistral's [TOOL_CALLS]: a JSON list of calls, or name[ARGS]{...} with the marker before each."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape, write_json
from firn.text.calls.parsers import ToolFormat
from firn.text.grammar.call_grammar import CallGrammar, plain

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JsonCallParser):
    def script(self) -> Script[None]:
        char = yield from JsonTape(self.tape).next_char()
        if char in ("[", "{"):
            yield from self.guarded(self.calls(), MARKER)
        else:
            yield from self.guarded(self._named(), MARKER)

    def _named(self) -> Script[None]:
        name, end = yield from self.tape.until(CALL_ID, ARGS, "{", limit=256)
        call_id = None
        if end == CALL_ID:
            call_id, end = yield from self.tape.until(ARGS, "{", limit=256)
        if end == "{":
            self.tape.pos -= 1
        self.start(name, call_id.strip() if call_id else None)
        yield from self.stream_arguments()


def _grammar(g: CallGrammar) -> str:
    if ARGS not in g.template and not g.lark.is_token(ARGS):  # tokenizers before version 11
        calls = g.several(g.json_call('{"name": ', ', "arguments": ', "}"), ", ")
        return f"{g.opening(MARKER + '[')} {calls} {g.lark.mark(']')}"

    def write(tool: Tool) -> str:
        head = g.lark.mark(f"{plain(tool.name, tool.param)}{ARGS}")
        return f"{head} {g.arguments(tool)}"

    return g.in_marks(MARKER, g.each(write), "")


FORMATS = (
    ToolFormat(
        name="mistral",
        parser=Mistral,
        opens=(MARKER,),
        tokens=(MARKER, CALL_ID, ARGS),
        aliases=("devstral", "magistral"),
        example='[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
        matches=lambda clues: MARKER in clues.template,
        grammar=_grammar,
        write=write_json(MARKER, ARGS, ""),
    ),
)
