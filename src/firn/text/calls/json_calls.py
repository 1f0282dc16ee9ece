"""Reads calls written as JSON, as they arrive.

The text of the arguments is passed on as it arrives, and common mistakes of models are corrected on
the way: raw line breaks, stray backslashes and lone surrogates in strings, Python's words and quotes,
values without quotes, commas too many or too few, and scalars of another type than the schema's. What
cannot be read ends the arguments: they are JSON in any case, unless the reply was cut off in them.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from firn.text.calls.call_parser import SPACE, CallParser, NotACall, Script, Tape, TextEnded
from firn.text.calls.schema import ANY, coerce

NAME_KEYS = ("name", "tool_name", "function", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "tool_call_id")

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[\w$.-]+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = '"\\/bfnrt'
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_FIRST_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""A character beyond 16 bits is written as two escapes, its surrogates."""
_BROKEN = "\\ufffd"
_CLOSER = {"{": "}", "[": "]"}
_UNMISTAKABLE = ('"', "'", "{", "[")
"""A value that begins with one of these needs no comma before it."""
_ENDS = (",", "]", "}", "<")
"""What ends a value; the last of them begins a marker."""
_JUNK = re.compile(r"[^,\]}<]*")
_BARE = re.compile(r'[^,\]}<\[{"\n]*')
_BARE_KEY = re.compile(r'[^,\]}<\[{"\n:]*')
_MAX_NOISE = 1024
_NO_JSON = ("NaN", "Infinity", "-Infinity")

Sink = Callable[[str], None]
TypesOf = Callable[[str], frozenset[str]]


