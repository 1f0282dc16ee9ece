"""Makes the splitter for one reply, from the model's format and the request's tools."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls import CallParser
from firn.text.formats import ReplyFormat, opens_in_reasoning
from firn.text.parsers import ToolFormat, formats
from firn.text.parsers.whole_call import WholeCall
from firn.text.schema import ToolSchemas
from firn.text.splitter import CallMarkers, ReplySplitter, TagSplitter


def make_splitter(
    format: ReplyFormat, tools: tuple[Tool, ...], prompt_tail: str
) -> ReplySplitter | None:
    """None if the whole reply is text. Without tools, call markup is text as well."""
    tool_format = formats()[format.tool] if format.tool else None
    schemas = ToolSchemas(tools)
    if tool_format and tool_format.splitter:
        return tool_format.splitter(schemas, prompt_tail)
    calls = _call_markers(format, tool_format, schemas) if tool_format and tools else None
    if format.think is None and calls is None:
        return None
    return TagSplitter(
        format.think,
        calls,
        in_reasoning=opens_in_reasoning(prompt_tail, format.think),
    )


def _call_markers(
    format: ReplyFormat, tool_format: ToolFormat, schemas: ToolSchemas
) -> CallMarkers | None:
    native = format.native
    if tool_format.parser is WholeCall:
        if native is None:
            return None

        def make_native(marker: str, *, known_only: bool) -> CallParser:
            return WholeCall(marker, schemas, known_only=known_only, native=native)

        return CallMarkers((native.opens,), make_native)

    def make(marker: str, *, known_only: bool) -> CallParser:
        return tool_format.parser(marker, schemas, known_only=known_only)

    return CallMarkers(tool_format.opens, make, starts=tool_format.starts)
