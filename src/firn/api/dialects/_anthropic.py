"""Decoding of Anthropic's body: messages and their blocks, tools, thinking. Pure.

A user message with tool results becomes one tool message per result, followed by the rest of it:
templates expect results right after the calls. Reminders that an agent adds to results become
asides. A message that cache_control marks becomes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from firn.api.dialects import _openai
from firn.api.dialects._openai_chat import MAX_MESSAGES
from firn.api.dialects._openai_tools import MAX_TOOLS, known_name, tool_name
from firn.api.dialects._output_formats import output_format, wanted_format
from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import (
    DocumentPart,
    Grammar,
    Message,
    MessagePart,
    OtherPart,
    PicturePart,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from firn.text.prompt.joined_parts import JoinedParts

REMINDER = "<system-reminder>"
"""Begins a text that Claude Code has added to the words of the user or a tool."""
PARAGRAPH = "\n\n"
"""Separates two text blocks of a message: a program has joined them."""
ROLES = ("user", "assistant", "system")
EFFORTS = ("low", "medium", "high", "xhigh", "max")

# --- messages ------------------------------------------------------------------------------


def messages(body: Fields) -> tuple[Message, ...]:
    given = fields.objects(body.require("messages"), "messages", low=1, high=MAX_MESSAGES)
    decoded = _system(body)
    for message in given:
        decoded += _message(message)
    if body.get("cache_control") is not None:
        _check_cache_control(body)
        decoded[-1] = replace(decoded[-1], checkpoint=True)
    return tuple(decoded)


def _system(body: Fields) -> list[Message]:
    """One message per block, so that blocks that change with every request can be left out."""
    given = body.get("system")
    if given is None:
        return []
    if isinstance(given, str):
        return [Message("system", (TextPart(given),))]
    system = []
    for block in _blocks(given, "system"):
        _only(block, "text")
        system.append(Message("system", (_text(block),), checkpoint=_is_marked(block)))
    return system


def _message(message: Fields) -> list[Message]:
    role = fields.one_of(message.require("role"), message.name("role"), ROLES)
    content = message.get("content")
    if content is None or isinstance(content, str):
        parts: tuple[MessagePart, ...] = (TextPart(content),) if content else ()
        return [_plain(role, parts)]
    blocks = _blocks(content, message.name("content"))
    marked = any(_is_marked(block) for block in blocks)
    decoded = [_assistant(blocks)] if role == "assistant" else _user(role, blocks)
    decoded[-1] = replace(decoded[-1], checkpoint=marked)
    return decoded


def _plain(role: str, parts: tuple[MessagePart, ...]) -> Message:
    match role:
        case "assistant":
            return Message("assistant", parts)
        case "system":
            return Message("system", parts)
        case _:
            return Message("user", parts)


def _user(role: str, blocks: Sequence[Fields]) -> list[Message]:
    results: list[Message] = []
    rest: list[MessagePart] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            results.append(_tool_result(block))
        else:
            rest.append(_part(block))
    if not results:
        return [_plain(role, _paragraphs(rest))]
    for is_aside, run in groupby(rest, key=_is_reminder):
        results.append(replace(_plain(role, _paragraphs(list(run))), aside=is_aside))
    return results


def _is_reminder(part: MessagePart) -> bool:
    return isinstance(part, TextPart) and part.text.lstrip().startswith(REMINDER)


def _assistant(blocks: Sequence[Fields]) -> Message:
    """Blocks of tools that Anthropic's servers ran become a short note in the text."""
    parts = JoinedParts()
    thoughts, calls = "", []
    for block in blocks:
        match _kind(block):
            case "text":  # adjacent text blocks are one text, without paragraphs
                if (text := _text(block)).text:
                    parts.add(text)
            case "thinking":
                thoughts += fields.string(block.require("thinking"), block.name("thinking"))
                block.string("signature")
            case "redacted_thinking":  # encrypted by another server
                block.string("data")
            case "tool_use":
                calls.append(_tool_use(block))
            case kind:
                parts.add(OtherPart(kind, block.name("type")))
    return Message("assistant", parts.result(), tool_calls=tuple(calls), reasoning=thoughts or None)


