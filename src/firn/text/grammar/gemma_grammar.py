"""The grammar of Gemma's object notation: bare keys, strings between quote tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from firn.core.values import Tool
from firn.text.calls.schema import resolved, types_of
from firn.text.grammar.bare_values import (
    allowed_values,
    as_root,
    string_terminals,
    unenforced_items,
    unenforced_members,
    unenforced_text,
)
from firn.text.grammar.call_grammar import (
    FREE_FORM,
    CallGrammar,
    Parameter,
    free_form,
    lark_grammar,
    parameters,
    plain,
    with_definitions,
)

_MAX_DEPTH = 6
_KEY = "/[A-Za-z_][A-Za-z0-9_-]{0,63}/"


def gemma_calls(g: CallGrammar, opening: str, quote: str, closer: str) -> str:
    call = g.each(lambda tool: _GemmaWriter(g, quote, tool.param).call(tool))
    return g.in_marks(opening, call, closer)


class _GemmaWriter:
    """Writes the grammar of one tool's calls. `param`: the tool's place in the request."""

    def __init__(self, g: CallGrammar, quote: str, param: str) -> None:
        self._lark = g.lark
        self._quote = quote
        self._param = param
        self._any = ""

    def call(self, tool: Tool) -> str:
        head = self._lark.mark(f"call:{plain(tool.name, self._param)}")
        grammar = lark_grammar(tool)
        if grammar is not None:
            opens = self._lark.mark(f"{{{FREE_FORM}:{self._quote}")
            closes = self._lark.mark(f"{self._quote}}}")
            return f"{head} {opens} {self._lark.part(grammar)} {closes}"
        return f"{head} {self._object(free_form(tool).parameters, '#', depth=0)}"

    def _object(self, schema: Mapping[str, Any], at: str, *, depth: int) -> str:
        self._leave_out(at, unenforced_members(schema))
        declared = parameters(Tool("", "", schema, param=self._param))
        if declared is None:
            pair = f'{self._lark.terminal(_KEY)} ":" {self._anything()}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        pairs = [(self._pair(p, at, depth), p.required) for p in declared]
        return f'"{{" {self._lark.sequence(pairs, ",")} "}}"'

    def _leave_out(self, at: str, keys: Iterable[str]) -> None:
        for key in keys:
            self._lark.leave_out(self._param, f"{at}/{key}")

    def _pair(self, p: Parameter, at: str, depth: int) -> str:
        value = self._value(p.schema, f"{at}/properties/{p.name}", depth)
        return self._lark.rule(f"{self._lark.mark(p.name + ':')} {value}")

    def _value(self, schema: Any, at: str, depth: int) -> str:
        root = as_root(schema)
        target = resolved(schema, root)
        types = types_of(target, root)
        if not isinstance(target, Mapping) or depth > _MAX_DEPTH:
            return self._anything()
        values = allowed_values(schema)
        if values is not None:
            return self._lark.any_of(map(self._literal, values))
        options = target.get("anyOf") or target.get("oneOf")
        if isinstance(options, list) and options:
            return self._lark.any_of(
                self._value(with_definitions(option, root), at, depth + 1) for option in options
            )
        if not types:
            return self._anything()
        whole = with_definitions(target, root)
        return self._lark.any_of(self._typed(t, whole, at, depth) for t in sorted(types))

    def _typed(self, kind: str, schema: Mapping[str, Any], at: str, depth: int) -> str:
        if kind == "string":
            self._leave_out(at, unenforced_text(schema))
            return self._string(schema)
        if kind == "object":
            return self._object(schema, at, depth=depth + 1)
        if kind == "array":
            self._leave_out(at, unenforced_items(schema))
            items = with_definitions(schema.get("items"), schema)
            item = self._value(items, f"{at}/items", depth + 1)
            return f'"[" {_items(item, schema)} "]"'
        return self._lark.json({**schema, "type": kind}, param=self._param)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.mark(f"{self._quote}{value}{self._quote}")
        return self._lark.mark(json.dumps(value, ensure_ascii=False))

    def _string(self, schema: Any = None) -> str:
        text = self._lark.text_before(self._quote, where=string_terminals(schema))
        return f"{self._lark.mark(self._quote)} {text}"

    def _anything(self) -> str:
        if not self._any:
            scalar = self._lark.json({"type": ["number", "boolean", "null"]}, param=self._param)
            self._any = self._lark.any_of([scalar, self._string()])
        return self._any


def _items(item: str, schema: Mapping[str, Any]) -> str:
    """Items with commas between them, as many as the schema allows."""
    least, most = schema.get("minItems"), schema.get("maxItems")
    low = least if isinstance(least, int) else 0
    if most == 0:
        return '""'
    more = f"{max(low - 1, 0)},{most - 1 if isinstance(most, int) else ''}"
    run = f'{item} ("," {item}){{{more}}}'
    return run if low else f"({run})?"
