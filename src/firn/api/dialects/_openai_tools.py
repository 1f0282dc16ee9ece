"""Tools of OpenAI's bodies, and which of them may be called. Pure.

`functions` and `function_call` are the older names of tools: one call at a time, without ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from firn.api.dialects._custom_tools import custom_tool
from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import Tool, ToolChoice, ToolMode

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What a chat may call. custom: names of the tools that take a text. legacy_functions: the request
    calls them `functions`, and expects a `function_call` in the reply."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    custom: frozenset[str] = frozenset()
    legacy_functions: bool = False


def offered(body: Fields) -> OfferedTools:
    parallel = body.boolean("parallel_tool_calls", True)
    functions, called = body.get("functions"), body.get("function_call")
    given = body.get("tools")
    if functions is not None or (called is not None and given is None):
        if given is not None:
            raise InvalidValue("functions", "cannot be combined with tools; use tools alone")
        body.skip("tool_choice")
        return _functions(functions, called)
    if given is None:
        return OfferedTools(choice=_choice(body, (), parallel=parallel))
    tools: list[Tool] = []
    custom: set[str] = set()
    for tool in fields.objects(given, "tools", high=MAX_TOOLS):
        kind, inner = _inner(tool, ("function", "custom"))
        if kind == "custom":
            tools.append(replace(custom_tool(inner, wrapped=True), param=tool.path))
            custom.add(tools[-1].name)
        else:
            tools.append(function_tool(inner, tool.path))
    choice = _choice(body, tuple(tools), parallel=parallel)
    return OfferedTools(tuple(tools), choice, frozenset(custom))


def function_tools(body: Fields) -> tuple[Tool, ...]:
    """`tools` of a dialect that has only functions and no tool_choice."""
    return tuple(
        function_tool(_inner(tool, ("function",))[1], tool.path)
        for tool in body.objects("tools", high=MAX_TOOLS)
    )


def _inner(tool: Fields, kinds: tuple[str, ...]) -> tuple[str, Fields]:
    """The kind of the tool, and the member of that name, which describes it."""
    kind = fields.one_of(tool.require("type"), tool.name("type"), kinds)
    return kind, tool.require_object(kind)


def function_tool(function: Fields, param: str) -> Tool:
    """param: the tool's name in errors."""
    parameters = function.get("parameters")
    return Tool(
        name=tool_name(function),
        description=function.string("description") or "",
        parameters={}
        if parameters is None
        else fields.mapping(parameters, function.name("parameters")),
        strict=function.boolean("strict", False),
        param=param,
    )


def tool_name(tool: Fields) -> str:
    name = tool.require("name")
    return fields.string(name, tool.name("name"), max_chars=MAX_NAME_CHARS, empty=False)


# --- which may be called -------------------------------------------------------------------


def _choice(body: Fields, tools: tuple[Tool, ...], *, parallel: bool) -> ToolChoice:
    given = body.get("tool_choice")
    if given is None:
        return ToolChoice(parallel=parallel)
    if isinstance(given, dict):
        choice = Fields(given, "tool_choice")
        kinds = ("function", "custom", "allowed_tools")
        if fields.one_of(choice.require("type"), "tool_choice.type", kinds) == "allowed_tools":
            return replace(_allowed(choice, tools), parallel=parallel)
        return ToolChoice(ToolMode.NAMED, name=_named(choice, tools), parallel=parallel)
    mode = ToolMode(fields.one_of(given, "tool_choice", ("none", "auto", "required")))
    return ToolChoice(possible_mode(mode, bool(tools), "tool_choice"), parallel=parallel)


def _named(choice: Fields, tools: tuple[Tool, ...]) -> str:
    """The name in {type: function, function: {name}}, or the same with custom."""
    kinds = ("function", "custom")
    kind = fields.one_of(choice.require("type"), choice.name("type"), kinds)
    inner = choice.require_object(kind)
    return known_name(fields.string(inner.get("name"), inner.name("name")), tools, choice.path)


def known_name(name: str, tools: tuple[Tool, ...], param: str) -> str:
    """Raises InvalidValue if no tool has this name."""
    if name not in {tool.name for tool in tools}:
        raise InvalidValue(param, f"no tool is named {name[:64]!r}")
    return name


def _allowed(choice: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    given = choice.require_object("allowed_tools")
    param = given.name("tools")
    listed = fields.objects(given.require("tools"), param, high=MAX_TOOLS)
    names = {_named(tool, tools) for tool in listed}
    modes = ("auto", "required")
    mode = ToolMode(fields.one_of(given.require("mode"), given.name("mode"), modes))
    return ToolChoice(possible_mode(mode, bool(names), param), allowed=frozenset(names))


def possible_mode(mode: ToolMode, any_tools: bool, param: str) -> ToolMode:
    """Raises InvalidValue if a call is required and there is no tool."""
    if mode is ToolMode.REQUIRED and not any_tools:
        raise InvalidValue(param, "'required' needs tools to choose from")
    return mode


def _functions(given: object, called: object) -> OfferedTools:
    listed = fields.objects([] if given is None else given, "functions", high=MAX_TOOLS)
    tools = tuple(function_tool(function, function.path) for function in listed)
    choice = ToolChoice(parallel=False)
    if isinstance(called, dict):
        name = fields.string(called.get("name"), "function_call.name")
        name = known_name(name, tools, "function_call")
        choice = ToolChoice(ToolMode.NAMED, name=name, parallel=False)
    elif called is not None:
        mode = ToolMode(fields.one_of(called, "function_call", ("none", "auto")))
        choice = ToolChoice(mode, parallel=False)
    return OfferedTools(tools, choice, legacy_functions=True)
