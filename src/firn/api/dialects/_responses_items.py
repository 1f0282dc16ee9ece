"""Decoding of the Responses API's items, tools and options. Pure.

Items are smaller than messages: reasoning, texts and calls of one turn are separate items. They are
joined into messages, since templates render whole turns.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from firn.api.dialects import _openai_chat
from firn.api.dialects._custom_tools import custom_tool
from firn.api.dialects._openai_chat import MAX_MESSAGES, ROLES
from firn.api.dialects._openai_tools import (
    MAX_TOOLS,
    function_tool,
    known_name,
    possible_mode,
    tool_name,
)
from firn.api.dialects._output_formats import output_format, wanted_format
from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import (
    Grammar,
    Message,
    MessagePart,
    OtherPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from firn.text.prompt.joined_parts import JoinedParts

PARAGRAPH = "\n\n"
SEALED = "firn1:"
"""Prefix of reasoning that a client keeps for the server without reading it (encrypted_content)."""
HOSTED = frozenset(
    {"web_search_call", "file_search_call", "computer_call", "computer_call_output",
     "code_interpreter_call", "image_generation_call", "local_shell_call", "local_shell_call_output",
     "shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "mcp_call",
     "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"}
)  # fmt: skip
"""Items of tools that OpenAI's servers run: a conversation that began there may have some."""

SUMMARY = "Summary of our conversation so far, which you wrote:"

JOINT = "__"
"""Joins a namespace and a name, as agents do for APIs without namespaces."""

Item = Mapping[str, Any]
FindItem = Callable[[str], Item | None]

# --- input ---------------------------------------------------------------------------------


def input_items(body: Fields) -> list[Item]:
    """The request's own items as a list, each an object with a type."""
    given = body.require("input")
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        return [{"type": "message", "role": "user", "content": [part]}]
    if not isinstance(given, list):
        raise InvalidValue("input", f"must be a string or an array, not {fields.kind(given)}")
    items: list[Item] = []
    for i, value in enumerate(fields.array(given, "input", high=MAX_MESSAGES)):
        item = fields.mapping(value, f"input[{i}]")
        items.append(item if item.get("type") is not None else {"type": "message", **item})
    return items


def messages(items: Iterable[tuple[str, Item]], find_item: FindItem) -> list[Message]:
    """The items as messages. items: each with its name in errors."""
    builder = _MessageBuilder()
    for param, value in items:
        item = Fields(value, param)
        if value.get("type") == "item_reference":
            id = fields.string(item.require("id"), item.name("id"))
            referenced = find_item(id)
            if referenced is None:
                raise InvalidValue(item.name("id"), f"there is no item {id[:64]!r}")
            item = Fields(referenced, param)
        _decode(item, builder)
    return builder.done()


@dataclass(slots=True)
class _MessageBuilder:
    """Joins the items of a turn. Only an assistant's turn can be open."""

    messages: list[Message] = field(default_factory=list)
    parts: JoinedParts = field(default_factory=JoinedParts)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    is_open: bool = False

    def add_parts(self, parts: Iterable[MessagePart]) -> None:
        """Texts become paragraphs of one text."""
        self.is_open = True
        for part in parts:
            if not isinstance(part, TextPart) or part.text:
                self.parts.add(part, between=PARAGRAPH)

    def add_reasoning(self, text: str) -> None:
        self.is_open = True
        self.reasoning += [text] if text else []

    def add_call(self, call: ToolCall) -> None:
        self.is_open = True
        self.calls.append(call)

    def add_message(self, message: Message) -> None:
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        if self.is_open:
            parts, calls = self.parts.result(), tuple(self.calls)
            reasoning = PARAGRAPH.join(self.reasoning) or None
            self.messages.append(Message("assistant", parts, tool_calls=calls, reasoning=reasoning))
        self.parts, self.reasoning = JoinedParts(), []
        self.calls, self.is_open = [], False

    def done(self) -> list[Message]:
        self.close()
        return self.messages