def _tool_use(block: Fields) -> ToolCall:
    name = fields.string(block.require("name"), block.name("name"), empty=False)
    arguments = block.get("input")
    return ToolCall(
        id=fields.string(block.require("id"), block.name("id")),
        name=name,
        arguments={} if arguments is None else fields.mapping(arguments, block.name("input")),
    )


def _tool_result(block: Fields) -> Message:
    content = block.get("content")
    if content is None or isinstance(content, str):
        parts: tuple[MessagePart, ...] = (TextPart(content),) if content else ()
    else:
        inner = _blocks(content, block.name("content"))
        parts = _paragraphs([_part(inner_block) for inner_block in inner])
    if block.boolean("is_error", False):
        parts = _marked_as_error(parts)
    id = fields.string(block.require("tool_use_id"), block.name("tool_use_id"))
    return Message("tool", parts, tool_call_id=id)


def _marked_as_error(parts: tuple[MessagePart, ...]) -> tuple[MessagePart, ...]:
    """Templates cannot mark a failure, so the text has to."""
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    if text.lstrip().lower().startswith("error"):
        return parts
    return _paragraphs([TextPart("Error:"), *parts])


def _paragraphs(parts: Sequence[MessagePart]) -> tuple[MessagePart, ...]:
    """Adjacent texts become one, with a blank line between them."""
    joined = JoinedParts()
    for part in parts:
        joined.add(part, between=PARAGRAPH)
    return joined.result()


# --- blocks --------------------------------------------------------------------------------


def _blocks(value: object, param: str) -> list[Fields]:
    if not isinstance(value, list):
        raise InvalidValue(param, f"must be a string or an array, not {fields.kind(value)}")
    return list(fields.objects(value, param))


def _kind(block: Fields) -> str:
    return fields.string(block.require("type"), block.name("type"))


def _only(block: Fields, kind: str) -> None:
    fields.one_of(block.require("type"), block.name("type"), (kind,))


def _part(block: Fields) -> MessagePart:
    match _kind(block):
        case "text":
            return _text(block)
        case "image":
            return _image(block)
        case "document":
            return _document(block)
        case "search_result":
            return TextPart(_search_result(block))
        case kind:
            return OtherPart(kind, block.name("type"))


def _text(block: Fields) -> TextPart:
    return TextPart(fields.string(block.require("text"), block.name("text")))


def _image(block: Fields) -> MessagePart:
    source = block.require_object("source")
    param = block.name("source")
    match _kind(source):
        case "base64":
            media_type = fields.string(source.require("media_type"), source.name("media_type"))
            data = fields.string(source.require("data"), source.name("data"), empty=False)
            return PicturePart(f"data:{media_type};base64,{data}", param=param)
        case "url":
            url = fields.string(source.require("url"), source.name("url"), empty=False)
            return PicturePart(url, param=param)
        case kind:
            return OtherPart(f"image by {kind}", source.name("type"))


def _document(block: Fields) -> MessagePart:
    source = block.require_object("source")
    lead = PARAGRAPH.join(filter(None, (block.string("title"), block.string("context"))))
    match _kind(source):
        case "text":
            text = fields.string(source.require("data"), source.name("data"))
        case "content":
            text = _inner_text(source.require("content"), source.name("content"))
        case "base64":
            media_type = fields.string(source.require("media_type"), source.name("media_type"))
            data = fields.string(source.require("data"), source.name("data"), empty=False)
            return DocumentPart(data, media_type, lead, block.name("source"))
        case kind:
            return OtherPart(f"document by {kind}", source.name("type"))
    return TextPart(PARAGRAPH.join(filter(None, (lead, text))))


def _search_result(block: Fields) -> str:
    above = [block.string("title"), block.string("source")]
    text = _inner_text(block.require("content"), block.name("content"))
    return PARAGRAPH.join(part for part in (*above, text) if part)


