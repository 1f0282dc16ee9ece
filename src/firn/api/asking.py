"""What a request asks for, held against what the server and the model can do: pure functions."""

from __future__ import annotations

from dataclasses import replace

from firn.api.services import Limits
from firn.core.errors import BadRequest, ContextTooLong
from firn.core.values import Chat, GenerateRequest, ModelInfo, Prompt, Sampling, ToolMode


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


def offers_tools(chat: Chat) -> bool:
    return bool(chat.tools) and chat.tool_choice.mode is not ToolMode.NONE


def reply_length(request: GenerateRequest, prompt: Prompt, model: ModelInfo, limits: Limits) -> int:
    # [0, n_prompt) prompt   [n_prompt, context_length) room for the reply
    room = model.context_length - len(prompt)
    if room < 1:
        raise ContextTooLong(len(prompt), model.context_length)
    if request.max_tokens is not None:
        return min(request.max_tokens, room)
    return min(limits.max_tokens, limits.max_request_tokens or room, room)


def sampling_for(model: ModelInfo, sampling: Sampling) -> Sampling:
    """A top_k that leaves every token in is no top_k."""
    return sampling if sampling.top_k < model.vocab_size else replace(sampling, top_k=0)
