"""What is refused before a prompt is made, where a part of the server is missing."""

from __future__ import annotations

from firn.core.errors import BadRequest
from firn.core.values import Chat, GenerateRequest, ToolMode


def refuse_constraints(request: GenerateRequest) -> None:
    """Without a grammar engine nothing can hold the model to a form: say so, rather than hope."""
    if request.grammar is not None:
        raise BadRequest(
            f"{request.grammar.param}: constrained output is not available on this server.",
            param=request.grammar.param,
        )
    source = request.source
    if isinstance(source, Chat) and source.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        raise BadRequest(
            "tool_choice: a tool call cannot be enforced on this server; use 'auto'.",
            param="tool_choice",
        )