def _inner_text(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    texts = []
    for block in _blocks(value, param):
        _only(block, "text")
        texts.append(_text(block).text)
    return PARAGRAPH.join(texts)


def _is_marked(block: Fields) -> bool:
    given = block.get("cache_control")
    if given is not None:
        _check_cache_control(block)
    return given is not None


def _check_cache_control(owner: Fields) -> None:
    control = owner.object("cache_control")
    fields.one_of(control.require("type"), control.name("type"), ("ephemeral",))
    ttl = control.get("ttl")
    if ttl is not None:  # has no effect: records stay as long as there is room
        fields.one_of(ttl, control.name("ttl"), ("5m", "1h"))


# --- tools ---------------------------------------------------------------------------------


def tools(body: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools, and the names of those left out because Anthropic's servers would run them."""
    decoded: list[Tool] = []
    left_out: list[str] = []
    for tool in body.objects("tools", high=MAX_TOOLS):
        kind = tool.string("type")
        if kind is None or kind == "custom":
            decoded.append(_tool(tool))
        else:
            left_out.append(f"{tool.path} ({kind[:64]})")
    return tuple(decoded), tuple(left_out)


def _tool(tool: Fields) -> Tool:
    _is_marked(tool)  # only checked: the end of the tools is a checkpoint anyway
    return Tool(
        name=tool_name(tool),
        description=tool.string("description") or "",
        parameters=fields.mapping(tool.require("input_schema"), tool.name("input_schema")),
        strict=tool.boolean("strict", False),
        param=tool.path,
    )


def tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    given = body.get("tool_choice")
    if given is None:
        return ToolChoice()
    choice = fields.members(given, "tool_choice")
    kinds = ("auto", "any", "tool", "none")
    kind = fields.one_of(choice.require("type"), choice.name("type"), kinds)
    parallel = not choice.boolean("disable_parallel_tool_use", False)
    if kind == "tool":
        name = fields.string(choice.require("name"), choice.name("name"))
        known_name(name, tools, "tool_choice.name")
        return ToolChoice(ToolMode.NAMED, name=name, parallel=parallel)
    if kind == "any" and not tools:
        raise InvalidValue("tool_choice", "'any' needs tools to choose from")
    modes = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "none": ToolMode.NONE}
    return ToolChoice(modes[kind], parallel=parallel)


# --- the rest ------------------------------------------------------------------------------


def stop_sequences(body: Fields) -> tuple[str, ...]:
    given = body.get("stop_sequences")
    return () if given is None else _openai.stop_array(given, "stop_sequences")


def reasoning(body: Fields) -> Reasoning:
    """If `thinking` is absent or adaptive, the model's template decides."""
    output = body.object("output_config")
    effort = output.get("effort")
    if effort is not None:
        effort = fields.one_of(effort, output.name("effort"), EFFORTS)
    given = body.get("thinking")
    if given is None:
        return Reasoning(effort=effort)
    thinking = fields.members(given, "thinking")
    kinds = ("enabled", "disabled", "adaptive", "between_tools")
    match fields.one_of(thinking.require("type"), thinking.name("type"), kinds):
        case "enabled":
            budget = thinking.require("budget_tokens")
            return Reasoning(
                enabled=True,
                effort=effort,
                budget_tokens=fields.integer(budget, thinking.name("budget_tokens"), low=1),
            )
        case "disabled":
            return Reasoning(enabled=False)
        case _:
            return Reasoning(effort=effort)


def shows_thinking(body: Fields) -> bool:
    given = body.get("thinking")
    if not isinstance(given, dict) or given.get("display") is None:
        return True
    shown = ("summarized", "omitted")
    return fields.one_of(given["display"], "thinking.display", shown) != "omitted"


def grammar(body: Fields) -> Grammar | None:
    """output_config.format, or output_format, its older name."""
    newer = output_format(body.object("output_config"), "format")
    older = output_format(body, "output_format")
    return wanted_format(body, older if newer is None else newer)
