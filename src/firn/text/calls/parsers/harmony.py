"""Harmony, the format of gpt-oss. It shapes the whole reply, so it has a splitter of its own."""

from __future__ import annotations

import re

from firn.core.values import Tool
from firn.text.calls.call_parser import CallParser, Script
from firn.text.calls.json_calls import JsonCallParser, JsonTape
from firn.text.calls.parsers import Clues, ToolFormat
from firn.text.calls.schema import ToolSchemas
from firn.text.grammar.call_grammar import CallGrammar, plain
from firn.text.grammar.lark import Lark
from firn.text.reply.channel_splitter import ChannelSplitter, Kind

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROL = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyCall(JsonCallParser):
    """The body of a message to a function: its arguments."""

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = False) -> None:
        self._function = marker
        super().__init__("", schemas, known_only=known_only)

    def script(self) -> Script[None]:
        self.start(self._function)
        char = yield from JsonTape(self.tape).next_char()
        if not char:
            self.arguments("{}")
            return
        yield from self.guarded(self.stream_arguments())


class HarmonySplitter(ChannelSplitter):
    header_end = MESSAGE
    starts = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=", END, CALL, RETURN)
    openers = (START, CHANNEL)
    body_ends = (END, CALL, RETURN)

    def body(self, header: str) -> Kind | CallParser:
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].lstrip()
        name = recipient[1] if recipient else ""
        is_function = name.startswith(_FUNCTIONS) or name in self.schemas
        if is_function and self.schemas.tools:
            return HarmonyCall(name.removeprefix(_FUNCTIONS), self.schemas)
        return "reasoning" if channel.startswith("analysis") else "text"


def _matches(clues: Clues) -> bool:
    return (CHANNEL in clues.template and MESSAGE in clues.template) or all(
        map(clues.has_token, (CHANNEL, MESSAGE, CALL))
    )


def _grammar(g: CallGrammar) -> str:
    """One call: a message to a function ends the reply."""

    def write(tool: Tool) -> str:
        name = plain(tool.name, tool.param)
        head = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
        return f"{g.lark.mark(head)} {g.arguments(tool)}"

    end = "" if g.lark.ends_reply(CALL) else g.lark.mark(CALL)
    return f"{g.each(write)} {end}"


def _reply(lark: Lark, calls: str | None, answer: str | None) -> str:
    """Any reasoning, then what was asked for, on its channel."""
    thought = lark.mark(f"{CHANNEL}analysis{MESSAGE}")
    thought = lark.rule(f"{thought} {lark.text_before(END)} {lark.mark(START + 'assistant')}")
    final = f"{lark.mark(f'{CHANNEL}final{MESSAGE}')} {answer}" if answer else None
    return f"{thought}* ({' | '.join(filter(None, (calls, final)))})"


FORMATS = (
    ToolFormat(
        name="harmony",
        parser=HarmonyCall,
        splitter=HarmonySplitter,
        opens=(),
        tokens=CONTROL,
        aliases=("gpt_oss", "openai"),
        example=f"{CHANNEL}commentary to=functions.get_weather <|constrain|>json{MESSAGE}"
        f'{{"city": "Paris", "days": 3}}{CALL}',
        matches=_matches,
        grammar=_grammar,
        reply=_reply,
        closing=f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
        rank=20,
    ),
)
