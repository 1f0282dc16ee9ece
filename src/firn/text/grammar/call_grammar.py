"""Building blocks for the grammars of tool formats: the callable tools, and JSON for arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firn.core.errors import InvalidValue
from firn.core.values import Grammar, Tool
from firn.text.grammar.json_lark import UnsupportedGrammar, for_json_string
from firn.text.grammar.lark import Lark, TextSymbol, literal

COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "unevaluatedProperties")
DEFINITIONS = ("$defs", "definitions")
QUOTE = '"'
FREE_FORM = "input"
"""The only argument of a free-form tool: a string."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The calls of one request. template: the chat template, which shows the variant of a format
    that the model was trained with. before: text that may precede the first call; None: none may.
    """

    lark: Lark
    tools: tuple[Tool, ...]
    """Those that may be called."""
    parallel: bool
    template: str
    before: TextSymbol | None = None

    def opening(self, marker: str) -> str:
        """The marker that opens the first call, or the section of all calls; text may precede it."""
        if self.before is None:
            return self.lark.mark(marker)
        return self.lark.text_then(self.before, marker)

    def each(self, write: Callable[[Tool], str]) -> str:
        """One call, of any of the tools."""
        return self.lark.any_of(map(write, self.tools))

    def several(self, call: str, between: str = "", *, first: str = "") -> str:
        """One call, or several where that is allowed. between: markup between two calls. first: how the
        first call is written, if that differs."""
        first = first or call
        if not self.parallel:
            return first
        separator = f"{self.lark.mark(between)} " if between else ""
        return self.lark.rule(f"{first} ({separator}{call})*")

    def in_marks(self, opens: str, call: str, closes: str, between: str = "") -> str:
        """Calls, each between its own opening and closing mark."""
        end = self.lark.mark(closes)
        marked = self.lark.rule(f"{self.lark.mark(opens)} {call} {end}")
        first = "" if self.before is None else self.lark.rule(f"{self.opening(opens)} {call} {end}")
        return self.several(marked, between, first=first)

    def arguments(self, tool: Tool) -> str:
        """The object of a call's arguments, as JSON."""
        if lark_grammar(tool) is not None:
            only = Parameter(FREE_FORM, {}, True)
            head = self.lark.mark(f'{{"{FREE_FORM}": ')
            return f"{head} {self.json_value(tool, only)} {self.lark.mark('}')}"
        return self.lark.json(arguments_schema(tool), param=tool.param)

    def json_value(self, tool: Tool, parameter: Parameter) -> str:
        """The value of one argument, as JSON."""
        grammar = lark_grammar(tool)
        if grammar is not None:
            try:
                inner = replace(grammar, text=for_json_string(grammar.text))
            except UnsupportedGrammar as e:
                self.lark.leave_out(grammar.param, f": {e}")
                return self.lark.json({"type": "string"}, param=tool.param)
            return f"{self.lark.mark(QUOTE)} {self.lark.part(inner)} {self.lark.mark(QUOTE)}"
        return self.lark.json(parameter.schema, param=tool.param)

    def json_call(self, before: str, between: str, after: str) -> str:
        """One call as JSON: markup, the name, markup, the arguments, markup."""

        def write(tool: Tool) -> str:
            head = self.lark.mark(f"{before}{literal(tool.name)}{between}")
            return f"{head} {self.arguments(tool)} {self.lark.mark(after)}"

        return self.each(write)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """An object with the declared parameters and no others, unless the schema allows them."""
    schema: dict[str, Any] = {"type": "object", **free_form(tool).parameters}
    closes = "properties" in schema and not any(key in schema for key in COMBINED)
    if closes:
        schema.setdefault("additionalProperties", False)
    return schema


def lark_grammar(tool: Tool) -> Grammar | None:
    """The Lark grammar of the string that a free-form tool accepts; None for other tools."""
    grammar = tool.grammar
    return grammar if grammar is not None and grammar.kind == "lark" else None


def free_form(tool: Tool) -> Tool:
    """Turns a free-form tool's regular expression into a schema pattern; other tools stay as is."""
    if tool.grammar is None or tool.grammar.kind != "regex":
        return tool
    pattern = {"type": "string", "pattern": f"^(?:{tool.grammar.text})$"}
    return replace(tool, parameters={**tool.parameters, "properties": {FREE_FORM: pattern}})


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Any
    required: bool


def parameters(tool: Tool) -> Sequence[Parameter] | None:
    """The declared parameters, in order; None if the schema declares none and allows any.

    Each schema can be used alone: it carries the definitions that it may refer to.
    """
    tool, param = free_form(tool), tool.param
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return None if tool.parameters.get("additionalProperties", True) else ()
    required = tool.parameters.get("required")
    names = [n for n in required if isinstance(n, str)] if isinstance(required, list) else []
    declared = [
        Parameter(plain(name, param), with_definitions(schema, tool.parameters), name in names)
        for name, schema in properties.items()
    ]
    undeclared = [Parameter(plain(n, param), {}, True) for n in names if n not in properties]
    return [*declared, *undeclared]


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema from inside `root` with the definitions that it may refer to, so it can be used alone."""
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}  # not a schema: it requires nothing
    return {**{key: root[key] for key in DEFINITIONS if key in root}, **schema}


def plain(name: str, param: str) -> str:
    """The name, if it needs no quotes in a tag; else raises InvalidValue."""
    if not name or any(c in "<>\"'`=" or c.isspace() for c in name):
        raise unwritable(name, param)
    return name


def unwritable(name: str, param: str) -> InvalidValue:
    return InvalidValue(param, f"the model's call format cannot write the name {name[:64]!r}")