class JsonTape:
    """Reads JSON values from a tape. `copy_*` pass a value's text to a sink as it arrives."""

    def __init__(self, tape: Tape, missing: list[str] | None = None) -> None:
        """missing: what the text that was copied lacks to be JSON, last first."""
        self._tape = tape
        self._missing = [] if missing is None else missing

    def next_char(self) -> Script[str]:
        """The next character that is not a space; "" at the end of the reply."""
        yield from self._tape.skip()
        char = yield from self._tape.peek()
        return char

    def string(self) -> Script[str]:
        parts: list[str] = []
        yield from JsonTape(self._tape).copy_string(parts.append)
        try:
            return str(json.loads("".join(parts)))
        except ValueError as e:
            raise NotACall from e

    def value_text(self) -> Script[str]:
        """The text of one whole value."""
        parts: list[str] = []
        char = yield from self.next_char()
        if char in _CLOSER:
            yield from self._copy_container(parts.append, lambda key: ANY)
        else:
            yield from self._copy_leaf(parts.append, ANY)
        return "".join(parts)

    def copy_object(self, sink: Sink, types_of: TypesOf) -> Script[None]:
        """Copies an object; converts its scalars to the types that `types_of` returns."""
        yield from self._tape.skip()
        if not (yield from self._tape.starts_with("{")):
            raise TextEnded if self._tape.ends_inside("{") else NotACall
        yield from self._copy_container(sink, types_of)

    def _copy_container(self, sink: Sink, types_of: TypesOf) -> Script[None]:
        """Copies an object or a list. A comma is copied with what follows it."""
        outside = len(self._missing)
        yield from self._open(sink)
        separator, needs_comma = "", False
        while len(self._missing) > outside:
            space = yield from self._space()
            char = yield from self._next()
            closer = self._missing[-1]
            if char in _CLOSER.values():  # the other one is a slip
                self._tape.pos += 1
                self._missing.pop()
                sink(closer)
                separator, needs_comma = "", True
                continue
            if char == ",":  # one too many is left out
                self._tape.pos += 1
                separator, needs_comma = ("," if needs_comma else separator), False
                continue
            if needs_comma and char not in _UNMISTAKABLE:
                yield from self._skip_junk()
                continue
            lead = "," if needs_comma else separator
            lead += space if lead else ""
            is_member = closer == "}"
            types = ANY
            if is_member:
                key = yield from self._key()
                is_top = len(self._missing) == outside + 1
                types = types_of(key) if is_top else ANY
                yield from self._tape.skip()
                if not (yield from self._tape.take(":")) and (yield from self._next()) in _ENDS:
                    raise NotACall
                lead += json.dumps(key, ensure_ascii=False) + ":" + (yield from self._space())
            char = yield from self._next()
            if lead:
                sink(lead)
                self._missing.append("null")
            separator, needs_comma = "", char not in _CLOSER
            if char in _CLOSER:
                yield from self._open(sink)
            else:
                yield from self._copy_leaf(sink, types)

    def _skip_junk(self) -> Script[None]:
        """Steps over what is between a value and the next comma or bracket."""
        yield from self._run(_JUNK)
        if (yield from self._next()) == "<":
            raise NotACall

    def _open(self, sink: Sink) -> Script[None]:
        char = yield from self._next()
        self._tape.pos += 1
        self._begin_value(sink, char)
        self._missing.append(_CLOSER[char])

    def _copy_leaf(self, sink: Sink, types: frozenset[str]) -> Script[None]:
        """Copies a value that is no object and no list."""
        char = yield from self._next()
        if char in ('"', "'"):
            if char == '"' and (not types or "string" in types):
                self._begin_value(sink, "")
                yield from self.copy_string(sink)
                return
            text = yield from (self.string() if char == '"' else self._single_quoted())
            value = coerce(text, types)
        else:
            text = yield from self._bare_text()
            if _SCALAR.fullmatch(text) and (types != {"string"} or text[0] not in "-0123456789"):
                self._begin_value(sink, text)
                return
            value = coerce(text, types)
        self._begin_value(sink, json.dumps(value, ensure_ascii=False))

    def _begin_value(self, sink: Sink, text: str) -> None:
        if self._missing[-1:] == ["null"]:
            self._missing.pop()
        sink(text)

    def _bare_text(self) -> Script[str]:
        """A scalar, or what a model has written in its place: 007, 2024-10-05, or words."""
        text = yield from self._run(_BARE)
        text = text.strip()
        text = _PYTHON_WORDS.get(text, text)
        if text in _NO_JSON or (not text and (yield from self._next()) not in (",", "}")):
            raise NotACall
        return text or "null"

    def _run(self, chars: re.Pattern[str]) -> Script[str]:
        """The characters that the pattern matches; waits for another one."""
        parts: list[str] = []
        while True:
            match = chars.match(self._tape.text, self._tape.pos)
            assert match is not None  # it matches no character, too
            parts.append(match[0])
            self._tape.pos = match.end()
            if self._tape.pos < len(self._tape.text):
                return "".join(parts)
            yield from self._tape.more()

    def _single_quoted(self) -> Script[str]:
        """A string as Python quotes it. Only a quote that something may follow closes it."""
        self._tape.pos += 1
        parts: list[str] = []
        while True:
            text, _ = yield from self._tape.until("'")
            parts.append(text)
            if text.endswith("\\"):
                parts[-1] = text[:-1] + "'"
            elif (yield from self._tape.peek()) in (*SPACE, *",:]}", ""):
                return "".join(parts)
            else:
                parts.append("'")

    def _key(self) -> Script[str]:
        char = yield from self._next()
        if char == '"':
            return (yield from self.string())
        if char == "'":
            return (yield from self._single_quoted())
        text = yield from self._run(_BARE_KEY)
        if not _WORD.fullmatch(text.rstrip()):
            raise NotACall
        return text.rstrip()

    def copy_string(self, sink: Sink) -> Script[None]:
        tape = self._tape
        yield from tape.expect('"')
        sink('"')
        self._missing.append('"')
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
                self._missing.pop()
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

    def _space(self) -> Script[str]:
        """Steps over any number of spaces, which count as one."""
        char = yield from self._tape.peek()
        if not char or char not in SPACE:
            return ""
        yield from self._tape.skip()
        return " "

    def _next(self) -> Script[str]:
        """The next character that is not a space; raises TextEnded at the end of the reply."""
        yield from self._tape.skip()
        yield from self._wait_for_char()
        return self._tape.text[self._tape.pos]

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
            self.tape.pos += char in ("]", ",") and len(char)
            if char != ",":  # the closing bracket may be missing
                return

    def call(self, json_tape: JsonTape) -> Script[None]:
        yield from _CallObject(self, json_tape).read()
        self.tape.keep()

    def stream_arguments(self) -> Script[None]:
        """Passes on the arguments of the call that has started, a JSON object."""
        name = self.name
        yield from JsonTape(self.tape, self.missing).copy_object(
            self.arguments, lambda key: self.schemas.types(name, key)
        )
        self.end()

    def guarded(self, script: Script[None], *closers: str) -> Script[None]:
        """Runs a script. If arguments turn out not to be JSON after the client has seen the beginning
        of the call, they end there, and the rest is left out, up to a closer, which is left unread."""
        try:
            yield from script
        except TextEnded:
            raise
        except NotACall:
            if not self.is_open:
                raise
            is_object = self.has_arguments
            if is_object:
                self.complete()
            self.tape.rewind()
            marker = ""
            while not marker and (closers or not is_object):
                text, marker = yield from self.tape.flow(*closers)
                self.tape.pos -= len(marker)
                if not is_object:  # passed on as it is: code, in some formats
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
        if self.marker != self.section:
            yield from self._call()
            while (yield from self._next_call()):
                yield from self._call()
            yield from self.tape.close(self.section_end)
            return
        if not (yield from self._reach_call()):
            raise NotACall
        yield from self._call()
        while (yield from self._reach_call()):
            yield from self._call()

    def _reach_call(self) -> Script[bool]:
        """Steps over what a model says between the calls of a section, or past the section's end."""
        try:
            _, marker = yield from self.tape.until(
                self.call_open, self.section_end, limit=_MAX_NOISE
            )
        except NotACall:
            if not self.n_calls:
                raise
            self.tape.rewind()  # the section has ended without its tag, and this is text
            yield from self.tape.close(self.section_end)
            return False
        return marker == self.call_open

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
        try:
            yield from self._fields(nested=False)
        except TextEnded:
            raise
        except NotACall:  # what follows whole arguments makes no difference
            if not self._started or self._parser.is_open:
                raise
            self._tape.rewind()
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
