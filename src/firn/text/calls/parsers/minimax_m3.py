"""MiniMax M3: a mark before every tag, a tag for each parameter, and for each member of its value.

<invoke name="f">  <city>Paris</city>  <tags><item>a</item><item>b</item></tags>  </invoke>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from firn.text.calls.call_parser import NotACall, Script
from firn.text.calls.parsers import ToolFormat
from firn.text.calls.schema import from_text, resolved, types_of
from firn.text.calls.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.tag_grammar import calls_in_tags

MARK = "]<]minimax[>["
SECTION, SECTION_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_ITEM = "item"
_MAX_DEPTH = 32
_MAX_NAME = 512

_TAGS = CallTags(
    call=f"{MARK}<invoke name=",
    call_end=f"{MARK}</invoke>",
    parameter=f"{MARK}<",
    parameter_end=f"{MARK}</{{}}>",
    section_end=SECTION_END,
    shares_section=True,
    line="",
)


@dataclass(slots=True)
class _Element:
    """The inside of a tag: text, or further elements."""

    text: str = ""
    members: list[tuple[str, _Element]] = field(default_factory=list)

    def value(self, schema: Any, root: Mapping[str, Any]) -> Any:
        types = types_of(schema, root)
        if not self.members:
            return from_text(self.text, types)
        schema = resolved(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        if "array" in types or all(key == _ITEM for key, _ in self.members):
            return [element.value(schema.get("items"), root) for _, element in self.members]
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        return {key: element.value(properties.get(key), root) for key, element in self.members}


class MiniMaxM3(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {SECTION: _TAGS}

    def parameters(self) -> Script[None]:
        separator = ""
        while True:
            yield from self.tape.until(MARK)
            if (yield from self.tape.take("</")):
                yield from self.tape.until(">", limit=_MAX_NAME)
                return
            yield from self.tape.expect("<")
            key, _ = yield from self.tape.until(">", limit=_MAX_NAME)
            yield from self.parameter(separator, key, "")
            separator = ", "

    def typed_value(self, lead: str, key: str, types: frozenset[str]) -> Script[None]:
        element = yield from self._element(0)
        schema, root = self.schemas.schema(self.name, key)
        value = element.value(schema, root)
        self.arguments(lead + json.dumps(value, ensure_ascii=False))

    def _element(self, depth: int) -> Script[_Element]:
        """Reads past the closing tag of an element."""
        if depth > _MAX_DEPTH:
            raise NotACall
        element = _Element()
        while True:
            text, _ = yield from self.tape.until(MARK)
            element.text += text
            if (yield from self.tape.take("</")):
                yield from self.tape.until(">", limit=_MAX_NAME)
                return element
            yield from self.tape.expect("<")
            key, _ = yield from self.tape.until(">", limit=_MAX_NAME)
            element.members.append((key, (yield from self._element(depth + 1))))


def _grammar(g: CallGrammar) -> str:
    lines = replace(_TAGS, call_end=f"{_TAGS.call_end}\n")
    return calls_in_tags(g, lines, f"{SECTION}\n")


FORMATS = (
    ToolFormat(
        name="minimax_m3",
        parser=MiniMaxM3,
        opens=(SECTION,),
        tokens=(MARK,),
        example=f'{SECTION}\n{MARK}<invoke name="get_weather">{MARK}<city>Paris{MARK}</city>'
        f"{MARK}<days>3{MARK}</days>{MARK}</invoke>\n{SECTION_END}",
        matches=lambda clues: MARK in clues.template,
        grammar=_grammar,
        write=write_tags(MiniMaxM3.tags_by_marker),
    ),
)
