"""Messages as chat templates want them: merged, ordered, without lines that change on each request.

Pure functions from values to values. A dialect has decoded the roles already (developer is system).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from firn.core.values import ImagePart, Message, Part, TextPart, Tool, ToolCall

SEPARATOR = "\n\n"

_CHANGING_LINE = re.compile(
    r"^[ \t]*x-[a-z0-9-]*(?:billing|attribution)[a-z0-9-]*[ \t]*:.*(?:\r?\n|\Z)",
    re.IGNORECASE | re.MULTILINE,
)


def normalise(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """One system message, in front; no two user messages in a row; arguments as objects."""
    system = _merged_system(messages)
    others = (m for m in messages if m.role != "system")
    return system + tuple(_with_objects(m) for m in _merge_users(others))


def strip_changing_lines(text: str) -> str:
    """Without the billing or attribution lines that a client changes on each request."""
    return _CHANGING_LINE.sub("", text)


def parse_arguments(arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """JSON text of an object to that object; no text at all to an empty one; the rest stays."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _merged_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    kept = []
    for message in messages:
        if message.role != "system":
            continue
        stripped = _map_texts(message, strip_changing_lines)
        # An empty system message is a wish (no default prompt); an emptied one says nothing.
        if stripped.parts or not message.parts:
            kept.append(stripped)
    if not kept:
        return ()
    return (_joined(kept),)


def _map_texts(message: Message, change: Callable[[str], str]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        if not isinstance(part, TextPart):
            parts.append(part)
            continue
        text = change(part.text)
        if text == part.text:
            parts.append(part)
        elif text.strip():
            parts.append(TextPart(text))
    return replace(message, parts=tuple(parts))


def _merge_users(messages: Iterable[Message]) -> list[Message]:
    merged: list[Message] = []
    for role, run in groupby(messages, key=lambda m: m.role):
        group = list(run)
        if role == "user" and len(group) > 1:
            group = [_joined(group)]
        merged.extend(group)
    return merged


def _joined(messages: Sequence[Message]) -> Message:
    checkpoint = any(m.checkpoint for m in messages)
    return replace(messages[0], parts=_join_parts(messages), checkpoint=checkpoint)


def _join_parts(messages: Sequence[Message]) -> tuple[Part, ...]:
    """All parts in order; where two texts of different messages meet, a blank line is between them."""
    parts: list[Part] = []
    for message in messages:
        if not message.parts:
            continue
        first = message.parts[0]
        if parts and isinstance(parts[-1], TextPart) and isinstance(first, TextPart):
            joint = SEPARATOR if parts[-1].text and first.text else ""
            parts[-1] = TextPart(parts[-1].text + joint + first.text)
            parts.extend(message.parts[1:])
        else:
            parts.extend(message.parts)
    return tuple(parts)


def _with_objects(message: Message) -> Message:
    if not any(isinstance(c.arguments, str) for c in message.tool_calls):
        return message
    calls = tuple(replace(c, arguments=parse_arguments(c.arguments)) for c in message.tool_calls)
    return replace(message, tool_calls=calls)


# --- what a Jinja template is given --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateStyle:
    """How templates differ in what they want of a message.

    none_content: a message that only calls tools has none. short_ids: call ids are nine letters and
    digits. text_arguments: they are JSON text. names_results: a tool's result has the tool's name.
    reasoning_key: what reasoning is called; either_reasoning: it excludes content beside calls.
    lists: content is always a list of parts.
    """

    none_content: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    names_results: bool = False
    reasoning_key: str = "reasoning_content"
    either_reasoning: bool = False
    lists: bool = False


COMMON = TemplateStyle()


def to_template(
    messages: Sequence[Message], *, style: TemplateStyle = COMMON
) -> list[dict[str, Any]]:
    """Plain dicts; content is a string, or a list of parts where there are images or it must be."""
    tool_of_call = {c.id: c.name for m in messages for c in m.tool_calls}
    return [_message_dict(m, style, tool_of_call) for m in messages]


def _message_dict(
    message: Message, style: TemplateStyle, tool_of_call: Mapping[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _content(message, style)}
    name = message.name
    if message.tool_calls:
        found["tool_calls"] = [_call_dict(c, style) for c in message.tool_calls]
        if style.none_content and not found["content"]:
            found["content"] = None
    if message.reasoning is not None and not (
        style.either_reasoning and message.tool_calls and found["content"]
    ):
        found[style.reasoning_key] = message.reasoning
    if message.tool_call_id is not None:
        found["tool_call_id"] = _call_id(message.tool_call_id, style)
        if style.names_results:
            name = name or tool_of_call.get(message.tool_call_id)
    if name is not None:
        found["name"] = name
    return found


def _content(message: Message, style: TemplateStyle) -> str | list[dict[str, Any]]:
    if not style.lists and not any(isinstance(p, ImagePart) for p in message.parts):
        return message.text
    return [
        {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"}
        for p in message.parts
    ]


def _call_dict(call: ToolCall, style: TemplateStyle) -> dict[str, Any]:
    arguments = call.arguments
    if style.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": _call_id(call.id, style), "function": function}


def _call_id(call_id: str, style: TemplateStyle) -> str:
    return short_id(call_id) if style.short_ids else call_id


def short_id(call_id: str) -> str:
    """Nine letters and digits that stand for the id; itself where it is that already."""
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
