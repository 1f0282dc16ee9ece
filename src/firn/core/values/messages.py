"""A conversation, in the one form that every API dialect decodes to. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture by reference.

    data: what was fetched from its address; fault: why nothing was. owner: whose cached features it
    may use, since a fast answer reveals that the picture was seen before; "": everybody's.
    """

    url: str
    param: str = "messages"
    data: bytes | None = None
    owner: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A file that may contain text.

    data: the file in base64; lead: text that introduces it; text: what was read from it; fault: why
    nothing was.
    """

    data: str
    media_type: str
    lead: str = ""
    param: str = "messages"
    text: str | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class OtherPart:
    """Content that no model accepts: audio, a file on another server, a hosted tool's output."""

    kind: str
    param: str = "messages"


MessagePart = TextPart | PicturePart | DocumentPart | OtherPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: the parsed object; text that is not a JSON object stays a string."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """checkpoint: the caller expects to send everything up to the end of this message again. aside: a
    program's note that accompanied tool results; it does not begin a turn."""

    role: Role
    parts: tuple[MessagePart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    checkpoint: bool = False
    aside: bool = False

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, TextPart))


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply, or on a part of it. `kind` names the language of `text`.

    parts: grammars that a lark text refers to as @name; each keeps the request parameter it came from.
    strict: a schema is refused if a part of it cannot be enforced.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str = ""
    param: str = "response_format"
    parts: tuple[tuple[str, Grammar], ...] = ()
    strict: bool = False


@dataclass(frozen=True, slots=True)
class RelaxedSchema:
    """A JSON schema reduced to what can be enforced. left_out: pointers to what no grammar enforces;
    faulty: to parts that were removed because they are malformed or contradictory."""

    schema: Mapping[str, Any]
    left_out: tuple[str, ...] = ()
    faulty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """param: its place in the request. grammar: constrains a free-form tool's input text."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = "tools"
    grammar: Grammar | None = None


class ToolMode(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """allowed: names of those tools in the prompt that may be called; None: all."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def permits(self, tool: Tool) -> bool:
        """Whether the reply may call this tool."""
        if self.mode is ToolMode.NONE:
            return False
        if self.mode is ToolMode.NAMED:
            return tool.name == self.name
        return self.allowed is None or tool.name in self.allowed


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, rendered by the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    """Whether the reply continues the last message, which is the assistant's."""

    @property
    def newest(self) -> int:
        """Index of the user's newest message; -1: a tool or the assistant was last."""
        for i in reversed(range(len(self.messages))):
            message = self.messages[i]
            if message.role == "system" or message.aside:
                continue
            follows_tool = i > 0 and self.messages[i - 1].role == "tool"
            return i if message.role == "user" and not follows_tool else -1
        return -1
