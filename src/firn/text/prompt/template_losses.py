"""What a chat template drops or moves as a chat grows, although firn arranges the messages: in words.

All of it is the template's own doing; a prefix that it rewrites cannot be reused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import Message
from firn.text.prompt.arrange import arrange
from firn.text.prompt.messages import to_template, tools_to_template
from firn.text.prompt.template import Template
from firn.text.prompt.turn_rules import (
    ANSWER,
    ANSWER_TOO,
    ASK,
    CALL,
    MORE,
    RESULT,
    RULE,
    THOUGHT,
    TOOL,
)

EMPTY: Mapping[str, Any] = MappingProxyType({})

TOOLS_MOVE = (
    "it writes the tools before the newest question, so each new question computes the turns since "
    "the one before again"
)
TURNS_CHANGE = (
    "it writes the turns after a question differently once there is another, so those since the "
    "question before are computed again"
)
REASONING_GOES = (
    "it leaves out reasoning once there is another question, so the turns since the question before "
    "are computed again"
)
ENDS_WITH_RULES = (
    "it writes instructions after the newest message, so each turn computes them again"
)
TEXT_MOVES = (
    "it has no place for the text that the assistant writes beside a call, so that text is put into "
    "the call's result"
)
DATE = "it writes the current date, so after midnight every chat is computed again from the start"


_DATED = re.compile(r"strftime_now\(|\+ datetime\b")
HEADER_CHARS = 100
"""No template's header of a reply is longer."""

KEEPING: Mapping[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
}
"""Template variables that keep what was thought before a question, by the names of various models."""
DATES = ("date_string", "current_date")
"""Template variables for the date, by the names of various models."""
SETS_DATE = "; a client that sends chat_template_kwargs with the same {} throughout a chat keeps it"
_DAY = "hazelday"
KEEPS = "; --default-chat-template-kwargs '{}' keeps it"


def losses(
    tokenizer: Tokenizer, template: Template, *, kwargs: Mapping[str, Any] = EMPTY
) -> tuple[str, ...]:
    """A phrase for each. kwargs: the server's own template variables."""
    probe, rules = _GrowingChats(tokenizer, template, kwargs), template.rules
    found = []
    if rules.tools and probe.moves_tools():
        found.append(TOOLS_MOVE)
    elif rules.calls and probe.changes(CALL):
        found.append(TURNS_CHANGE + probe.advice(CALL))
    elif rules.calls and probe.changes(THOUGHT):
        found.append(REASONING_GOES + probe.advice(THOUGHT))
    if rules.calls and not (rules.text_beside_calls or rules.text_before_calls):
        found.append(TEXT_MOVES)
    if probe.ends_with_rules():
        found.append(ENDS_WITH_RULES)
    if _DATED.search(tokenizer.chat_template or ""):
        variable = probe.date_variable()
        if variable not in kwargs:
            found.append(DATE + (SETS_DATE.format(variable) if variable else ""))
    return tuple(found)


class _GrowingChats:
    """Owner: one call of `losses`."""

    def __init__(self, tokenizer: Tokenizer, template: Template, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._kwargs = kwargs

    def moves_tools(self) -> bool:
        before, after = (self._text(chat) for chat in ((RULE, ASK), (RULE, ASK, ANSWER, MORE)))
        at = before.find(TOOL.name)
        return at >= 0 and after != "" and not after.startswith(before[:at])

    def ends_with_rules(self) -> bool:
        before, after = (self._text(chat) for chat in ((RULE, ASK), (RULE, ASK, ANSWER, MORE)))
        tail = before.rpartition(ASK.text)[2]
        return len(tail) > HEADER_CHARS and tail[:HEADER_CHARS] not in after.partition(MORE.text)[0]

    def changes(self, call: Message, **variable: bool) -> bool:
        """Whether a new question changes what is before the result of an earlier call."""
        loop = (RULE, ASK, call, RESULT)
        before, after = (self._text(c, variable) for c in (loop, (*loop, ANSWER_TOO, MORE)))
        at = before.find(RESULT.text)
        return at >= 0 and after != "" and not after.startswith(before[:at])

    def advice(self, call: Message) -> str:
        """How to keep what changes, if a variable of the template does."""
        for name, value in KEEPING.items():
            if not self.changes(call, **{name: value}):
                return KEEPS.format(json.dumps({name: value}))
        return ""

    def date_variable(self) -> str:
        """The variable by which a client sets the date; "" if there is none."""
        return next((v for v in DATES if _DAY in self._text((ASK,), {v: _DAY})), "")

    def _text(self, chat: Sequence[Message], variable: Mapping[str, bool | str] = EMPTY) -> str:
        arranged = arrange(chat, self._template.rules, with_tools=True)
        messages = to_template(arranged, style=self._template.style)
        tools: Sequence[Mapping[str, Any]] = tools_to_template((TOOL,))
        try:
            return self._tokenizer.render(
                messages, tools=tools, kwargs={**self._kwargs, **variable}
            )
        except TemplateFailed:
            return ""
