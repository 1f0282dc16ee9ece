"""What a reply must look like: the answer's format, a tool call, either, or text without calls. Pure.

Reasoning may come before any of these. Where the model is free to answer or to call, there is a
grammar only if a tool needs one: because it is strict, accepts a text of a certain form, or may not
be called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firn.core.errors import BadRequest, InvalidValue
from firn.core.ports import Tokenizer
from firn.core.values import Chat, GenerateRequest, Grammar, RelaxedSchema, Tool, ToolMode
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.lark import Lark, TextSymbol
from firn.text.reply.formats import ReplyFormat, opens_in_reasoning, tokens_of

EVERYTHING = "#"
"""The place of a schema that is not enforced at all."""
BLANK = r"/\n{0,2}/"
"""Between reasoning and the answer."""

Relax = Callable[[Sequence[Mapping[str, Any]]], Sequence[RelaxedSchema]]
"""Reduces schemas to what can be enforced."""


def as_they_are(schemas: Sequence[Mapping[str, Any]]) -> Sequence[RelaxedSchema]:
    return [RelaxedSchema(schema) for schema in schemas]


@dataclass(frozen=True, slots=True)
class ReplyConstraint:
    """grammar: what the whole reply must match; None: anything goes. left_out: places in the request
    that the grammar does not enforce."""

    grammar: Grammar | None = None
    left_out: tuple[str, ...] = ()


def constraint(
    request: GenerateRequest,
    *,
    format: ReplyFormat,
    tokenizer: Tokenizer,
    prompt_tail: str,
    relax: Relax = as_they_are,
) -> ReplyConstraint:
    """The constraint that a request puts on its reply. Raises BadRequest."""
    answer, left_out = _enforceable(request.grammar, relax)
    if not isinstance(request.source, Chat):
        return ReplyConstraint(answer, tuple(param + place for param, place in left_out))
    writer = _ConstraintWriter(
        replace(request, grammar=answer),
        request.source,
        format=format,
        tokenizer=tokenizer,
        prompt_tail=prompt_tail,
        relax=relax,
    )
    writer.lark.left_out += left_out
    return writer.constraint()


def _enforceable(
    answer: Grammar | None, relax: Relax
) -> tuple[Grammar | None, list[tuple[str, str]]]:
    """The answer's form as far as it can be enforced, and the (parameter, place) of what was left out.
    A schema with other faults stays as it is: compiling it says what they are."""
    if answer is None or answer.kind != "json_schema":
        return answer, []
    [relaxed] = relax([json.loads(answer.text)])
    if relaxed.faulty or EVERYTHING in relaxed.left_out:
        return answer, []
    if answer.strict and relaxed.left_out:
        raise InvalidValue(
            answer.param,
            f"{relaxed.left_out[0]} cannot be enforced, and the schema is strict;"
            " remove it from the schema, or strict from the request",
        )
    left_out = [(answer.param, place) for place in relaxed.left_out]
    return replace(answer, text=json.dumps(relaxed.schema)), left_out


class _ConstraintWriter:
    """Owner: one call of `constraint`."""

    def __init__(
        self,
        request: GenerateRequest,
        chat: Chat,
        *,
        format: ReplyFormat,
        tokenizer: Tokenizer,
        prompt_tail: str,
        relax: Relax,
    ) -> None:
        self._request = request
        self._chat = chat
        self._format = format
        self._template = tokenizer.chat_template or ""
        self._tail = prompt_tail
        self._relax = relax
        self._tool_format = formats()[format.tool] if format.tool else None
        self.lark = Lark(tokenizer, _control_tokens(format, self._tool_format))

    def constraint(self) -> ReplyConstraint:
        choice, answer = self._chat.tool_choice, self._request.grammar
        tools = [tool for tool in self._chat.tools if choice.permits(tool)]
        if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
            if not self._chat.tools:
                raise InvalidValue(
                    "tool_choice", "there are no tools to choose from; send tools, or leave it out"
                )
            if not tools:
                raise InvalidValue("tool_choice", f"no tool is named {choice.name!r}")
            return self._result(self._calls(tools, "tool_choice"), None, param="tool_choice")
        if answer is not None:
            calls = self._calls(tools, answer.param) if tools else None
            return self._result(calls, answer, param=answer.param)
        if not self._chat.tools or self._tool_format is None:
            return ReplyConstraint()
        if not tools:
            return self._result(None, self._text(), param="tool_choice")
        if len(tools) < len(self._chat.tools) or any(t.strict or t.grammar for t in tools):
            return self._either(tools)
        return ReplyConstraint()

    def _either(self, tools: Sequence[Tool]) -> ReplyConstraint:
        """Text, or text and calls of these tools."""
        text = self._text()
        try:
            calls = self._calls(tools, "tools", before=text)
        except BadRequest as e:
            if any(tool.strict for tool in tools):
                raise
            return ReplyConstraint(left_out=(e.message,))
        return self._result(calls, text, param="tools")

    def _text(self) -> TextSymbol:
        tool_format, native = self._tool_format, self._format.native
        assert tool_format is not None
        names = [tool.name for tool in self._chat.tools]
        markers = [
            *tool_format.opens,
            *([native.opens] if native and not tool_format.opens else []),
        ]
        patterns = [tool_format.bare(names)] if tool_format.bare else []
        return self.lark.text_without([m for m in markers if m], patterns=patterns)

    def _calls(self, tools: Sequence[Tool], param: str, *, before: TextSymbol | None = None) -> str:
        """param: the request parameter that needs calls to be enforced."""
        tool_format = self._tool_format
        if tool_format is None or tool_format.grammar is None:
            name = f" {tool_format.name!r}" if tool_format else ""
            raise BadRequest(
                f"{param}: this model's call format{name} has no grammar, so calls cannot be enforced.",
                param=param,
            )
        return tool_format.grammar(
            CallGrammar(
                lark=self.lark,
                tools=self._relax_tools(tools),
                parallel=self._chat.tool_choice.parallel,
                template=self._template,
                before=None if tool_format.splitter else before,
            )
        )

    def _relax_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        every = self._relax([tool.parameters for tool in tools])
        for tool, relaxed in zip(tools, every, strict=True):
            for place in (*relaxed.left_out, *relaxed.faulty):
                self.lark.leave_out(tool.param, place)
        return tuple(
            replace(tool, parameters=relaxed.schema)
            for tool, relaxed in zip(tools, every, strict=True)
        )

    def _result(
        self, calls: str | None, answer: Grammar | TextSymbol | None, *, param: str
    ) -> ReplyConstraint:
        lark, tool_format = self.lark, self._tool_format
        strict = {tool.param for tool in self._chat.tools if tool.strict}
        for owner, place in lark.left_out:
            if owner in strict:
                raise InvalidValue(
                    owner,
                    f"{place} cannot be enforced, and the tool is strict;"
                    " remove it from the schema, or strict from the tool",
                )
        left_out = tuple(dict.fromkeys(f"{owner}{place}" for owner, place in lark.left_out))
        text = answer if isinstance(answer, TextSymbol) else None
        part = text.symbol if text else None
        if isinstance(answer, Grammar):
            part = lark.part(answer)
        if tool_format and tool_format.reply:
            return ReplyConstraint(
                lark.grammar(tool_format.reply(lark, calls, part), param=param), left_out
            )
        lead = self._reasoning(text)
        if isinstance(answer, Grammar) and not lead and not calls:
            return ReplyConstraint(answer, left_out)
        either = " | ".join(filter(None, (calls, part)))
        return ReplyConstraint(lark.grammar(f"{lead} ({either})", param=param), left_out)

    def _reasoning(self, text: TextSymbol | None) -> str:
        """What may precede the constrained part: nothing, reasoning, or the rest of reasoning."""
        think, lark = self._format.think, self.lark
        like = text if text and text.is_terminal else None
        if think is None or self._tail.rstrip().endswith(think.close):
            return ""
        if opens_in_reasoning(self._tail, think):
            return f"{lark.text_before(think.close, like=like)} {BLANK}"
        if self._request.reasoning.enabled is False:
            return ""
        return f"({lark.mark(think.open)} {lark.text_before(think.close, like=like)} {BLANK})?"


def _control_tokens(format: ReplyFormat, tool_format: ToolFormat | None) -> Iterator[str]:
    if tool_format:
        yield from tool_format.tokens
    if format.think:
        yield from tokens_of(format.think)
