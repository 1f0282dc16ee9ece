"""Reads calls written as JSON, as they arrive.

The text of the arguments is passed on as it arrives, and common mistakes of models are corrected on
the way: raw line breaks, stray backslashes and lone surrogates in strings, Python's True and None,
and top-level scalars of another type than the schema's.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from firn.text.calls import SPACE, CallParser, NotACall, Script, Tape
from firn.text.schema import ANY, coerce

NAME_KEYS = ("name", "tool_name", "function", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "tool_call_id")

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_OUTSIDE = re.compile(r'[^"\[\]{}A-Za-z]+')
_WORD = re.compile(r"[A-Za-z]")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = '"\\/bfnrt'
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_FIRST_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""A character beyond 16 bits is written as two escapes, its surrogates."""
_BROKEN = "\\ufffd"
_CLOSER = {"{": "}", "[": "]"}

Sink = Callable[[str], None]
TypesOf = Callable[[str], frozenset[str]]


class JsonTape:
    """Reads JSON values from a tape. `copy_*` pass a value's text to a sink as it arrives."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def next_char(self) -> Script[str]:
        """The next character that is not a space; "" at the end of the reply."""
        yield from self._tape.skip()
        char = yield from self._tape.peek()
        return char

    def string(self) -> Script[str]:
        parts: list[str] = []
        yield from self.copy_string(parts.append)
        try:
            return str(json.loads("".join(parts)))
        except ValueError as e:
            raise NotACall from e

    def value_text(self) -> Script[str]:
        """The text of one whole value."""
        parts: list[str] = []
        yield from self.copy_value(parts.append, ANY)
        return "".join(parts)

    def copy_object(self, sink: Sink, types_of: TypesOf) -> Script[None]:
        """Copies an object; converts top-level scalars to the types that `types_of` returns."""
        yield from self._copy_char("{", sink)
        if (yield from self._closes("}", sink)):
            return
        while True:
            yield from self.next_char()
            key = yield from self.string()
            sink(json.dumps(key, ensure_ascii=False))
            yield from self._copy_char(":", sink)
            yield from self._copy_space(sink)
            yield from self.copy_value(sink, types_of(key))
            if (yield from self._closes("}", sink)):
                return
            yield from self._copy_char(",", sink)
            yield from self._copy_space(sink)

    def copy_value(self, sink: Sink, types: frozenset[str]) -> Script[None]:
        char = yield from self.next_char()
        if char in ("{", "["):
            yield from self._copy_balanced(sink)
        elif char != '"':
            text = yield from self._scalar()
            sink(json.dumps(text) if types == {"string"} and text[0] in "-0123456789" else text)
        elif types and "string" not in types:
            text = yield from self.string()
            sink(json.dumps(coerce(text, types), ensure_ascii=False))
        else:
            yield from self.copy_string(sink)

    def copy_string(self, sink: Sink) -> Script[None]:
        tape = self._tape
        yield from tape.expect('"')
        sink('"')
        while True:
            yield from self._wait_for_char()
            plain = _PLAIN.match(tape.text, tape.pos)
            if plain:
                tape.pos = plain.end()
                sink(plain[0])
                continue
            char = tape.text[tape.pos]
            if char == "\\":
                sink((yield from self._escape()))
                continue
            tape.pos += 1
            if char == '"':
                sink('"')
                return
            sink(json.dumps(char)[1:-1])  # a raw control character

    def _escape(self) -> Script[str]:
        tape = self._tape
        pair = yield from tape.peek(2)
        if pair == "\\u":
            six = yield from tape.peek(6)
            if _UNICODE.fullmatch(six):
                tape.pos += 6
                return (yield from self._character(six))
        if len(pair) < 2:
            yield from tape.more()
        if pair == "\\'":
            tape.pos += 2
            return "'"
        if pair[1] in _ESCAPES:
            tape.pos += 2
            return pair
        tape.pos += 1  # a lone backslash, as in an unescaped pattern or path
        return "\\\\"

    def _character(self, escape: str) -> Script[str]:
        """The escapes of one character. A lone surrogate becomes U+FFFD: clients refuse it, or
        cannot send it back."""
        if _FIRST_HALF.fullmatch(escape) and (yield from self._tape.starts_with("\\u")):
            second = yield from self._tape.peek(6)
            if _SECOND_HALF.fullmatch(second):
                self._tape.pos += 6
                return escape + second
        is_half = _FIRST_HALF.fullmatch(escape) or _SECOND_HALF.fullmatch(escape)
        return _BROKEN if is_half else escape

    def _copy_balanced(self, sink: Sink) -> Script[None]:
        tape = self._tape
        closers: list[str] = []
        while True:
            yield from self._wait_for_char()
            outside = _OUTSIDE.match(tape.text, tape.pos)
            if outside:
                tape.pos = outside.end()
                sink(outside[0])
                continue
            char = tape.text[tape.pos]
            if char == '"':
                yield from self.copy_string(sink)
                continue
            if _WORD.match(char):
                sink((yield from self._word()))
                continue
            if char in _CLOSER:
                closers.append(_CLOSER[char])
            elif char != closers.pop():
                raise NotACall
            tape.pos += 1
            sink(char)
            if not closers:
                return

    def _word(self) -> Script[str]:
        text = ""
        while _WORD.match((yield from self._tape.peek())):
            text += self._tape.text[self._tape.pos]
            self._tape.pos += 1
        return _PYTHON_WORDS.get(text, text)

    def _scalar(self) -> Script[str]:
        tape = self._tape
        text = ""
        while True:
            char = yield from tape.peek()
            if not char or char in SPACE or char in ",:]}":
                break
            text += char
            tape.pos += 1
        text = _PYTHON_WORDS.get(text, text)
        if not _SCALAR.fullmatch(text):
            raise NotACall
        return text

    def _copy_char(self, char: str, sink: Sink) -> Script[None]:
        yield from self._tape.skip()
        yield from self._tape.expect(char)
        sink(char)

    def _closes(self, char: str, sink: Sink) -> Script[bool]:
        yield from self._tape.skip()
        is_next = yield from self._tape.take(char)
        if is_next:
            sink(char)
        return is_next

    def _copy_space(self, sink: Sink) -> Script[None]:
        """Copies any number of spaces as one."""
        char = yield from self._tape.peek()
        if char and char in SPACE:
            yield from self._tape.skip()
            sink(" ")

    def _wait_for_char(self) -> Script[None]:
        while self._tape.pos >= len(self._tape.text):
            yield from self._tape.more()


class JsonCallParser(CallParser):
    """A parser whose calls are JSON: one object, or a list of them.

    any_key: a call object may have keys other than those of a call.
    """

    any_key = True

    def calls(self) -> Script[None]:
        """Reads {...} or [{...}, ...]; each call is reported as it is read."""
        json_tape = JsonTape(self.tape)
        char = yield from json_tape.next_char()
        if char != "[":
            yield from self.call(json_tape)
            return
        self.tape.pos += 1
        while True:
            yield from json_tape.next_char()
            yield from self.call(json_tape)
            char = yield from json_tape.next_char()
            self.tape.pos += len(char)
            if char == "]":
                return
            if char != ",":
                raise NotACall

    def call(self, json_tape: JsonTape) -> Script[None]:
        yield from _CallObject(self, json_tape).read()
        self.tape.keep()

    def stream_arguments(self) -> Script[None]:
        """Passes on the arguments of the call that has started, a JSON object."""
        name = self.name
        yield from JsonTape(self.tape).copy_object(
            self.arguments, lambda key: self.schemas.types(name, key)
        )
        self.end()

    def guarded(self, script: Script[None], *closers: str) -> Script[None]:
        """Runs a script. If a call turns out not to be JSON after the client has seen its
        beginning, the rest is passed on unchanged, up to a closer, which is left unread."""
        try:
            yield from script
        except NotACall:
            if not self.is_open:
                raise
            yield from self._raw_arguments(*closers)

    def _raw_arguments(self, *closers: str) -> Script[None]:
        self.tape.rewind()
        marker = ""
        while not marker:
            text, marker = yield from self.tape.flow(*closers)
            self.tape.pos -= len(marker)
            self.arguments(text)
        self.end()


class SectionCallParser(JsonCallParser):
    """Calls in a section: each has a header and JSON arguments, between tags of its own.

    The section's opening tag may be missing, and so may any closing tag.
    """

    section: ClassVar[str]
    section_end: ClassVar[str]
    call_open: ClassVar[str]
    call_end: ClassVar[str]
    fence: ClassVar[str] = ""
    """The marker that may close a code block around the arguments."""

    @abstractmethod
    def read_call(self) -> Script[None]:
        """Reads from the end of a call's opening tag to the end of its arguments."""

    def header(self, end: str, *, limit: int) -> Script[str]:
        """The text up to `end`. Raises NotACall if the call has none, without reading into the next."""
        text, marker = yield from self.tape.until(end, self.call_open, self.call_end, limit=limit)
        if marker != end:
            raise NotACall
        return text

    def script(self) -> Script[None]:
        yield from self.tape.skip()
        if self.marker == self.section:
            yield from self.tape.expect(self.call_open)
        yield from self._call()
        while (yield from self._next_call()):
            yield from self._call()
        yield from self.tape.close(self.section_end)

    def _next_call(self) -> Script[bool]:
        yield from self.tape.skip()
        is_next = yield from self.tape.take(self.call_open)
        return is_next

    def _call(self) -> Script[None]:
        yield from self.guarded(self.read_call(), self.call_end, self.section_end)
        if self.fence:
            yield from self.tape.close(self.fence)
        yield from self.tape.close(self.call_end)
        self.tape.keep()


