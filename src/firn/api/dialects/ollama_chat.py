"""POST /api/chat: Ollama's chat."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.api.dialects import (
    Extra,
    Head,
    _fields,
    _ollama,
    _openai,
    _openai_chat,
    _openai_tools,
)
from firn.api.dialects._fields import Fields
from firn.api.services import Services
from firn.core.errors import FirnError
from firn.core.events import Event
from firn.core.values import (
    PLAIN_DEFAULTS,
    Chat,
    Defaults,
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


class OllamaChat:
    path = "/api/chat"
    summary = "Chat, in Ollama's dialect"
    tool_id_prefix = "call_"
    stream_headers = _ollama.STREAM_HEADERS

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> OllamaChatCall:
        given, defaults = Fields(body), self._defaults
        options = given.object("options")
        model = _ollama.model_name(given)
        tools = _openai_tools.functions(given)
        reasoning = defaults.reasoning(_ollama.reasoning(given))
        messages = _messages(given)
        request = GenerateRequest(
            model=model,
            source=Chat(messages, tools, template_kwargs=defaults.kwargs({}, reasoning)),
            sampling=_ollama.sampling(options, defaults.sampling),
            max_tokens=_ollama.max_tokens(options),
            stop=_openai.stop_strings(options),
            grammar=_ollama.grammar(given),
            reasoning=reasoning,
            speculates=_openai.speculates(given),
            sparse_keep=_openai.sparse_keep(given),
        )
        keep_alive_s = _ollama.check_keep_alive(given)
        stream = given.boolean("stream", True)
        why = None if messages else "unload" if keep_alive_s == 0 else "load"
        requests = (request,) if messages else ()
        return OllamaChatCall(requests, stream, given.unread(), why)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return _ollama.error_object(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[Extra, ...]:
        return ()


DIALECT = OllamaChat


def _messages(body: Fields) -> tuple[Message, ...]:
    """Calls have no ids here: a tool's messages answer the calls before them, in order."""
    given = body.get("messages")
    if given is None:
        return ()
    n_calls, pending = 0, list[str]()
    found: list[Message] = []
    for i, value in enumerate(_fields.array(given, "messages", high=_openai_chat.MAX_MESSAGES)):
        message = Fields(_fields.mapping(value, f"messages[{i}]"), f"messages[{i}]")
        role = _fields.one_of(message.require("role"), message.name("role"), tuple(ROLES))
        calls: tuple[ToolCall, ...] = ()
        call_id = None
        if role == "assistant":
            calls = _tool_calls(message, n_calls)
            n_calls += len(calls)
            pending = [call.id for call in calls]
        elif role == "tool":
            call_id = pending.pop(0) if pending else None
        text = message.string("content") or ""
        found.append(
            Message(
                role=ROLES[role],
                parts=(*((TextPart(text),) if text else ()), *_ollama.images(message)),
                tool_calls=calls,
                tool_call_id=message.string("tool_call_id") or call_id,
                name=message.string("tool_name", max_chars=_openai_tools.MAX_NAME_CHARS),
                reasoning=message.string("thinking"),
            )
        )
    return tuple(found)


def _tool_calls(message: Fields, n_before: int) -> tuple[ToolCall, ...]:
    given = message.get("tool_calls")
    if given is None:
        return ()
    param = message.name("tool_calls")
    found = []
    for i, value in enumerate(_fields.array(given, param)):
        call = Fields(_fields.mapping(value, f"{param}[{i}]"), f"{param}[{i}]")
        path = call.name("function")
        function = Fields(_fields.mapping(call.require("function"), path), path)
        name = _fields.string(function.require("name"), function.name("name"), empty=False)
        arguments = _openai_chat.arguments(function.get("arguments"), function.name("arguments"))
        id = call.string("id") or f"call_{n_before + i}"
        found.append(ToolCall(id, name, arguments))
    return tuple(found)


def _piece(text: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


FORM = _ollama.Form(_piece)


@dataclass(frozen=True, slots=True)
class OllamaChatCall:
    """why: nothing is generated, and this is the reason that the reply gives."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    why: str | None = None
    began_ns: int = field(default_factory=time.perf_counter_ns)
    background = False

    def encoder(self, head: Head) -> _ollama.LineEncoder:
        return _ollama.LineEncoder(head, FORM, began_ns=self.began_ns, why=self.why)

    def fold(self, head: Head, events: Iterable[Event]) -> dict[str, Any]:
        return _ollama.fold(head, list(events), FORM, began_ns=self.began_ns, why=self.why)


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
