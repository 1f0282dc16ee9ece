"""Reads calls written as tags: one for the call, one for each parameter.

The arguments become JSON on the way. A parameter that is a string by its schema is passed on as it
arrives; any other waits for its end, since only the whole text shows its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from firn.text.calls.call_parser import Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape
from firn.text.calls.schema import from_text

STRING = frozenset({"string"})
_MAX_HEADER = 512

_HEADER = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+))(.*)""", re.DOTALL)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of one format, e.g. <function=NAME> <parameter=KEY> VALUE </parameter> </function>.

    call: empty if the name directly follows the opening marker. key_end and value_open are between key
    and value. parameter_end: {} stands for the key. section_end: closes several calls; empty: nothing
    does. trims: a line break at each end of a value is layout. cdata: a value may be in a CDATA section.

    For writing calls: line: what is written between two tags. shares_section: several calls share a
    section. has_string_attribute: a parameter's tag states whether its value is a string.
    """

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    section_end: str
    name_end: str = ">"
    key_end: str = ">"
    value_open: str = ""
    trims: bool = False
    cdata: bool = False
    line: str = "\n"
    shares_section: bool = False
    has_string_attribute: bool = False

    def quoted(self, tag: str, name: str) -> str:
        """A tag with a name, which is quoted where the tag has it as an attribute."""
        quote = '"' if tag.endswith("name=") else ""
        return f"{tag}{quote}{name}{quote}"

    def closes(self, key: str) -> str:
        return self.parameter_end.replace("{}", key)

    @property
    def padding(self) -> str:
        """What is written at each end of a value."""
        return "\n" if self.trims else ""


class TagCallParser(JsonCallParser):
    """`tags_by_marker` maps each opening marker of the format to its tags."""

    tags_by_marker: ClassVar[Mapping[str, CallTags]]

    def script(self) -> Script[None]:
        self.tags = self.tags_by_marker[self.marker]
        end = self.tags.section_end
        char = yield from JsonTape(self.tape).next_char()
        # Models mix formats: there may be JSON in the same tags.
        if char == "{" and self.marker != self.tags.call:
            yield from self.guarded(self.calls(), *filter(None, [end]))
            yield from self.tape.close(end, stray="}")
            return
        if self.tags.call and self.marker != self.tags.call:
            yield from self.tape.expect(self.tags.call)
        yield from self._call()
        while self.tags.call and (yield from self._next_call()):
            yield from self._call()
        if end:
            yield from self.tape.close(end)

    def _next_call(self) -> Script[bool]:
        start = self.tape.position()
        yield from self.tape.skip()
        is_next = yield from self.tape.take(self.tags.call)
        if not is_next:
            self.tape.back_to(start)
        return is_next

    def _call(self) -> Script[None]:
        tags = self.tags
        ends = (tags.name_end,) if tags.call else (tags.name_end, tags.parameter, tags.call_end)
        header, end = yield from self.tape.until(*ends, limit=_MAX_HEADER)
        if end != tags.name_end:
            self.tape.pos -= len(end)
        self.start(_split_header(header)[0] if header.lstrip()[:1] in ('"', "'") else header)
        if tags.call and (yield from JsonTape(self.tape).next_char()) == "{":
            yield from self.guarded(self.stream_arguments(), tags.call_end)
            yield from self.tape.close(tags.call_end, stray="}")
            return
        self.arguments("{")
        self.missing.append("}")
        self._keys_left = list(self.schemas.keys(self.name))
        yield from self.parameters()
        self.arguments("}")
        self.end()

    def parameters(self) -> Script[None]:
        """Reads from the end of the call's tag, past its closing tag."""
        tags = self.tags
        separator = ""
        ends = [tags.call_end]
        if tags.section_end not in ("", tags.call_end):
            ends.append(tags.section_end)
        while True:
            _, marker = yield from self.tape.until(tags.parameter, *ends)
            if marker in ends:
                if not tags.call or marker != tags.call_end:
                    self.tape.pos -= len(marker)  # left for the end of the section
                return
            header, _ = yield from self.tape.until(tags.key_end)
            key, attributes = _split_header(header)
            if tags.value_open:
                yield from self.tape.until(tags.value_open)
            yield from self.parameter(separator, key, attributes)
            separator = ", "

    def parameter(self, separator: str, key: str, attributes: str) -> Script[None]:
        """Reads a value, past its closing tag, and reports it with its key."""
        if key in self._keys_left:
            self._keys_left.remove(key)
        lead = separator + json.dumps(key, ensure_ascii=False) + ": "
        types = self._types(key, attributes)
        if types == STRING:
            yield from self._string(lead, key)
        else:
            yield from self.typed_value(lead, key, types)

    def typed_value(self, lead: str, key: str, types: frozenset[str]) -> Script[None]:
        """Reads a value that may be something else than a string."""
        text, marker = yield from self.tape.until(*self._value_ends(key))
        self._leave(marker, key)
        if self.tags.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        wrapped = _CDATA.fullmatch(text) if self.tags.cdata else None
        value = wrapped[1] if wrapped else from_text(text, types)
        self.arguments(lead + json.dumps(value, ensure_ascii=False))

    def _types(self, key: str, attributes: str) -> frozenset[str]:
        types = self.schemas.types(self.name, key)
        if 'string="true"' in attributes and (not types or "string" in types):
            return STRING
        return types - STRING if 'string="false"' in attributes else types

    def _value_ends(self, key: str) -> tuple[str, ...]:
        """What ends a value: its closing tag; if the model has left it out, what comes next."""
        tags = self.tags
        opens = (tags.quoted(tags.parameter, k) for k in self._keys_left)
        following = [tag if tag.endswith('"') else tag + tags.key_end for tag in opens]
        if tags.call and tags.section_end:
            following += [f"{tags.call_end}{line}{tags.section_end}" for line in ("", "\n")]
        return (tags.closes(key), *following)

    def _leave(self, marker: str, key: str) -> None:
        """Leaves a marker to be read that does not belong to the value before it."""
        if marker != self.tags.closes(key):
            self.tape.pos -= len(marker)

    def _string(self, lead: str, key: str) -> Script[None]:
        ends = self._value_ends(key)
        if self.tags.cdata and (yield from self._opens_cdata()):
            ends = ("]]>",)
        elif self.tags.trims:
            yield from self.tape.take("\n")
        self.arguments(lead + '"')
        self.missing.append('"')
        line_break = marker = ""
        while not marker:
            text, marker = yield from self.tape.flow(*ends)
            text, line_break = line_break + text, ""
            if self.tags.trims and text.endswith("\n"):
                text, line_break = text[:-1], "\n"
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if len(ends) > 1:
            self._leave(marker, key)
        self.missing.pop()
        self.arguments('"')

    def _opens_cdata(self) -> Script[bool]:
        start = self.tape.position()
        yield from self.tape.skip()
        is_next = yield from self.tape.take("<![CDATA[")
        if not is_next:
            self.tape.back_to(start)
        return is_next


