"""Calls written as Python: get_weather(city="Paris", days=3). Parsed, never run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_JSON_WORDS = {"true": True, "false": False, "null": None}
_BEGINS_CALL = re.compile(r"\s*[\[(]*\s*\w[\w.]*\s*\(")
_AFTER_STRING = re.compile(r"\s*(?:[,)\]}:]|$)")
_NUMBER_LIKE = re.compile(r"(?<![\w.%/+-])[+-]?\d[\w.%/+-]*+(?::\d\d){0,2}(?=\s*[,)\]}])")
_FAULTS = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)
_BACKSLASH = re.compile(
    r"""\\(?:[\\'"abfnrtv\n0-7] | N\{[A-Z0-9\ -]+\} | x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4}
         | U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})?""",
    re.VERBOSE,
)
"""An escape sequence in a string, or a stray backslash."""


class PythonCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call with named arguments; values are JSON, whose literals `python_calls` accepts."""
    pairs = (f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    return f"{name}({', '.join(pairs)})"


def python_calls(text: str) -> list[PythonCall]:
    """The calls in one expression, in a list, or one per line; empty for any other text."""
    if not _BEGINS_CALL.match(text):
        return []  # parsing would take a thousand times as long
    # Backslashes of a pattern or path: Python would warn of "\d" on stderr, and reject "\users".
    text = _BACKSLASH.sub(lambda match: match[0] if len(match[0]) > 1 else "\\\\", text.strip())
    text = text.replace("\0", "\\x00")  # which Python does not parse
    for read in (text, _repair(text)):
        try:
            return _calls(ast.parse(read).body)
        except _FAULTS:
            continue
    return []


def _calls(body: list[ast.stmt]) -> list[PythonCall]:
    nodes: list[ast.expr] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            return []
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return [_call(node) for node in nodes]


def _repair(text: str) -> str:
    """Escapes what templates leave unescaped in strings, quotes and line breaks, and quotes what begins
    like a number and is none: 07, 2024-10-15, 5kg.

    A quote closes its string only if a comma, a colon, a closing bracket or the end follows.
    """
    chars: list[str] = []
    quote = ""
    escaped = False
    i = 0
    while i < len(text):
        char = text[i]
        i += 1
        if not quote:
            number = _NUMBER_LIKE.match(text, i - 1)
            if number and not _is_literal(number[0]):
                chars.append(f'"{number[0]}"')
                i = number.end()
                continue
            quote = char if char in "'\"" else ""
            chars.append(char)
        elif escaped or char == "\\":
            escaped = not escaped
            chars.append(char)
        elif char == quote:
            closes = _AFTER_STRING.match(text, i) is not None
            chars.append(char if closes else "\\" + char)
            quote = "" if closes else quote
        else:
            chars.append("\\n" if char == "\n" else char)
    return "".join(chars)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except _FAULTS:
        return False
    return True


class Brackets:
    """Tracks whether the brackets of a growing text are closed. Those in strings do not count.

    lenient: a quote closes its string only where a string may end (see `_repair`).
    """

    def __init__(self, *, lenient: bool) -> None:
        self._lenient = lenient
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> bool:
        """True once the brackets are closed. The text must not end with a quote."""
        for i, char in enumerate(text):
            if not self._quote:
                self._quote = char if char in "'\"" else ""
                self._depth += (char in "([{") - (char in ")]}")
            elif self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == self._quote:
                closes = not self._lenient or _AFTER_STRING.match(text, i + 1) is not None
                self._quote = "" if closes else self._quote
        return self._depth <= 0 and not self._quote


def _call(node: ast.expr) -> PythonCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a call with **arguments")
        value = ast.literal_eval(_JsonWords().visit(keyword.value))
        json.dumps(value, allow_nan=False)  # raises for bytes and whatever else JSON lacks
        arguments[keyword.arg] = value
    return PythonCall(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("not a name")


class _JsonWords(ast.NodeTransformer):
    """Replaces true, false and null, which templates write inside nested values, sets by lists, and any
    other word by its text: some templates leave out the quotes."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        self.generic_visit(node)
        return ast.copy_location(ast.List(node.elts, ast.Load()), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_JSON_WORDS.get(node.id, node.id)), node)
