"""Decoding of OpenAI's chat body: messages, response format, reasoning. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from firn.api.dialects._openai_tools import MAX_NAME_CHARS
from firn.api.dialects._output_formats import output_format, wanted_format
from firn.api.http import fields
from firn.api.http.body import parse
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import (
    EFFORTS,
    DocumentPart,
    Grammar,
    Message,
    MessagePart,
    OtherPart,
    PicturePart,
    Reasoning,
    Role,
    TextPart,
    ToolCall,
)

MAX_MESSAGES = 16384

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
"""Values of `thinking.type`; None: the model's template decides."""
OTHER_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
"""vLLM's and llama.cpp's names for thinking_budget; -1 is no limit of the request's own."""

_DATA_URL = re.compile(r"data:([^,;]*)[^,]*;\s*base64\s*,", re.IGNORECASE)

# --- messages ------------------------------------------------------------------------------


def messages(body: Fields) -> tuple[Message, ...]:
    given = fields.objects(body.require("messages"), "messages", low=1, high=MAX_MESSAGES)
    decoded: list[Message] = []
    for message in given:
        decoded.append(_message(message, last_call=_last_call(decoded)))
    return tuple(decoded)


def _last_call(messages: Sequence[Message]) -> str | None:
    """The id of the last call, for the result of a `function`, the older form, which has no id."""
    calls = messages[-1].tool_calls if messages else ()
    return calls[-1].id if calls else None


def _message(message: Fields, *, last_call: str | None) -> Message:
    role = fields.one_of(message.require("role"), message.name("role"), tuple(ROLES))
    older, newer = message.string("reasoning_content"), message.string("reasoning")
    id = message.string("tool_call_id")
    return Message(
        role=ROLES[role],
        parts=parts(message.get("content"), message.name("content")),
        tool_calls=_tool_calls(message) if role == "assistant" else (),
        tool_call_id=last_call if role == "function" and id is None else id,
        name=message.string("name", max_chars=MAX_NAME_CHARS),
        reasoning=newer if older is None else older,
    )


def parts(content: object, param: str) -> tuple[MessagePart, ...]:
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


def _part(value: object, param: str) -> MessagePart:
    if isinstance(value, str):
        return TextPart(value)
    part = fields.members(value, param)
    kind = fields.string(part.require("type"), part.name("type"))
    if kind in TEXT_PARTS:
        return TextPart(fields.string(part.require("text"), part.name("text")))
    if kind in ("image_url", "input_image"):
        image = part.require("image_url")
        if isinstance(image, dict):
            image = Fields(image, part.name("image_url")).require("url")
        return PicturePart(
            url=fields.string(image, part.name("image_url"), empty=False), param=param
        )
    if kind == "refusal":
        return TextPart(fields.string(part.require("refusal"), part.name("refusal")))
    if kind in ("file", "input_file"):
        return _file(part.object("file") if kind == "file" else part, param)
    return OtherPart(kind, part.name("type"))


def _file(file: Fields, param: str) -> MessagePart:
    """A file given by its content. One that is stored elsewhere cannot be read here."""
    name, data = file.string("filename") or "", file.string("file_data")
    if not data:
        return OtherPart("file", param)
    head = _DATA_URL.match(data[:256])
    if head is None:
        media_type = "application/pdf" if name.lower().endswith(".pdf") else "text/plain"
        return DocumentPart(data, media_type, name, param)
    return DocumentPart(data[head.end() :], head[1] or "text/plain", name, param)


def _tool_calls(message: Fields) -> tuple[ToolCall, ...]:
    given, older = message.get("tool_calls"), message.get("function_call")
    if given is None and older is not None:
        path = message.name("function_call")
        return (_function_call(fields.members(older, path), f"call_{path}"),)
    if given is None:
        return ()
    return tuple(map(_tool_call, fields.objects(given, message.name("tool_calls"))))


def _tool_call(call: Fields) -> ToolCall:
    id = call.string("id") or ""
    if call.get("type") != "custom":
        return _function_call(call.require_object("function"), id)
    custom = call.require_object("custom")
    text = fields.string(custom.require("input"), custom.name("input"))
    return ToolCall(id, _name(custom), {"input": text})


def _function_call(function: Fields, id: str) -> ToolCall:
    given = arguments(function.get("arguments"), function.name("arguments"))
    return ToolCall(id, _name(function), given)


def _name(owner: Fields) -> str:
    return fields.string(owner.require("name"), owner.name("name"), empty=False)


def arguments(value: object, param: str) -> Mapping[str, Any] | str:
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


# --- constraints and thinking --------------------------------------------------------------


def grammar(body: Fields) -> Grammar | None:
    return wanted_format(body, output_format(body, "response_format", schema_in="json_schema"))


def reasoning(body: Fields) -> Reasoning:
    """reasoning_effort or reasoning.effort; Qwen's enable_thinking and thinking_budget, by the names
    of other servers, too: `thinking`, as GLM, Kimi and DeepSeek have it, and Ollama's `think`."""
    effort, param = body.get("reasoning_effort"), "reasoning_effort"
    nested, thinking = body.object("reasoning"), body.object("thinking")
    if effort is None:
        effort, param = nested.get("effort"), nested.name("effort")
    kind = fields.one_of(thinking.get("type") or "auto", thinking.name("type"), tuple(THINKING))
    switches = [
        _switch(body, "enable_thinking"),
        _switch(nested, "enabled"),
        THINKING[kind],
        _switch(body, "think"),
    ]
    enabled = next((on for on in switches if on is not None), None)
    budgets = [
        body.integer("thinking_budget", low=0),
        nested.integer("max_tokens", low=0),
        thinking.integer("budget_tokens", low=0),
        *(body.integer(name, low=-1) for name in OTHER_BUDGETS),
    ]
    budget = next((n for n in budgets if n is not None and n >= 0), None)
    if effort is not None:
        effort = fields.one_of(effort, param, EFFORTS)
        if enabled is None:
            enabled = effort != "none"
        effort = None if effort == "none" else effort
    return Reasoning(enabled=enabled, effort=effort, budget_tokens=budget)


def _switch(owner: Fields, member: str) -> bool | None:
    given = owner.get(member)
    return None if given is None else fields.boolean(given, owner.name(member))
