"""Calls as a name and pairs of <arg_key> and <arg_value>: GLM 4.5 and later, Laguna, LongCat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from firn.text.call_grammar import CallGrammar
from firn.text.parsers import ToolFormat
from firn.text.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.tag_grammar import calls_in_tags


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


_NAMES = ("tool_call", "arg_key", "arg_value")


def _grammar(g: CallGrammar) -> str:
    opening = next((o for o in Glm.tags_by_marker if o in g.template), "<tool_call>")
    return calls_in_tags(g, Glm.tags_by_marker[opening], opening)


FORMATS = (
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
        aliases=("glm45", "glm47", "glm4_moe", "laguna", "longcat"),
        example="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        matches=lambda clues: "arg_key>" in clues.template,
        grammar=_grammar,
        write=write_tags(Glm.tags_by_marker),
    ),
)
