"""Turns messages into what a Jinja template is given: plain dicts, in the style that it expects. Pure.

The dialect has decoded the roles already (developer is system); `arrange` has put the messages in order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firn.core.values import Message, PicturePart, TextPart, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """How templates differ in what they expect of a message.

    none_content: a message that only calls tools has None as content. short_ids: call ids are nine
    letters and digits. text_arguments: arguments are JSON text. names_results: a tool's result has
    the tool's name. reasoning_key: the field for reasoning. reasoning_parts: reasoning is a part of
    the content instead. either_reasoning: a message with calls has reasoning or content, not both.
    lists: content is always a list of parts. object_arguments: arguments are always an object, even
    those that are not valid JSON. empty_tools: a chat without tools has an empty list of them.
    """

    none_content: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    names_results: bool = False
    reasoning_key: str = "reasoning_content"
    reasoning_parts: bool = False
    either_reasoning: bool = False
    lists: bool = False
    object_arguments: bool = False
    empty_tools: bool = False

    @property
    def no_tools(self) -> list[Mapping[str, Any]] | None:
        return [] if self.empty_tools else None


COMMON = TemplateStyle()


def normalize_calls(messages: Sequence[Message], style: TemplateStyle) -> tuple[Message, ...]:
    """Parses the arguments of calls and gives calls the kind of ids that the template expects."""

    def call(c: ToolCall) -> ToolCall:
        id = short_id(c.id) if style.short_ids else c.id
        arguments = parse_arguments(c.arguments)
        if style.object_arguments and isinstance(arguments, str):
            arguments = {"input": arguments}
        return replace(c, id=id, arguments=arguments)

    def message(m: Message) -> Message:
        id = m.tool_call_id
        if not m.tool_calls and (id is None or not style.short_ids):
            return m
        short = None if id is None else short_id(id) if style.short_ids else id
        return replace(m, tool_calls=tuple(map(call, m.tool_calls)), tool_call_id=short)

    return tuple(map(message, messages))


MAX_ARGUMENTS_CHARS = 1 << 16
"""A longer text is left as it is: the API has parsed it already, within its bounds, if it could."""


def parse_arguments(arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """The object in a JSON text, an empty one for an empty text; anything else stays text."""
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENTS_CHARS:
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def to_template(
    messages: Sequence[Message], *, style: TemplateStyle = COMMON
) -> list[dict[str, Any]]:
    """Plain dicts; content is a string, or a list where it is more than text or the style wants one."""
    tool_of_call = {c.id: c.name for m in messages for c in m.tool_calls}
    return [_message_dict(m, style, tool_of_call) for m in messages]


def _message_dict(
    message: Message, style: TemplateStyle, tool_of_call: Mapping[str, str]
) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message, style)}
    name = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_call_dict(c, style) for c in message.tool_calls]
        if style.none_content and not fields["content"]:
            fields["content"] = None
    if message.reasoning is not None and not style.reasoning_parts:
        fields[style.reasoning_key] = message.reasoning
        if style.either_reasoning and message.tool_calls:
            said = (message.reasoning, message.text)
            fields[style.reasoning_key] = "\n\n".join(filter(None, said))
            fields["content"] = ""
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
        if style.names_results:
            name = name or tool_of_call.get(message.tool_call_id)
    if name is not None:
        fields["name"] = name
    return fields


def _content(message: Message, style: TemplateStyle) -> str | list[dict[str, Any]]:
    thinks = style.reasoning_parts and bool(message.reasoning)
    has_pictures = any(isinstance(p, PicturePart) for p in message.parts)
    if not (style.lists or thinks or has_pictures):
        return message.text
    parts = [
        {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"}
        for p in message.parts
    ]
    return [{"type": "thinking", "thinking": message.reasoning}, *parts] if thinks else parts


def _call_dict(call: ToolCall, style: TemplateStyle) -> dict[str, Any]:
    arguments = call.arguments
    if style.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


def short_id(call_id: str) -> str:
    """Nine letters and digits derived from the id; an id of that form stays as it is."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def tools_to_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]
