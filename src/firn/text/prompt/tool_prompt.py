"""Tools for templates that take less than ours: in the plainest schemas, or as text. Pure.

Templates loop over the properties of a schema and look up types in tables of their own. Some fail on
an object without properties, on a list of types, or on a parameter without type or description:
`with_plain_schema`. For a template that supports no tools they are described in the system prompt.
Earlier calls and results become text, in the format that the model is asked to write and that its reply
is read with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from firn.core.values import Message, TextPart, Tool
from firn.text.calls.parsers import ToolFormat, WriteCall
from firn.text.prompt.joined_parts import JoinedParts
from firn.text.prompt.messages import tools_to_template

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": (list, tuple),
    "object": Mapping,
}
"""The types of JSON but null, with their values in Python. bool comes first: it is an int, too."""


INTRODUCTION = """\
# Tools

You can call tools. Each line describes one of them, with a JSON schema of its arguments:
{tools}

To call a tool, write a call in exactly this form, with the tool's name and its arguments:
{example}

Write nothing after a call: its result is sent to you next, between <tool_result> and </tool_result>.\
 Call a tool only where it helps; otherwise answer in plain text."""
RESULT_OPEN, RESULT_CLOSE = "<tool_result{name}>\n", "\n</tool_result>"


def with_plain_schema(tool: Tool) -> Tool:
    """The tool with a schema in which every level has the members that templates look for."""
    return replace(tool, parameters=_plain({"type": "object", **tool.parameters}))


def _plain(schema: Any) -> dict[str, Any]:
    known = schema if isinstance(schema, Mapping) else {}  # true takes anything
    kind = _kind(known)
    plain = {**known, "type": kind, "description": str(known.get("description") or "")}
    if kind == "object":
        inner = known.get("properties")
        properties = inner if isinstance(inner, Mapping) else {}
        plain["properties"] = {name: _plain(schema) for name, schema in properties.items()}
        plain["additionalProperties"] = _plain(known.get("additionalProperties"))
    if kind == "array":
        items = known.get("items")
        plain["items"] = _plain(items[0] if isinstance(items, list) and items else items)
    return plain


def _kind(schema: Mapping[str, Any]) -> str:
    """One of `_TYPES`: what the schema says, the first of several, or what its members suggest."""
    said = schema.get("type")
    for kind in said if isinstance(said, list) else [said]:
        if isinstance(kind, str) and kind in _TYPES:
            return kind
    for branches in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(branches)
        for branch in listed if isinstance(listed, list) else []:
            if isinstance(branch, Mapping) and branch.get("type") in _TYPES:
                return str(branch["type"])
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = schema.get("enum")
    value = values[0] if isinstance(values, list) and values else schema.get("const", "")
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "string")


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat
) -> tuple[Message, ...]:
    """The chat with its tools, calls and results as text."""
    write = format.write
    assert write is not None
    names = {c.id: c.name for m in messages for c in m.tool_calls}
    turns = [_as_text(m, write, names.get(m.tool_call_id or "", "")) for m in messages]
    return (*_introduce(tools, write), *turns) if tools else tuple(turns)


def _introduce(tools: Sequence[Tool], write: WriteCall) -> list[Message]:
    lines = [json.dumps(t["function"], ensure_ascii=False) for t in tools_to_template(tools)]
    example = write("name_of_the_tool", {"name_of_an_argument": "value"})
    text = INTRODUCTION.format(tools="\n".join(lines), example=example)
    return [Message("system", (TextPart(text),))]


def _as_text(message: Message, write: WriteCall, tool: str) -> Message:
    if message.role == "tool":
        name = f' name="{tool or message.name}"' if tool or message.name else ""
        before, after = TextPart(RESULT_OPEN.format(name=name)), TextPart(RESULT_CLOSE)
        parts = JoinedParts()
        for part in (before, *message.parts, after):
            parts.add(part)
        return Message("user", parts.result(), checkpoint=message.checkpoint)
    if not message.tool_calls:
        return message
    calls = []
    for call in message.tool_calls:
        arguments = {"input": call.arguments} if isinstance(call.arguments, str) else call.arguments
        calls.append(write(call.name, arguments))
    text = "\n".join(filter(None, [message.text, *calls]))
    return replace(message, parts=(TextPart(text),), tool_calls=())
