"""What a reply is held to: the answer's format, a tool call, or either, after any reasoning. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from firn.core.errors import BadRequest, InvalidValue
from firn.core.ports import Tokenizer
from firn.core.values import Chat, GenerateRequest, Grammar, ToolMode
from firn.text.call_grammar import CallGrammar
from firn.text.formats import ReplyFormat, opens_in_reasoning, tokens_of
from firn.text.lark import Lark
from firn.text.parsers import ToolFormat, formats

BLANK = r"/\n{0,2}/"
"""What parts reasoning from the answer."""


def constraint(
    request: GenerateRequest, *, format: ReplyFormat, tokenizer: Tokenizer, prompt_tail: str
) -> Grammar | None:
    """The grammar of all that the model may write; None for anything. Raises BadRequest."""
    chat = request.source if isinstance(request.source, Chat) else None
    if chat is None:
        return request.grammar
    mode = chat.tool_choice.mode
    must_call = mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if request.grammar is None and not must_call:
        return None
    known = formats()[format.tool] if format.tool else None
    lark = Lark(tokenizer, _control(format, known))
    answer = None if must_call else request.grammar
    param = "tool_choice" if answer is None else answer.param
    calls = None
    if must_call and not chat.tools:
        raise InvalidValue("tool_choice", "there are no tools to choose from")
    if chat.tools and mode is not ToolMode.NONE:
        calls = _calls(chat, known, lark, tokenizer.chat_template or "", param)
    if known and known.reply:
        part = lark.part(answer) if answer else None
        return lark.grammar(known.reply(lark, calls, part), param=param)
    lead = _reasoning(lark, format, prompt_tail, request.reasoning.enabled is not False)
    if answer is not None and not lead and not calls:
        return answer
    either = [calls] if calls else []
    if answer is not None:
        either.append(lark.part(answer))
    return lark.grammar(f"{lead} ({' | '.join(either)})", param=param)


def _control(format: ReplyFormat, known: ToolFormat | None) -> Iterator[str]:
    if known:
        yield from known.tokens
    if format.think:
        yield from tokens_of(format.think)


def _calls(chat: Chat, known: ToolFormat | None, lark: Lark, template: str, param: str) -> str:
    """param: what asks for calls of a sure form."""
    if known is None or known.grammar is None:
        which = (
            f"The tool-call format {known.name!r}" if known else "This model's way to call tools"
        )
        raise BadRequest(f"{param}: {which} has no grammar to hold the model to.", param=param)
    named = chat.tool_choice.name if chat.tool_choice.mode is ToolMode.NAMED else None
    tools = [
        (f"tools[{i}]", tool) for i, tool in enumerate(chat.tools) if named in (None, tool.name)
    ]
    if not tools:
        raise InvalidValue("tool_choice", f"no tool is named {named!r}")
    return known.grammar(
        CallGrammar(
            lark=lark,
            tools=tuple(tools),
            parallel=chat.tool_choice.parallel,
            template=template,
        )
    )


def _reasoning(lark: Lark, format: ReplyFormat, prompt_tail: str, may_think: bool) -> str:
    """What may come before the constrained part: nothing, reasoning, or the rest of it."""
    think = format.think
    if think is None or prompt_tail.rstrip().endswith(think.close):
        return ""
    if opens_in_reasoning(prompt_tail, think):
        return f"{lark.text_before(think.close)} {BLANK}"
    if not may_think:
        return ""
    return f"({lark.mark(think.open)} {lark.text_before(think.close)} {BLANK})?"