def _decode(item: Fields, builder: _MessageBuilder) -> None:
    kind = fields.string(item.require("type"), item.name("type"))
    match kind:
        case "message":
            _message(item, builder)
        case "reasoning":
            builder.add_reasoning(_reasoning(item))
        case "function_call":
            arguments = item.get("arguments")
            decoded = _openai_chat.arguments(arguments, item.name("arguments"))
            builder.add_call(ToolCall(_call_id(item), _flat(_named_tool(item)), decoded))
        case "custom_tool_call":
            text = fields.string(item.require("input"), item.name("input"))
            builder.add_call(ToolCall(_call_id(item), _flat(_named_tool(item)), {"input": text}))
        case "function_call_output" | "custom_tool_call_output":
            parts = _openai_chat.parts(item.require("output"), item.name("output"))
            builder.add_message(Message("tool", parts, tool_call_id=_call_id(item)))
        case "compaction" if summary := _unseal(item):
            reminder = TextPart(f"{SUMMARY}{PARAGRAPH}{summary}")
            builder.add_message(Message("user", (reminder,)))
        case _ if kind in HOSTED:
            builder.add_parts([OtherPart(kind, item.name("type"))])
        case _:
            raise InvalidValue(item.name("type"), f"{kind[:64]!r} is not supported here")


def _message(item: Fields, builder: _MessageBuilder) -> None:
    role = ROLES[fields.one_of(item.require("role"), item.name("role"), tuple(ROLES)[:4])]
    parts = _openai_chat.parts(item.get("content"), item.name("content"))
    if role == "assistant":
        builder.add_parts(_joined_texts(parts))
    else:
        builder.add_message(Message(role, parts))


def _joined_texts(parts: Iterable[MessagePart]) -> Iterator[MessagePart]:
    """The parts, with adjacent texts joined."""
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, TextPart)):
        if is_text:
            yield TextPart("".join(part.text for part in run if isinstance(part, TextPart)))
        else:
            yield from run


def _reasoning(item: Fields) -> str:
    """The reasoning itself, wherever the client has kept it; else its summary."""
    text, sealed = _join(item, "content", "reasoning_text"), _unseal(item)
    return text or sealed or _join(item, "summary", "summary_text")


def _unseal(item: Fields) -> str:
    """What the client has kept for this server as encrypted_content; empty if it is another's."""
    sealed = item.string("encrypted_content") or ""
    return unseal(sealed) if sealed.startswith(SEALED) else ""


def _join(item: Fields, member: str, kind: str) -> str:
    given = item.get(member)
    if given is None:
        return ""
    texts = []
    for part in fields.objects(given, item.name(member)):
        fields.one_of(part.require("type"), part.name("type"), (kind, "text"))
        texts.append(fields.string(part.require("text"), part.name("text")))
    return PARAGRAPH.join(texts)


def seal(text: str) -> str:
    return SEALED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def unseal(sealed: str) -> str:
    """The text that was sealed; empty if somebody has changed it."""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return ""


def _call_id(item: Fields) -> str:
    return fields.string(item.require("call_id"), item.name("call_id"))


@dataclass(frozen=True, slots=True)
class NamespacedTool:
    """A tool as the caller names it: agents keep the tools of one server in a namespace."""

    namespace: str
    name: str


def _named_tool(owner: Fields) -> NamespacedTool:
    name = fields.string(owner.require("name"), owner.name("name"), empty=False)
    return NamespacedTool(owner.string("namespace") or "", name)


def _flat(tool: NamespacedTool) -> str:
    """The name by which the model knows the tool."""
    namespace = tool.namespace.removesuffix(JOINT)
    return f"{namespace}{JOINT}{tool.name}" if namespace else tool.name