def write_tags(tags_by_marker: Mapping[str, CallTags]) -> Callable[[str, Mapping[str, Any]], str]:
    """Makes a writer of calls in the first of these formats: strings as they are, the rest as JSON."""
    opening, tags = next(iter(tags_by_marker.items()))
    pad = tags.padding

    def value(key: str, argument: Any) -> str:
        is_text = isinstance(argument, str)
        kind = f' string="{str(is_text).lower()}"' if tags.has_string_attribute else ""
        text = argument if is_text else json.dumps(argument, ensure_ascii=False)
        opens = tags.line + tags.value_open if tags.value_open else ""
        head = f"{tags.quoted(tags.parameter, key)}{kind}{tags.key_end}{opens}"
        return f"{head}{pad}{text}{pad}{tags.closes(key)}{tags.line}"

    def write(name: str, arguments: Mapping[str, Any]) -> str:
        lead = "" if opening == tags.call else opening + (tags.line if tags.call else "")
        line = "" if tags.name_end == "\n" else tags.line
        head = f"{lead}{tags.quoted(tags.call, name)}{tags.name_end}{line}"
        body = "".join(value(key, argument) for key, argument in arguments.items())
        tail = f"{tags.call_end}{tags.line}" if tags.call else ""
        return f"{head}{body}{tail}{tags.section_end}"

    return write


def _split_header(text: str) -> tuple[str, str]:
    """(name, attributes) of the inside of a tag; the name may be quoted."""
    match = _HEADER.match(text)
    if not match:
        return "", ""
    return next(g for g in match.groups()[:3] if g is not None), match[4]