class _CallObject:
    """One call object: {"name": ..., "arguments": {...}} and its variants."""

    def __init__(self, parser: JsonCallParser, json_tape: JsonTape) -> None:
        self._parser = parser
        self._json = json_tape
        self._tape = parser.tape
        self._name = ""
        self._id: str | None = None
        self._arguments: str | None = None
        self._started = False

    def read(self) -> Script[None]:
        yield from self._fields(nested=False)
        if not self._started:
            self._parser.whole(self._name, _object_of(self._arguments), self._id)

    def _fields(self, *, nested: bool) -> Script[None]:
        yield from self._tape.expect("{")
        if (yield from self._json.next_char()) == "}":
            self._tape.pos += 1
            return
        while True:
            yield from self._json.next_char()
            key = yield from self._json.string()
            yield from self._json.next_char()
            yield from self._tape.expect(":")
            char = yield from self._json.next_char()
            yield from self._field(key, char, nested=nested)
            char = yield from self._json.next_char()
            self._tape.pos += len(char)
            if char == "}":
                return
            if char != ",":
                raise NotACall

    def _field(self, key: str, char: str, *, nested: bool) -> Script[None]:
        if key in NAME_KEYS and char == '"' and not self._name:
            name = yield from self._json.string()
            self._name = self._parser.checked(name)
        elif key in ID_KEYS and char == '"':
            self._id = yield from self._json.string()
        elif key == "function" and char == "{" and not nested:
            yield from self._fields(nested=True)
        elif key in ARGUMENT_KEYS and char == "{" and self._name and self._arguments is None:
            self._arguments = ""
            self._parser.start(self._name, self._id)
            self._started = True
            yield from self._parser.stream_arguments()
        elif key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = yield from self._json.value_text()
        elif not self._parser.any_key and key not in (*NAME_KEYS, "type"):
            raise NotACall
        else:
            yield from self._json.value_text()


def write_json(before: str, between: str, after: str) -> Callable[[str, Mapping[str, Any]], str]:
    """Makes a writer of calls with JSON arguments: markup, the name, markup, arguments, markup."""

    def write(name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps(arguments, ensure_ascii=False)
        return f"{before}{name}{between}{body}{after}"

    return write


def _object_of(text: str | None) -> Mapping[str, Any]:
    """Arguments that arrived before the name, as a JSON string, as null, or not at all."""
    value: Any = None
    try:
        value = json.loads(text or "null")
        if isinstance(value, str):
            value = json.loads(value or "{}")
    except (ValueError, RecursionError) as e:
        raise NotACall from e
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotACall
    return value
