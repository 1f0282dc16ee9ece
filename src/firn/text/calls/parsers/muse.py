"""Muse: a message to each function, with the call in tags of its own; reasoning is a message to itself.

 to=self<|message|>...<|eom|>                                                   reasoning
<|start|>assistant to=NAME<|message|><atem:function_calls>...<|eom|>            a call
<|start|>assistant to=user<|message|>...<|eot|>                                 text
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from firn.core.values import Tool
from firn.text.calls.call_parser import CallParser, Script
from firn.text.calls.parsers import ToolFormat
from firn.text.calls.parsers.minimax import invocation
from firn.text.calls.tag_calls import CallTags, TagCallParser, write_tags
from firn.text.grammar.call_grammar import CallGrammar, plain
from firn.text.grammar.lark import Lark
from firn.text.grammar.tag_grammar import calls_in_tags
from firn.text.reply.channel_splitter import ChannelSplitter, Kind

START, MESSAGE, END, LAST_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
SECTION, SECTION_END = "<atem:function_calls>", "</atem:function_calls>"
_NEXT = f"{END}{START}assistant"
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class MuseCall(TagCallParser):
    """The body of a message to a function."""

    tags_by_marker: ClassVar[Mapping[str, CallTags]] = {SECTION: invocation(SECTION_END, "atem:")}

    def script(self) -> Script[None]:
        yield from self.tape.skip()
        yield from self.tape.expect(SECTION)
        self.marker = SECTION
        yield from super().script()

    def checked(self, name: str) -> str:
        """A function without a namespace may be written as one in a namespace of its name."""
        name = super().checked(name)
        function = name.rpartition(".")[2]
        is_doubled = name == f"{function}.{function}" and name not in self.schemas
        return function if is_doubled and function in self.schemas else name


class MuseSplitter(ChannelSplitter):
    header_end = MESSAGE
    starts = (START, "to=", MESSAGE, END, LAST_END)
    openers = (START,)
    body_ends = (END, LAST_END)

    def next_headers(self) -> tuple[str, ...]:
        """The model may leave its reasoning without a word: the recipient shows where."""
        tools = [tool.name for tool in self.schemas.tools]
        names = ("self", "user", *tools, *(f"{name}.{name}" for name in tools))
        return (START, *(f" to={name}{MESSAGE}" for name in names))

    def body(self, header: str) -> Kind | CallParser:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        if recipient[1] == "self":
            return "reasoning"
        return MuseCall("", self.schemas) if self.schemas.tools else "text"


def _grammar(g: CallGrammar) -> str:
    ((opening, tags),) = MuseCall.tags_by_marker.items()

    def write(tool: Tool) -> str:
        head = g.lark.mark(f" to={plain(tool.name, tool.param)}{MESSAGE}")
        return f"{head} {calls_in_tags(replace(g, tools=(tool,), parallel=False), tags, opening)}"

    return g.several(g.each(write), _NEXT)


def _reply(lark: Lark, calls: str | None, answer: str | None) -> str:
    """Any reasoning, then what was asked for, to whom it may concern."""
    thought = lark.mark(f" to=self{MESSAGE}")
    thought = lark.rule(f"{thought} {lark.text_before(END)} {lark.mark(START + 'assistant')}")
    final = f"{lark.mark(f' to=user{MESSAGE}')} {answer}" if answer else None
    return f"{thought}* ({' | '.join(filter(None, (calls, final)))})"


def _write(name: str, arguments: Mapping[str, Any]) -> str:
    return f" to={name}{MESSAGE}{write_tags(MuseCall.tags_by_marker)(name, arguments)}"


FORMATS = (
    ToolFormat(
        name="muse",
        parser=MuseCall,
        splitter=MuseSplitter,
        opens=(),
        tokens=(START, MESSAGE, END, LAST_END),
        aliases=("muse_glimmer", "muse_spark", "atem"),
        example=f' to=get_weather{MESSAGE}{SECTION}\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n'
        f"</atem:invoke>\n{SECTION_END}",
        matches=lambda clues: SECTION in clues.template,
        grammar=_grammar,
        reply=_reply,
        closing=f"{_NEXT} to=user{MESSAGE}",
        write=_write,
        rank=20,
    ),
)
