"""Calls as <function=name><parameter=key>value: Qwen3-Coder, Seed-OSS, Nemotron 3; two variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from firn.core.values import Tool
from firn.text.calls.json_calls import write_json
from firn.text.calls.parsers import Clues, ToolFormat
from firn.text.calls.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.grammar.call_grammar import CallGrammar, plain
from firn.text.grammar.tag_grammar import calls_in_tags

_QWEN = CallTags(
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    section_end="</tool_call>",
    trims=True,
)


class XmlFunctions(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        "<tool_call>": _QWEN,
        "<function=": _QWEN,  # models forget the outer tag now and then
        "<seed:tool_call>": replace(_QWEN, section_end="</seed:tool_call>"),
    }


class NamedFunctions(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        "<function name=": CallTags(
            call="<function name=",
            call_end="</function>",
            parameter="<param name=",
            parameter_end="</param>",
            section_end="",
            cdata=True,
            line="",
        )
    }


def _is_xml(clues: Clues) -> bool:
    return "<function=" in clues.template and "<parameter=" in clues.template


def _is_named(clues: Clues) -> bool:
    return '<function name="' in clues.template and '<param name="' in clues.template


def _is_json(clues: Clues) -> bool:
    """Whether functions have JSON between their tags, as Functionary 3.1 writes them."""
    return "<function" in clues.template and "{end_tag}" in clues.template


def _json_grammar(g: CallGrammar) -> str:
    def write(tool: Tool) -> str:
        return f"{g.lark.mark(plain(tool.name, tool.param) + '>')} {g.arguments(tool)}"

    return g.in_marks(_QWEN.call, g.each(write), _QWEN.call_end)


def _xml_grammar(g: CallGrammar) -> str:
    opening = "<seed:tool_call>" if "<seed:tool_call>" in g.template else "<tool_call>"
    return calls_in_tags(g, XmlFunctions.tags_by_marker[opening], opening)


def _named_grammar(g: CallGrammar) -> str:
    ((opening, tags),) = NamedFunctions.tags_by_marker.items()
    return calls_in_tags(g, tags, opening)


FORMATS = (
    ToolFormat(
        name="xml_functions",
        parser=XmlFunctions,
        opens=tuple(XmlFunctions.tags_by_marker),
        tokens=("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
        aliases=("qwen3_coder", "qwen3_xml", "seed_oss", "nemotron3", "step3p5", "mimo"),
        example="<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        matches=_is_xml,
        grammar=_xml_grammar,
        write=write_tags(XmlFunctions.tags_by_marker),
    ),
    ToolFormat(
        name="json_functions",
        parser=XmlFunctions,
        opens=(_QWEN.call,),
        aliases=("functionary_v31",),
        example='<function=get_weather>{"city": "Paris", "days": 3}</function>',
        matches=_is_json,
        grammar=_json_grammar,
        write=write_json(_QWEN.call, ">", _QWEN.call_end),
        rank=5,
    ),
    ToolFormat(
        name="named_functions",
        parser=NamedFunctions,
        opens=tuple(NamedFunctions.tags_by_marker),
        tokens=("<function", "</function>", "<param", "</param>"),
        aliases=("minicpm5",),
        example='<function name="get_weather"><param name="city">Paris</param>'
        '<param name="days">3</param></function>',
        matches=_is_named,
        grammar=_named_grammar,
        write=write_tags(NamedFunctions.tags_by_marker),
    ),
)
