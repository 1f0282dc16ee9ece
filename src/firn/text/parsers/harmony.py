"""Harmony, the format of gpt-oss. It shapes the whole reply, so it has a splitter of its own."""

from __future__ import annotations

from firn.core.values import Tool
from firn.text.call_grammar import CallGrammar, plain
from firn.text.harmony_splitter import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    CONTROL,
    END,
    MESSAGE,
    START,
    HarmonyCall,
    HarmonySplitter,
)
from firn.text.lark import Lark
from firn.text.parsers import Clues, ToolFormat


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
