"""Calls as a name and pairs of <arg_key> and <arg_value>: GLM 4.5 and later, Laguna, LongCat, Hy3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from firn.text.calls.parsers import ToolFormat
from firn.text.calls.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.tag_grammar import calls_in_tags


def _pairs(prefix: str = "") -> CallTags:
    return CallTags(
        call="",
        call_end=f"</{prefix}tool_call>",
        parameter=f"<{prefix}arg_key>",
        parameter_end=f"</{prefix}arg_value>",
        section_end=f"</{prefix}tool_call>",
        name_end="\n",
        key_end=f"</{prefix}arg_key>",
        value_open=f"<{prefix}arg_value>",
    )


class Glm(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        "<tool_call>": _pairs(),
        "<longcat_tool_call>": _pairs("longcat_"),
    }


class Hunyuan(TagCallParser):
    """As GLM, in a section, and with a tag after the name. A release adds a word to its tags."""

    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        opening: CallTags(
            call=f"<tool_call{word}>",
            call_end=f"</tool_call{word}>",
            parameter=f"<arg_key{word}>",
            parameter_end=f"</arg_value{word}>",
            section_end=f"</tool_calls{word}>",
            name_end=f"<tool_sep{word}>",
            key_end=f"</arg_key{word}>",
            value_open=f"<arg_value{word}>",
            shares_section=True,
        )
        for word in (":opensource", "")
        for opening in (f"<tool_calls{word}>", f"<tool_call{word}>")
    }


_NAMES = ("tool_call", "arg_key", "arg_value")


def _grammar(g: CallGrammar) -> str:
    opening = next((o for o in Glm.tags_by_marker if o in g.template), "<tool_call>")
    return calls_in_tags(g, Glm.tags_by_marker[opening], opening)


def _hunyuan_grammar(g: CallGrammar) -> str:
    opening = "<tool_calls:opensource>" if ":opensource" in g.template else "<tool_calls>"
    return calls_in_tags(g, Hunyuan.tags_by_marker[opening], opening)


FORMATS = (
    ToolFormat(
        name="hy_v3",
        parser=Hunyuan,
        opens=tuple(Hunyuan.tags_by_marker),
        tokens=tuple(
            f"<{slash}{name}{word}>"
            for word in (":opensource", "")
            for name in (*_NAMES, "tool_calls", "tool_sep")
            for slash in ("", "/")
        ),
        aliases=("hunyuan",),
        example="<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n</tool_calls>",
        matches=lambda clues: "<tool_sep" in clues.template and "<arg_key" in clues.template,
        grammar=_hunyuan_grammar,
        write=write_tags(Hunyuan.tags_by_marker),
        rank=5,
    ),
    ToolFormat(
        name="glm",
        parser=Glm,
        opens=tuple(Glm.tags_by_marker),
        tokens=tuple(
            f"<{slash}{prefix}{name}>"
            for prefix in ("", "longcat_")
            for name in _NAMES
            for slash in ("", "/")
        ),
        aliases=("glm45", "glm47", "glm4_moe", "laguna", "poolside_v1", "longcat", "ling3"),
        example="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        matches=lambda clues: "arg_key>" in clues.template,
        grammar=_grammar,
        write=write_tags(Glm.tags_by_marker),
    ),
)
