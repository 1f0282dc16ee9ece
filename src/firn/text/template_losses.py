"""What a chat template drops or moves as a chat grows, although firn arranges the messages: in words.

All of it is the template's own doing; a prefix that it rewrites cannot be reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import Message
from firn.text.arrange import arrange
from firn.text.messages import to_template, tools_to_template
from firn.text.template import Template
from firn.text.turn_rules import (
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
TEXT_GOES = (
    "it drops the text that the assistant writes beside a call, or moves it behind the result"
)
DATE = "it writes the current date, so after midnight every chat is computed again from the start"


KEEPING: Mapping[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
}
"""Template variables that keep what was thought before a question, by the names of various models."""
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
        found.append(TEXT_GOES)
    if "strftime_now(" in (tokenizer.chat_template or ""):
        found.append(DATE)
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

    def _text(self, chat: Sequence[Message], variable: Mapping[str, bool] = EMPTY) -> str:
        arranged = arrange(chat, self._template.rules, with_tools=True)
        messages = to_template(arranged, style=self._template.style)
        tools: Sequence[Mapping[str, Any]] = tools_to_template((TOOL,))
        try:
            return self._tokenizer.render(
                messages, tools=tools, kwargs={**self._kwargs, **variable}
            )
        except TemplateFailed:
            return ""
