"""POST /api/chat: Ollama's chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firn.api.dialects import _ollama, _openai, _openai_chat, _openai_tools
from firn.api.dialects._ollama import OllamaCall, OllamaDialect
from firn.api.dialects._other_servers import refuse_missing
from firn.api.dialects._template_kwargs import template_kwargs
from firn.api.http import fields
from firn.api.http.fields import Fields, keep_alive_s
from firn.api.routes.ollama_fields import model_name
from firn.core.values import (
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    Role,
    TextPart,
    ToolCall,
)

ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class OllamaChat(OllamaDialect):
    path = "/api/chat"
    summary = "Chat, in Ollama's dialect"

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> OllamaCall:
        members, defaults = Fields(body), self._defaults
        options = members.object("options")
        model = model_name(members)
        tools = _openai_tools.function_tools(members)
        reasoning = defaults.reasoning(_ollama.reasoning(members))
        messages, kwargs = _messages(members), defaults.kwargs(template_kwargs(members), reasoning)
        request = GenerateRequest(
            model=model,
            source=Chat(messages, tools, template_kwargs=kwargs),
            sampling=_ollama.sampling(options, defaults.sampling),
            max_tokens=_ollama.max_tokens(options),
            stop=_openai.stop_strings(options),
            top_logprobs=_ollama.top_logprobs(members),
            grammar=_ollama.grammar(members),
            reasoning=reasoning,
            **_openai.extensions(members, defaults),
        )
        stay_s = keep_alive_s(members)
        stream = members.boolean("stream", True)
        refuse_missing(members, under="options")
        ignored = members.unread()
        if messages:
            return OllamaCall((request,), stream, ignored, _show)
        done_reason = "unload" if stay_s == 0 else "load"
        return OllamaCall((), stream, ignored, _show, request.model, done_reason)

    def schema(self) -> dict[str, Any]:
        return _schema()


DIALECT = OllamaChat


def _messages(body: Fields) -> tuple[Message, ...]:
    """Calls have no ids in this API: a tool's messages answer the calls before them, in order."""
    given = body.get("messages")
    if given is None:
        return ()
    n_calls, pending = 0, list[str]()
    decoded: list[Message] = []
    for message in fields.objects(given, "messages", high=_openai_chat.MAX_MESSAGES):
        role = fields.one_of(message.require("role"), message.name("role"), tuple(ROLES))
        calls: tuple[ToolCall, ...] = ()
        call_id = None
        if role == "assistant":
            calls = _tool_calls(message, n_calls)
            n_calls += len(calls)
            pending = [call.id for call in calls]
        elif role == "tool":
            call_id = pending.pop(0) if pending else None
        text = message.string("content") or ""
        decoded.append(
            Message(
                role=ROLES[role],
                parts=(*((TextPart(text),) if text else ()), *_ollama.pictures(message)),
                tool_calls=calls,
                tool_call_id=message.string("tool_call_id") or call_id,
                name=message.string("tool_name", max_chars=_openai_tools.MAX_NAME_CHARS),
                reasoning=message.string("thinking"),
            )
        )
    return tuple(decoded)


def _tool_calls(message: Fields, n_before: int) -> tuple[ToolCall, ...]:
    given = message.get("tool_calls")
    if given is None:
        return ()
    calls = []
    for i, call in enumerate(fields.objects(given, message.name("tool_calls"))):
        function = call.require_object("function")
        name = fields.string(function.require("name"), function.name("name"), empty=False)
        arguments = _openai_chat.arguments(function.get("arguments"), function.name("arguments"))
        id = call.string("id") or f"call_{n_before + i}"
        calls.append(ToolCall(id, name, arguments))
    return tuple(calls)


def _show(text: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def _schema() -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"type": ["string", "null"]},
            "thinking": {"type": ["string", "null"]},
            "images": {"type": ["array", "null"], "items": {"type": "string"}},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_name": {"type": ["string", "null"]},
        },
    }
    return {
        "type": "object",
        "required": [],
        "properties": _ollama.common_schema()
        | {
            "messages": {"type": ["array", "null"], "items": message},
            "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        },
        "example": {"messages": [{"role": "user", "content": "Hello!"}], "stream": False},
    }
