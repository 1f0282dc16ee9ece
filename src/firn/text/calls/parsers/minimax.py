"""Calls as <invoke name="..."><parameter name="...">: MiniMax M2, and DeepSeek V3.2 with its mark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from firn.text.calls.parsers import ToolFormat
from firn.text.calls.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.tag_grammar import calls_in_tags

_DSML = "｜DSML｜"


def invocation(section_end: str, mark: str = "") -> CallTags:
    """mark: what the names of the tags begin with."""
    return CallTags(
        call=f"<{mark}invoke name=",
        call_end=f"</{mark}invoke>",
        parameter=f"<{mark}parameter name=",
        parameter_end=f"</{mark}parameter>",
        section_end=section_end,
        shares_section=True,
        has_string_attribute=mark == _DSML,
    )


class MiniMax(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        "<minimax:tool_call>": invocation("</minimax:tool_call>")
    }


class Dsml(TagCallParser):
    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {
        f"<{_DSML}{section}>": invocation(f"</{_DSML}{section}>", _DSML)
        for section in ("function_calls", "tool_calls")
    }


def _grammar(g: CallGrammar) -> str:
    by_marker = {**MiniMax.tags_by_marker, **Dsml.tags_by_marker}
    opening = next((o for o in by_marker if o in g.template), next(iter(Dsml.tags_by_marker)))
    return calls_in_tags(g, by_marker[opening], opening)


FORMATS = (
    ToolFormat(
        name="minimax",
        parser=MiniMax,
        opens=tuple(MiniMax.tags_by_marker),
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
        aliases=("minimax_m2",),
        example='<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        matches=lambda clues: "<minimax:tool_call>" in clues.template,
        grammar=_grammar,
        write=write_tags(MiniMax.tags_by_marker),
    ),
    ToolFormat(
        name="dsml",
        parser=Dsml,
        opens=tuple(Dsml.tags_by_marker),
        tokens=(_DSML,),
        aliases=("deepseek_v32", "deepseek_v4"),
        example=f'<{_DSML}function_calls>\n<{_DSML}invoke name="get_weather">\n'
        f'<{_DSML}parameter name="city" string="true">Paris</{_DSML}parameter>\n'
        f'<{_DSML}parameter name="days" string="false">3</{_DSML}parameter>\n'
        f"</{_DSML}invoke>\n</{_DSML}function_calls>",
        # Its template is code, with no source to inspect: only the vocabulary shows the format.
        matches=lambda clues: _DSML in clues.template or clues.has_token(_DSML),
        grammar=_grammar,
        write=write_tags(Dsml.tags_by_marker),
        rank=10,
    ),
)
