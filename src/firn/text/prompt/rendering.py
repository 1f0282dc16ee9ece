"""The input and the output of a chat template. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from firn.core.values import Message, MessagePart, TextPart, Tool, ToolCall

Span = tuple[int, int]
"""Characters [start, end) of a text."""


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that a caller passes to a template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """typed: ascending spans that spell a control token but are plain text."""

    text: str
    typed: tuple[Span, ...] = ()


Render = Callable[[Content], str]
"""Raises TemplateFailed."""

# --- the texts of a chat -------------------------------------------------------------------

Change = Callable[[str, bool], str]
"""(text, whether it is the assistant's own) -> text."""


def texts_of(content: Content) -> Iterator[tuple[str, bool]]:
    """Every text, and whether it is the assistant's; adjacent texts of a message are joined."""
    for message in content.messages:
        is_assistant = message.role == "assistant"
        for is_text, run in groupby(message.parts, key=lambda p: isinstance(p, TextPart)):
            if is_text:
                yield joined_text(run), is_assistant
        if message.reasoning is not None:
            yield message.reasoning, True
        yield from ((text, False) for text in (message.name, message.tool_call_id) if text)
        for call in message.tool_calls:
            yield from ((text, False) for text in (call.id, call.name, *_leaves(call.arguments)))
    for tool in content.tools:
        yield from ((text, False) for text in (tool.name, tool.description))
        yield from ((text, False) for text in _leaves(tool.parameters))
    yield from ((text, False) for text in _leaves(content.kwargs))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)


def with_texts(content: Content, change: Change) -> Content:
    """Applies `change` to every text, always in the same order."""

    def plain(text: str) -> str:
        return change(text, False)

    return Content(
        tuple(_changed_message(m, change) for m in content.messages),
        tuple(
            replace(
                t,
                name=plain(t.name),
                description=plain(t.description),
                parameters=_changed(t.parameters, plain),
            )
            for t in content.tools
        ),
        _changed(content.kwargs, plain),
    )


def _changed_message(message: Message, change: Change) -> Message:
    is_assistant = message.role == "assistant"

    def plain(text: str | None) -> str | None:
        return None if text is None else change(text, False)

    def call(c: ToolCall) -> ToolCall:
        arguments = _changed(c.arguments, lambda text: change(text, False))
        return ToolCall(change(c.id, False), change(c.name, False), arguments)

    return replace(
        message,
        parts=tuple(
            TextPart(change(p.text, is_assistant)) if isinstance(p, TextPart) else p
            for p in message.parts
        ),
        tool_calls=tuple(map(call, message.tool_calls)),
        tool_call_id=plain(message.tool_call_id),
        name=plain(message.name),
        reasoning=None if message.reasoning is None else change(message.reasoning, True),
    )


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(k): _changed(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(v, change) for v in value]
    return value


def joined_text(parts: Iterable[MessagePart]) -> str:
    return "".join(p.text for p in parts if isinstance(p, TextPart))