# --- tools ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """custom: names of the tools that take a text. namespaced: the tools in namespaces, by the name
    that the model knows. left_out: the tools that OpenAI's servers would run."""

    all: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    namespaced: Mapping[str, NamespacedTool] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def tools(body: Fields) -> ResponseTools:
    given = body.get("tools")
    if given is None:
        return ResponseTools()
    decoded: list[Tool] = []
    custom: set[str] = set()
    namespaced: dict[str, NamespacedTool] = {}
    left_out: list[str] = []
    for tool, namespace in _each_tool(given, "tools"):
        kind = fields.string(tool.require("type"), tool.name("type"))
        if kind == "function":
            decoded.append(function_tool(tool, tool.path))
        elif kind == "custom":
            decoded.append(custom_tool(tool, wrapped=False))
        else:
            left_out.append(f"{tool.path} ({kind[:64]})")
            continue
        if namespace:
            tool_in_namespace = NamespacedTool(namespace, decoded[-1].name)
            decoded[-1] = replace(decoded[-1], name=_flat(tool_in_namespace))
            namespaced[decoded[-1].name] = tool_in_namespace
        if kind == "custom":
            custom.add(decoded[-1].name)
    return ResponseTools(tuple(decoded), frozenset(custom), namespaced, tuple(left_out))


def _each_tool(given: object, param: str) -> Iterator[tuple[Fields, str]]:
    """Each tool with its namespace; empty: it has none."""
    for tool in _listed(given, param):
        if tool.get("type") == "namespace":
            namespace = tool_name(tool)
            for inner in _listed(tool.require("tools"), tool.name("tools")):
                yield inner, namespace
        else:
            yield tool, ""


def _listed(given: object, param: str) -> list[Fields]:
    return list(fields.objects(given, param, high=MAX_TOOLS))


def tool_choice(body: Fields, tools: ResponseTools) -> ToolChoice:
    given = body.get("tool_choice")
    parallel = body.boolean("parallel_tool_calls", True)
    if given is None:
        return ToolChoice(parallel=parallel)
    if isinstance(given, dict):
        choice = Fields(given, "tool_choice")
        kinds = ("function", "custom", "allowed_tools")
        kind = fields.one_of(choice.require("type"), "tool_choice.type", kinds)
        if kind == "allowed_tools":
            return replace(_allowed(choice, tools), parallel=parallel)
        return ToolChoice(ToolMode.NAMED, name=_chosen(choice, tools), parallel=parallel)
    mode = ToolMode(fields.one_of(given, "tool_choice", ("none", "auto", "required")))
    mode = possible_mode(mode, bool(tools.all), "tool_choice")
    return ToolChoice(mode, parallel=parallel)


def _chosen(choice: Fields, tools: ResponseTools) -> str:
    return known_name(_flat(_named_tool(choice)), tools.all, choice.path)


def _allowed(choice: Fields, tools: ResponseTools) -> ToolChoice:
    """Tools that OpenAI's servers would run are left out, as they are in `tools`."""
    listed = _listed(choice.require("tools"), choice.name("tools"))
    ours = [tool for tool in listed if tool.get("type") in ("function", "custom")]
    names = frozenset(_chosen(tool, tools) for tool in ours)
    modes = ("auto", "required")
    mode = ToolMode(fields.one_of(choice.require("mode"), choice.name("mode"), modes))
    return ToolChoice(possible_mode(mode, bool(names), choice.name("tools")), allowed=names)


# --- the rest ------------------------------------------------------------------------------


def grammar(body: Fields) -> Grammar | None:
    return wanted_format(body, output_format(body.object("text"), "format"))


def wants_summary(body: Fields) -> bool:
    """Whether the client wants a summary. It gets the reasoning itself: firn has no summaries."""
    reasoning = body.object("reasoning")
    for member in ("summary", "generate_summary"):
        given = reasoning.get(member)
        if given is not None:
            kinds = ("auto", "concise", "detailed", "none")
            return fields.one_of(given, reasoning.name(member), kinds) != "none"
    return False


def included(body: Fields) -> frozenset[str]:
    given = body.get("include")
    if given is None:
        return frozenset()
    return frozenset(
        fields.string(value, f"include[{i}]")
        for i, value in enumerate(fields.array(given, "include"))
    )
