"""Which turns a chat template can render: probed at load, by rendering small chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import Message, Role, TextPart, Tool, ToolCall
from firn.text.messages import TemplateStyle, to_template, tools_to_template


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What a template renders in place, without changing what precedes it. By default, everything.

    leading_system: a system message in front. late_system: one anywhere. user_runs: two user turns in
    a row. tools: a list of tools. calls: calls and results. several_calls: more than one call in a
    message. user_after_results: a user turn right after tool results. notes_in_results: that turn
    would change what comes before it (templates drop the thinking before a question), so a program's
    note belongs inside the result.

    What interrupted agents leave behind: assistant_runs: two turns of the assistant in a row.
    assistant_first: one before any question. unanswered: a call without a result. orphans: a result
    without a call. system_alone: a system message and nothing else.
    """

    leading_system: bool = True
    late_system: bool = True
    user_runs: bool = True
    tools: bool = True
    calls: bool = True
    several_calls: bool = True
    user_after_results: bool = True
    notes_in_results: bool = False
    assistant_runs: bool = True
    assistant_first: bool = True
    unanswered: bool = True
    orphans: bool = True
    system_alone: bool = True


def turn_rules(tokenizer: Tokenizer, style: TemplateStyle) -> TurnRules:
    """What the template of this tokenizer can render."""
    return _TemplateProbe(tokenizer, style).rules()


def _message(role: Role, text: str, *, answers: ToolCall | None = None) -> Message:
    return Message(role, (TextPart(text),), tool_call_id=answers.id if answers else None)


_TOOL = Tool("lookabout", "Looks about.", {"type": "object", "properties": {}})
_FIRST = ToolCall("call00001", _TOOL.name, {"at": "hazelsky"})
_OTHER = ToolCall("call00002", _TOOL.name, {"at": "hazelsea"})
_RULE, _LATE, _LATER = (_message("system", text) for text in ("aspenrule", "cedarlate", "yewlater"))
_ASK, _AGAIN, _MORE = (_message("user", text) for text in ("alderask", "rowanask", "elmask"))
_ANSWER = _message("assistant", "birchanswer")
_RESULT = _message("tool", "lindenresult", answers=_FIRST)
_OTHER_RESULT = _message("tool", "mapleresult", answers=_OTHER)
_ANSWER_TOO = _message("assistant", "pineanswer")
_CALL = Message("assistant", tool_calls=(_FIRST,))
_CALLS = Message("assistant", tool_calls=(_FIRST, _OTHER))
_THOUGHT = Message("assistant", tool_calls=(_FIRST,), reasoning="oakthought")
_WITH_CALL, _WITH_THOUGHT = (_ASK, _CALL, _RESULT), (_ASK, _THOUGHT, _RESULT)


class _TemplateProbe:
    """Owner: one call of `turn_rules`."""

    def __init__(self, tokenizer: Tokenizer, style: TemplateStyle) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._seen: dict[tuple[bool, tuple[int, ...]], str] = {}

    def rules(self) -> TurnRules:
        leading = self._shows((_RULE, _ASK))
        calls = self._shows(_WITH_CALL, tools=True)
        after_results = calls and self._shows((*_WITH_CALL, _MORE), tools=True)
        return TurnRules(
            leading_system=leading,
            late_system=self._takes_late_system(with_calls=calls),
            user_runs=self._keeps((_ASK,), (_MORE,), ())
            and self._keeps((_ASK, _ANSWER, _AGAIN), (_MORE,), ()),
            tools=_TOOL.name in self._rendered((_ASK,), tools=True),
            calls=calls,
            several_calls=calls and self._shows((_ASK, _CALLS, _RESULT, _OTHER_RESULT), tools=True),
            user_after_results=after_results,
            notes_in_results=after_results
            and not self._keeps(_WITH_THOUGHT, (_MORE,), (), tools=True),
            assistant_runs=self._shows((_ASK, _ANSWER, _ANSWER_TOO, _MORE)),
            assistant_first=self._shows((_ANSWER, _MORE))
            and (not calls or self._shows((_ANSWER, _MORE), tools=True)),
            unanswered=not calls or self._shows((_ASK, _CALL, _MORE), tools=True),
            orphans=not calls or self._shows((_ASK, _RESULT, _MORE), tools=True),
            system_alone=self._shows((_RULE,)) and (not calls or self._shows((_RULE,), tools=True)),
        )

    def _takes_late_system(self, *, with_calls: bool) -> bool:
        places = [
            ((_ASK,), (_LATE,), (_ANSWER, _MORE)),
            ((_ASK, _ANSWER), (_LATE,), (_MORE,)),
            ((_ASK, _ANSWER), (_LATE, _LATER), (_MORE,)),
            ((_ASK, _ANSWER, _MORE), (_LATE,), ()),
            ((_RULE, _ASK, _ANSWER, _MORE), (_LATE,), ()),
        ]
        if not all(self._keeps(*place) for place in places):
            return False
        ends: list[tuple[Message, ...]] = [(), (_ANSWER, _MORE)] if with_calls else []
        return all(self._keeps(_WITH_THOUGHT, (_LATE,), end, tools=True) for end in ends)

    def _keeps(
        self,
        before: tuple[Message, ...],
        late: tuple[Message, ...],
        after: tuple[Message, ...],
        *,
        tools: bool = False,
    ) -> bool:
        """Whether `late` is shown in its place and changes nothing before it."""
        chat = (*before, *late, *after)
        text, without = self._rendered(chat, tools), self._rendered((*before, *after), tools)
        if not without or not self._shows(chat, tools=tools):
            return False
        last = _texts(before[-1:])[-1]
        end = text.find(last) + len(last)
        return text[:end] == without[:end]

    def _shows(self, chat: tuple[Message, ...], *, tools: bool = False) -> bool:
        """Whether the rendered chat has the text of every message, in order."""
        text = self._rendered(chat, tools)
        at = 0
        for words in _texts(chat):
            at = text.find(words, at)
            if at < 0:
                return False
            at += len(words)
        return True

    def _rendered(self, chat: tuple[Message, ...], tools: bool = False) -> str:
        """The chat's text; "" if the template refuses it."""
        key = (tools, tuple(map(id, chat)))  # messages are constants of this file
        if key not in self._seen:
            self._seen[key] = self._render(chat, tools_to_template((_TOOL,)) if tools else None)
        return self._seen[key]

    def _render(self, chat: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] | None) -> str:
        try:
            messages = to_template(chat, style=self._style)
            return self._tokenizer.render(messages, tools=tools, kwargs={})
        except TemplateFailed:
            return ""


def _texts(chat: Sequence[Message]) -> list[str]:
    """The texts of messages and the arguments of calls, in order. Templates may leave reasoning out."""
    texts = []
    for message in chat:
        texts += [message.text] if message.text else []
        for call in message.tool_calls:
            texts += call.arguments.values() if isinstance(call.arguments, Mapping) else ()
    return texts
