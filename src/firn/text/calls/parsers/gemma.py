"""Gemma's own object notation: call:name{key:value}, strings between quote tokens.

FunctionGemma quotes with <escape>, Gemma 4 with <|"|>. Arguments become JSON as they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from firn.text.calls.call_parser import SPACE, CallParser, NotACall, Script, TextEnded
from firn.text.calls.json_calls import Sink
from firn.text.calls.parsers import ToolFormat, WriteCall
from firn.text.calls.schema import ANY, from_text
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.gemma_grammar import gemma_calls

_MAX_DEPTH = 32
_WORDS = {"None": None, "True": True, "False": False}


class _Marks(NamedTuple):
    quote: str
    end: str


MARKS = {
    "<start_function_call>": _Marks("<escape>", "<end_function_call>"),
    "<|tool_call>": _Marks('<|"|>', "<tool_call|>"),
}


class Gemma(CallParser):
    def script(self) -> Script[None]:
        self._quote, end = MARKS[self.marker]
        try:
            yield from self._calls()
        except TextEnded:
            raise
        except NotACall:
            if not self.is_open:
                raise
            self.complete()
            yield from self.tape.until(end)
            return
        yield from self.tape.close(end)

    def _calls(self) -> Script[None]:
        is_next = True
        while is_next:
            yield from self.tape.skip(SPACE + ",")
            yield from self.tape.expect("call:")
            name, _ = yield from self.tape.until("{", limit=256)
            self.start(name)
            self.arguments("{")
            self.missing.append("}")
            yield from self._members("}", self.arguments, depth=0)
            self.end()
            is_next = yield from self._another()

    def _another(self) -> Script[bool]:
        start = self.tape.position()
        yield from self.tape.skip(SPACE + ",")
        is_next = yield from self.tape.starts_with("call:")
        if not is_next:
            self.tape.back_to(start)
        return is_next

    def _members(self, closer: str, sink: Sink, *, depth: int) -> Script[None]:
        """Reads key:value pairs up to a brace, or values up to a bracket, from after the opener."""
        if depth > _MAX_DEPTH:
            raise NotACall
        separator = ""
        while True:
            yield from self.tape.skip()
            if (yield from self.tape.take(closer)):
                self.missing.pop()
                sink(closer)
                return
            lead, types = separator, ANY
            if closer == "}":
                key = yield from self._key()
                types = ANY if depth else self.schemas.types(self.name, key)
                lead += json.dumps(key, ensure_ascii=False) + ": "
            yield from self._value(lead, types, sink, depth=depth)
            yield from self.tape.skip()
            if not (yield from self.tape.take(",")):
                yield from self.tape.expect(closer)
                self.missing.pop()
                sink(closer)
                return
            separator = ", "

    def _key(self) -> Script[str]:
        if (yield from self.tape.take(self._quote)):
            key, _ = yield from self.tape.until(self._quote)
            yield from self.tape.expect(":")
        else:
            key, _ = yield from self.tape.until(":", limit=512)
        return key.strip().strip('"')

    def _value(self, lead: str, types: frozenset[str], sink: Sink, *, depth: int) -> Script[None]:
        yield from self.tape.skip()
        if (yield from self.tape.take(self._quote)):
            yield from self._string(lead, types, sink)
            return
        char = yield from self.tape.peek()
        if char in ("{", "["):
            self.tape.pos += 1
            closer = "}" if char == "{" else "]"
            sink(lead + char)
            self.missing.append(closer)
            yield from self._members(closer, sink, depth=depth + 1)
            return
        text, end = yield from self.tape.until(",", "}", "]")
        self.tape.pos -= len(end)
        text = text.strip()
        value = _WORDS[text] if not types and text in _WORDS else from_text(text, types)
        sink(lead + json.dumps(value, ensure_ascii=False))

    def _string(self, lead: str, types: frozenset[str], sink: Sink) -> Script[None]:
        if types and "string" not in types:
            text, _ = yield from self.tape.until(self._quote)
            sink(lead + json.dumps(from_text(text, types), ensure_ascii=False))
            return
        sink(lead + '"')
        self.missing.append('"')
        marker = ""
        while not marker:
            text, marker = yield from self.tape.flow(self._quote)
            sink(json.dumps(text, ensure_ascii=False)[1:-1])
        self.missing.pop()
        sink('"')


def _grammar(g: CallGrammar) -> str:
    opening = next((o for o in MARKS if o in g.template), "<start_function_call>")
    return gemma_calls(g, opening, *MARKS[opening])


def _writer(opening: str) -> WriteCall:
    quote, closer = MARKS[opening]

    def value(argument: Any) -> str:
        if isinstance(argument, str):
            return f"{quote}{argument}{quote}"
        if isinstance(argument, Mapping):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in argument.items()) + "}"
        if isinstance(argument, list | tuple):
            return "[" + ",".join(map(value, argument)) + "]"
        return json.dumps(argument)

    return lambda name, arguments: f"{opening}call:{name}{value(arguments)}{closer}"


FORMATS = (
    ToolFormat(
        name="gemma4",
        parser=Gemma,
        opens=("<|tool_call>",),
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
        example='<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        matches=lambda clues: "<|tool_call>" in clues.template,
        grammar=_grammar,
        write=_writer("<|tool_call>"),
    ),
    ToolFormat(
        name="function_gemma",
        parser=Gemma,
        opens=("<start_function_call>",),
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        aliases=("gemma", "functiongemma"),
        example="<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        "<end_function_call>",
        matches=lambda clues: "<start_function_call>" in clues.template,
        grammar=_grammar,
        write=_writer("<start_function_call>"),
    ),
)
