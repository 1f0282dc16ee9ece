"""The router for one reply: what the model's format and the request's tools call for."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.calls import CallParser
from firn.text.formats import ReplyFormat, opens_in_reasoning
from firn.text.parsers import ToolFormat, formats
from firn.text.parsers.whole_call import WholeCall
from firn.text.router import CallMarkers, Router, TagRouter
from firn.text.schema import Toolbox


def make_router(format: ReplyFormat, tools: tuple[Tool, ...], prompt_tail: str) -> Router | None:
    """None where the whole reply is text. Without tools, the markup of calls is text too."""
    known = formats()[format.tool] if format.tool else None
    toolbox = Toolbox(tools)
    if known and known.router:
        return known.router(toolbox, prompt_tail)
    calls = _call_markers(format, known, toolbox) if known and tools else None
    if format.think is None and calls is None:
        return None
    return TagRouter(
        format.think,
        calls,
        in_reasoning=opens_in_reasoning(prompt_tail, format.think),
        drop=format.drop,
    )


def _call_markers(format: ReplyFormat, known: ToolFormat, toolbox: Toolbox) -> CallMarkers | None:
    native = format.native
    if known.parser is WholeCall:
        if native is None:
            return None

        def make_native(marker: str, *, known_only: bool) -> CallParser:
            return WholeCall(marker, toolbox, known_only=known_only, native=native)

        return CallMarkers((native.opens,), make_native)

    def make(marker: str, *, known_only: bool) -> CallParser:
        return known.parser(marker, toolbox, known_only=known_only)

    return CallMarkers(known.opens, make, starts=known.starts)
