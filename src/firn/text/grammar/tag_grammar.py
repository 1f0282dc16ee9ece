"""The grammar of calls written as tags: strings as they are, everything else as JSON."""

from __future__ import annotations

import json

from firn.core.errors import InvalidValue
from firn.core.values import Tool
from firn.text.calls.schema import types_of
from firn.text.calls.tag_calls import CallTags
from firn.text.grammar.bare_values import (
    allowed_values,
    as_root,
    string_terminals,
    unenforced_members,
    unenforced_text,
)
from firn.text.grammar.call_grammar import CallGrammar, Parameter, lark_grammar, parameters, plain
from firn.text.grammar.lark import literal

_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


def calls_in_tags(g: CallGrammar, tags: CallTags, opening: str) -> str:
    """Calls between `opening` and the section's end; one in each section, or all in one."""
    return _TagGrammarWriter(g, tags, opening).calls()


class _TagGrammarWriter:
    """Owner: one call of `calls_in_tags`."""

    def __init__(self, g: CallGrammar, tags: CallTags, opening: str) -> None:
        self._g = g
        self._lark = g.lark
        self._tags = tags
        self._line = tags.line
        self._opening = opening

    def calls(self) -> str:
        t = self._tags
        call = self._g.each(self._call)
        opens = self._opening
        if t.call and opens != t.call:  # else the call's own tag is all there is
            opens += self._line
        if t.shares_section:
            run = self._g.several(call)
            return f"{self._g.opening(opens)} {run} {self._lark.mark(t.section_end)}"
        return self._g.in_marks(opens, call, t.section_end, self._line)

    def _call(self, tool: Tool) -> str:
        t = self._tags
        tag = "" if self._opening == t.call else t.call
        name = t.quoted(t.call, plain(tool.name, tool.param)).removeprefix(t.call)
        head = f"{tag}{name}{t.name_end}"
        # One line break after the name is enough.
        head += self._line if t.name_end != "\n" else ""
        tail = f"{t.call_end}{self._line}" if t.call else ""
        for key in unenforced_members(tool.parameters):
            self._lark.leave_out(tool.param, f"#/{key}")
        declared = parameters(tool)
        body = (
            [self._any_parameters(tool)]
            if declared is None
            else [self._parameter(p, tool) for p in declared]
        )
        return " ".join([self._lark.mark(head), *body, self._lark.mark(tail)])

    def _parameter(self, parameter: Parameter, tool: Tool) -> str:
        t = self._tags
        types = types_of(parameter.schema, as_root(parameter.schema))
        is_raw = not types or "string" in types
        kind = f' string="{"true" if is_raw else "false"}"' if t.has_string_attribute else ""
        opens = f"{t.quoted(t.parameter, parameter.name)}{kind}{self._opens()}"
        head = self._lark.mark(opens)
        grammar = lark_grammar(tool)
        if grammar is not None:
            closes = self._lark.mark(self._closes(parameter.name) + self._line)
            return self._lark.rule(f"{head} {self._lark.part(grammar)} {closes}")
        tag = self._lark.rule(f"{head} {self._value(parameter, types, tool.param)}")
        return tag if parameter.required else f"{tag}?"

    def _any_parameters(self, tool: Tool) -> str:
        """Any parameters with any text: the schema declares none."""
        t, mark = self._tags, self._lark.mark
        if t.closes("a") != t.closes("b"):
            raise InvalidValue(
                tool.param, "the model's call format needs the names of the parameters"
            )
        before, after = t.quoted(t.parameter, "\0").split("\0")
        kind = ' string="true"' if t.has_string_attribute else ""
        key = self._lark.terminal(_KEY)
        head = f"{mark(before)} {key} {mark(after + kind + self._opens())}"
        tag = self._lark.rule(
            f"{head} {self._lark.text_before(self._closes(''))} {mark(self._line)}"
        )
        return f"{tag}*"

    def _opens(self) -> str:
        t = self._tags
        return t.key_end + (self._line + t.value_open if t.value_open else "") + t.padding

    def _closes(self, key: str) -> str:
        return self._tags.padding + self._tags.closes(key)

    def _value(self, parameter: Parameter, types: frozenset[str], param: str) -> str:
        name, schema = parameter.name, parameter.schema
        end = self._lark.mark(self._closes(name) + self._line)
        values = allowed_values(schema)
        if values is not None:
            texts = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
            return f"({' | '.join(map(literal, texts))}) {end}"
        if types and "string" not in types:
            return f"{self._lark.json(schema, param=param)} {end}"
        for key in unenforced_text(schema):
            self._lark.leave_out(param, f"#/properties/{name}/{key}")
        text = self._lark.text_before(self._closes(name), where=string_terminals(schema))
        return f"{text} {self._lark.mark(self._line)}"
