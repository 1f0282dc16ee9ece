"""Decoding of OpenAI's chat body: messages, tools, response format, reasoning. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from firn.api.body import parse
from firn.api.dialects import _fields as fields
from firn.api.dialects._fields import Fields
from firn.api.dialects._output_formats import output_format
from firn.core.errors import InvalidValue
from firn.core.values import (
    DocumentPart,
    Grammar,
    ImagePart,
    Message,
    OtherPart,
    Part,
    Reasoning,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MAX_NAME_CHARS = 256

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_DATA_URL = re.compile(r"data:([^,;]*)[^,]*;\s*base64\s*,", re.IGNORECASE)

# --- messages ------------------------------------------------------------------------------


def messages(body: Fields) -> tuple[Message, ...]:
    given = fields.array(body.require("messages"), "messages", low=1, high=MAX_MESSAGES)
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(given))


def _message(value: Any, param: str) -> Message:
    message = Fields(fields.mapping(value, param), param)
    role = fields.one_of(message.require("role"), message.name("role"), tuple(ROLES))
    older, newer = message.string("reasoning_content"), message.string("reasoning")
    return Message(
        role=ROLES[role],
        parts=parts(message.get("content"), message.name("content")),
        tool_calls=_tool_calls(message) if role == "assistant" else (),
        tool_call_id=message.string("tool_call_id"),
        name=message.string("name", max_chars=MAX_NAME_CHARS),
        reasoning=newer if older is None else older,
    )


def parts(content: Any, param: str) -> tuple[Part, ...]:
    match content:
        case None:
            return ()
        case str():
            return (TextPart(content),)
        case list():
            return tuple(_part(value, f"{param}[{i}]") for i, value in enumerate(content))
        case _:
            raise InvalidValue(
                param, f"must be a string, an array or null, not {fields.kind(content)}"
            )


def _part(value: Any, param: str) -> Part:
    if isinstance(value, str):
        return TextPart(value)
    part = Fields(fields.mapping(value, param), param)
    kind = fields.string(part.require("type"), part.name("type"))
    if kind in TEXT_PARTS:
        return TextPart(fields.string(part.require("text"), part.name("text")))
    if kind in ("image_url", "input_image"):
        image = part.require("image_url")
        if isinstance(image, dict):
            image = Fields(image, part.name("image_url")).require("url")
        return ImagePart(url=fields.string(image, part.name("image_url"), empty=False), param=param)
    if kind == "refusal":
        return TextPart(fields.string(part.require("refusal"), part.name("refusal")))
    if kind in ("file", "input_file"):
        return _file(part.object("file") if kind == "file" else part, param)
    return OtherPart(kind, part.name("type"))


def _file(file: Fields, param: str) -> Part:
    """A file by its content. One that is kept or found elsewhere nobody here can read."""
    name, data = file.string("filename") or "", file.string("file_data")
    if not data:
        return OtherPart("file", param)
    head = _DATA_URL.match(data[:256])
    if head is None:
        media_type = "application/pdf" if name.lower().endswith(".pdf") else "text/plain"
        return DocumentPart(data, media_type, name, param)
    return DocumentPart(data[head.end() :], head[1] or "text/plain", name, param)


def _tool_calls(message: Fields) -> tuple[ToolCall, ...]:
    given = message.get("tool_calls")
    if given is None:
        return ()
    param = message.name("tool_calls")
    return tuple(
        _tool_call(value, f"{param}[{i}]") for i, value in enumerate(fields.array(given, param))
    )


def _tool_call(value: Any, param: str) -> ToolCall:
    call = Fields(fields.mapping(value, param), param)
    function = Fields(fields.mapping(call.require("function"), call.name("function")), param)
    return ToolCall(
        id=call.string("id") or "",
        name=fields.string(function.require("name"), function.name("function.name"), empty=False),
        arguments=arguments(function.get("arguments"), function.name("function.arguments")),
    )


def arguments(value: Any, param: str) -> Mapping[str, Any] | str:
    """Calls without arguments arrive as null, "" or "{}"; some clients send the object itself."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    text = fields.string(value, param)
    try:
        parsed = parse(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


# --- tools ---------------------------------------------------------------------------------


def tools(body: Fields) -> tuple[Tool, ...]:
    given = body.get("tools")
    if body.get("functions"):
        raise InvalidValue("functions", "is no longer supported; use tools")
    if given is None:
        return ()
    given = fields.array(given, "tools", high=MAX_TOOLS)
    return tuple(_tool(value, f"tools[{i}]") for i, value in enumerate(given))


def _tool(value: Any, param: str) -> Tool:
    tool = Fields(fields.mapping(value, param), param)
    fields.one_of(tool.require("type"), tool.name("type"), ("function",))
    path = tool.name("function")
    function = Fields(fields.mapping(tool.require("function"), path), path)
    name = function.require("name")
    parameters = function.get("parameters")
    return Tool(
        name=fields.string(name, function.name("name"), max_chars=MAX_NAME_CHARS, empty=False),
        description=function.string("description") or "",
        parameters={}
        if parameters is None
        else fields.mapping(parameters, function.name("parameters")),
        strict=function.boolean("strict", False),
    )


def tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    given = body.get("tool_choice")
    parallel = body.boolean("parallel_tool_calls", True)
    if given is None:
        return ToolChoice(parallel=parallel)
    if isinstance(given, dict):
        choice = Fields(given, "tool_choice")
        fields.one_of(choice.require("type"), "tool_choice.type", ("function",))
        name = fields.string(
            fields.mapping(choice.require("function"), "tool_choice.function").get("name"),
            "tool_choice.function.name",
        )
        if name not in {tool.name for tool in tools}:
            raise InvalidValue("tool_choice", f"no tool is named {name[:64]!r}")
        return ToolChoice(ToolMode.NAMED, name=name, parallel=parallel)
    mode = ToolMode(fields.one_of(given, "tool_choice", ("none", "auto", "required")))
    if mode is ToolMode.REQUIRED and not tools:
        raise InvalidValue("tool_choice", "'required' needs tools to choose from")
    return ToolChoice(mode, parallel=parallel)


# --- constraints and thinking --------------------------------------------------------------


def grammar(body: Fields) -> Grammar | None:
    return output_format(body, "response_format", schema_in="json_schema")


def reasoning(body: Fields) -> Reasoning:
    """reasoning_effort or reasoning.effort; enable_thinking and a budget as Qwen names them."""
    effort, param = body.get("reasoning_effort"), "reasoning_effort"
    nested = body.object("reasoning")
    if effort is None:
        effort, param = nested.get("effort"), nested.name("effort")
    enabled = body.get("enable_thinking")
    budget = body.integer("thinking_budget", low=0)
    if enabled is not None:
        enabled = fields.boolean(enabled, "enable_thinking")
    if effort is not None:
        effort = fields.one_of(effort, param, EFFORTS)
        if enabled is None:
            enabled = effort != "none"
        effort = None if effort == "none" else effort
    return Reasoning(enabled=enabled, effort=effort, budget_tokens=budget)
