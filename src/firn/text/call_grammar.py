"""What a tool format's grammar is written with: the tools it may call, and JSON for their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firn.core.errors import InvalidValue
from firn.core.values import Tool
from firn.text.lark import Lark, literal

COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "unevaluatedProperties")
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """One request's calls. `template` tells which dialect of a format the model was taught."""

    lark: Lark
    tools: tuple[tuple[str, Tool], ...]
    """(request parameter, tool) of each that may be called."""
    parallel: bool
    template: str

    def each(self, write: Callable[[str, Tool], str]) -> str:
        """One call, of any of the tools."""
        return self.lark.any_of(write(param, tool) for param, tool in self.tools)

    def several(self, call: str, between: str = "") -> str:
        """One call, or a run of them where that is allowed. `between` is markup."""
        if not self.parallel:
            return call
        joint = f"{self.lark.mark(between)} " if between else ""
        return self.lark.rule(f"{call} ({joint}{call})*")

    def arguments(self, param: str, tool: Tool) -> str:
        """The object of a call's arguments."""
        return self.lark.json(arguments_schema(tool), param=param)

    def json_call(self, before: str, between: str, after: str) -> str:
        """One call as JSON: markup, the name, markup, the arguments, markup."""

        def write(param: str, tool: Tool) -> str:
            head = self.lark.mark(f"{before}{literal(tool.name)}{between}")
            return f"{head} {self.arguments(param, tool)} {self.lark.mark(after)}"

        return self.each(write)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """An object with the declared parameters and, unless the schema says so, no others.

    What llguidance knows no grammar for is left to the tool, unless the tool is strict.
    """
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    closes = "properties" in schema and not any(key in schema for key in COMBINED)
    if closes:
        schema.setdefault("additionalProperties", False)
    if not tool.strict:
        schema.setdefault("x-guidance", {"lenient": True})
    return schema


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Any
    required: bool


def parameters(tool: Tool, param: str) -> Sequence[Parameter] | None:
    """The declared ones, in their order; None where the schema declares none and allows any.

    Each schema is one by itself: it has the definitions that it may refer to.
    """
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return None if tool.parameters.get("additionalProperties", True) else ()
    required = tool.parameters.get("required")
    names = required if isinstance(required, list) else []
    shared = {k: tool.parameters[k] for k in DEFINITIONS if k in tool.parameters}
    options: dict[str, Any] = {} if tool.strict else {"x-guidance": {"lenient": True}}
    found = [
        Parameter(
            plain(name, param),
            {**options, **shared, **schema} if isinstance(schema, Mapping) else schema,
            name in names,
        )
        for name, schema in properties.items()
    ]
    undeclared = [Parameter(plain(n, param), options, True) for n in names if n not in properties]
    return [*found, *undeclared]


def plain(name: str, param: str) -> str:
    """A name that needs no quotes in a tag."""
    if not name or any(c in "<>\"'`=" or c.isspace() for c in name):
        raise InvalidValue(param, f"the model's call format cannot write the name {name[:64]!r}")
    return name
