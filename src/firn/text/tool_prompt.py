"""Tools for a template that supports none: described in the system prompt, called in text. Pure.

Earlier calls and results become text, in the format that the model is asked to write and that its reply
is read with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from firn.core.values import Message, TextPart, Tool
from firn.text.joined_parts import JoinedParts
from firn.text.messages import tools_to_template
from firn.text.parsers import ToolFormat, WriteCall

INTRODUCTION = """\
# Tools

You can call tools. Each line describes one of them, with a JSON schema of its arguments:
{tools}

To call a tool, write a call in exactly this form, with the tool's name and its arguments:
{example}

Write nothing after a call: its result is sent to you next, between <tool_result> and </tool_result>.\
 Call a tool only where it helps; otherwise answer in plain text."""
RESULT_OPEN, RESULT_CLOSE = "<tool_result{name}>\n", "\n</tool_result>"


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat
) -> tuple[Message, ...]:
    """The chat with its tools, calls and results as text."""
    write = format.write
    assert write is not None
    names = {c.id: c.name for m in messages for c in m.tool_calls}
    turns = [_as_text(m, write, names.get(m.tool_call_id or "", "")) for m in messages]
    return (*_introduced(tools, write), *turns) if tools else tuple(turns)


def _introduced(tools: Sequence[Tool], write: WriteCall) -> list[Message]:
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
