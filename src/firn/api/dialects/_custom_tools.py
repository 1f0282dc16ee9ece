"""Custom tools, which take one text instead of arguments. Pure.

A model that calls functions passes that text as one argument. Here it is extracted from the JSON
around it, even while it arrives, and even if a limit has cut it off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from firn.api.dialects._output_formats import lark
from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.values import Grammar, Tool
from firn.text.grammar.json_lark import MAX_CHARS

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input, as text."}},
    "required": ["input"],
}
SYNTAXES = ("lark", "regex")

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BE_HEAD = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
_WHOLE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first of the two escapes that encode a character beyond 16 bits."""


def custom_tool(tool: Fields, *, wrapped: bool) -> Tool:
    """wrapped: the grammar is a member of the format, as in chats, not the format itself."""
    description = tool.string("description") or ""
    name = fields.string(tool.require("name"), tool.name("name"), max_chars=256, empty=False)
    form = tool.object("format")
    kind = form.get("type")
    if kind is None or kind == "text":
        return Tool(name, description, PARAMETERS, param=tool.path)
    fields.one_of(kind, form.name("type"), ("text", "grammar"))
    inner = form.object("grammar") if wrapped else form
    syntax = fields.one_of(inner.require("syntax"), inner.name("syntax"), SYNTAXES)
    given, path = inner.require("definition"), inner.name("definition")
    if syntax == "lark":
        grammar = Grammar("lark", lark(given, path), path)
    else:
        grammar = Grammar("regex", fields.string(given, path, max_chars=MAX_CHARS), path)
    # The grammar is enforced, but the model does better if it has read it.
    description = "\n\n".join(text for text in (description, grammar.text) if text)
    return Tool(name, description, PARAMETERS, param=tool.path, grammar=grammar)


def custom_input(arguments: str) -> str:
    """The text that a call passes to its tool, from its complete arguments."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return CustomInput().feed(arguments)
    text = value.get("input") if isinstance(value, dict) else value
    if isinstance(value, dict) and not isinstance(text, str) and len(value) == 1:
        (text,) = value.values()
    return text if isinstance(text, str) else arguments


class CustomInput:
    """The text of a call while its arguments arrive. Owner: one call of a stream.

    feed() each piece, then flush() once: arguments of another form can be read only when complete.
    """

    def __init__(self) -> None:
        self._before: list[str] = []
        """The arguments so far, until their text begins."""
        self._is_other = False
        """Whether they have another form."""
        self._in_text = False
        self._pending = ""
        self._has_ended = False

    def feed(self, piece: str) -> str:
        if not self._in_text:
            self._before.append(piece)
            piece = self._begun()
        return self._text(piece) if self._in_text else ""

    def flush(self) -> str:
        return "" if self._in_text else custom_input("".join(self._before))

    def _begun(self) -> str:
        """The beginning of the text, if it has begun."""
        if self._is_other:
            return ""
        before = "".join(self._before)
        head = _HEAD.match(before)
        if head is None:
            self._is_other = not _MAY_BE_HEAD.fullmatch(before)
            return ""
        self._in_text = True
        return before[head.end() :]

    def _text(self, piece: str) -> str:
        if self._has_ended:
            return ""
        self._pending += piece
        whole = _WHOLE.match(self._pending)
        end = whole.end() if whole else 0
        self._has_ended = self._pending[end : end + 1] == '"'
        if not self._has_ended:
            half = _HALF.search(self._pending, 0, end)
            end = half.start() if half else end
        text, self._pending = self._pending[:end], self._pending[end:]
        return str(json.loads(f'"{text}"', strict=False))
