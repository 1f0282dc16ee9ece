"""Calls as Python: [get_weather(city="Paris")] between control tokens (LFM2), in tags (OLMo), bare, or
either way (Llama 4). Between tokens LFM2 also writes JSON, if it is asked to."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from firn.core.errors import InvalidValue
from firn.core.values import Tool
from firn.text.calls.call_parser import CallParser, NotACall, Script, TextEnded
from firn.text.calls.json_calls import ARGUMENT_KEYS
from firn.text.calls.parsers import Clues, ToolFormat
from firn.text.calls.python_calls import Brackets, PythonCall, python_calls, write_call
from firn.text.calls.schema import ToolSchemas
from firn.text.grammar.bare_values import unenforced_members
from firn.text.grammar.call_grammar import CallGrammar, Parameter, parameters, unwritable
from firn.text.grammar.lark import escaped

MAX_TRIES = 8
"""Attempts to parse a text whose brackets are closed."""

CLOSERS = {
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}


LLAMA4, LLAMA4_END = "<|python_start|>", "<|python_end|>"


class Pythonic(CallParser):
    closers: ClassVar[Mapping[str, str]] = CLOSERS

    def script(self) -> Script[None]:
        try:
            body, _ = yield from self.tape.until(self.closers[self.marker])
        except TextEnded:
            body, self.tape.pos = self.tape.text[self.tape.pos :], len(self.tape.text)
            # Parsing from each of many repeated markers would take quadratic time.
            if self.marker in body:
                raise NotACall from None
        calls = python_calls(body) or _json_calls(body)
        if not calls:
            raise NotACall
        self.emit(calls)

    def emit(self, calls: list[PythonCall]) -> None:
        for call in calls:
            self.checked(call.name)
        for call in calls:
            self.whole(call.name, call.arguments)


class BarePythonic(Pythonic):
    """A list of calls of known tools that is the whole reply."""

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = True) -> None:
        super().__init__(marker, schemas, known_only=True)
        # Models quote as Python does, or as templates do, without escapes.
        self._brackets = (Brackets(lenient=False), Brackets(lenient=True))
        self._n_scanned = 0

    def script(self) -> Script[None]:
        yield from self._could_be_a_call()
        for _ in range(MAX_TRIES):
            yield from self._close()
            calls = python_calls(self.tape.text[: self.tape.pos])
            if calls:
                self.emit(calls)
                return
        raise NotACall

    def _close(self) -> Script[None]:
        """Reads to a bracket that may close the list: trying every one would be quadratic."""
        while True:
            start = self._n_scanned
            yield from self.tape.until("]")
            self._n_scanned = self.tape.pos
            piece = self.tape.text[start : self._n_scanned]
            is_closed = [brackets.feed(piece) for brackets in self._brackets]
            if any(is_closed):
                return

    def _could_be_a_call(self) -> Script[None]:
        """Reads [name( with the name of a tool; raises NotACall as soon as it is anything else."""
        name, _ = yield from self.tape.until("(", limit=128)
        self.checked(name)


class Llama4(BarePythonic):
    """Bare, or anywhere in a reply between control tokens."""

    closers: ClassVar[Mapping[str, str]] = {LLAMA4: LLAMA4_END}

    def script(self) -> Script[None]:
        is_marked = self.marker in self.closers
        yield from Pythonic.script(self) if is_marked else super().script()


def _json_calls(text: str) -> list[PythonCall]:
    """The calls in a JSON object, or in a list of them; empty for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for given in value if isinstance(value, list) else [value]:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            return []
        arguments: Any = next((given[key] for key in ARGUMENT_KEYS if key in given), {})
        if not isinstance(arguments, dict):
            return []
        calls.append(PythonCall(given["name"], arguments))
    return calls


def _matches(clues: Clues) -> bool:
    in_template = any(opening in clues.template for opening in CLOSERS)
    return in_template or all(map(clues.has_token, ("<|tool_call_start|>", "<|tool_call_end|>")))


def _grammar(g: CallGrammar) -> str:
    opening = next((o for o in CLOSERS if o in g.template), "<|tool_call_start|>")
    return f"{g.opening(opening)} {_bare_grammar(g)} {g.lark.mark(CLOSERS[opening])}"


def _llama4_grammar(g: CallGrammar) -> str:
    bare = _bare_grammar(g)
    return f"({g.opening(LLAMA4)} {bare} {g.lark.mark(LLAMA4_END)} | {bare})"


def _bare_grammar(g: CallGrammar) -> str:
    """The bracket and the first name are one literal: text might follow either of them alone."""

    def first(tool: Tool) -> str:
        return write(tool, "[")

    def write(tool: Tool, before: str = "") -> str:
        _check_names(tool.param, *tool.name.split("."))
        for key in unenforced_members(tool.parameters):
            g.lark.leave_out(tool.param, f"#/{key}")
        declared = parameters(tool)
        if declared is None:
            why = "the model's call format needs the names of the parameters"
            raise InvalidValue(tool.param, why)
        _check_names(tool.param, *(p.name for p in declared))
        head = g.lark.mark(f"{before}{tool.name}(")
        return f"{head} {_keywords(g, declared, tool)} {g.lark.mark(')')}"

    return f'{g.several(g.each(write), ", ", first=g.each(first))} "]"'


def _keywords(g: CallGrammar, declared: Sequence[Parameter], tool: Tool) -> str:
    """name=value pairs; values are JSON, whose true, false and null the parser accepts."""
    pairs = [(f"{g.lark.mark(p.name + '=')} {g.json_value(tool, p)}", p.required) for p in declared]
    return g.lark.sequence(pairs, ", ")


def _check_names(param: str, *names: str) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise unwritable(name, param)


def _bare_calls(names: Sequence[str]) -> str:
    return rf"\s*\[\s*({'|'.join(map(escaped, names))})\s*\((?s:.*)"


def _write_bare(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{write_call(name, arguments)}]"


def _asks_for_lists(clues: Clues) -> bool:
    return "[func_name1(" in clues.template


FORMATS = (
    ToolFormat(
        name="pythonic",
        parser=Pythonic,
        opens=tuple(CLOSERS),
        tokens=(*CLOSERS, *CLOSERS.values()),
        aliases=("lfm2", "olmo3"),
        example='<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>',
        matches=_matches,
        grammar=_grammar,
        write=lambda name, arguments: (
            f"<|tool_call_start|>[{write_call(name, arguments)}]<|tool_call_end|>"
        ),
    ),
    ToolFormat(
        name="pythonic_bare",
        parser=BarePythonic,
        opens=(),
        starts=("[",),
        example='[get_weather(city="Paris", days=3)]',
        matches=_asks_for_lists,
        grammar=_bare_grammar,
        bare=_bare_calls,
        write=_write_bare,
    ),
    ToolFormat(
        name="llama4_pythonic",
        parser=Llama4,
        opens=(LLAMA4,),
        starts=("[",),
        tokens=(LLAMA4, LLAMA4_END),
        example=f'{LLAMA4}[get_weather(city="Paris", days=3)]{LLAMA4_END}',
        matches=lambda clues: _asks_for_lists(clues) and clues.has_token(LLAMA4),
        grammar=_llama4_grammar,
        bare=_bare_calls,
        write=_write_bare,
        rank=1,
    ),
)
