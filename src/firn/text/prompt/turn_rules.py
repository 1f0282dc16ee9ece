"""Which turns a chat template can render: probed at load, by rendering small chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import Message, Role, TextPart, Tool, ToolCall
from firn.text.prompt.messages import TemplateStyle, to_template, tools_to_template


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What a template renders in place, without changing what precedes it. By default, everything.

    leading_system: a system message in front, which stays there as the chat grows. late_system: one
    anywhere. user_runs: two user turns in a row. tools: a list of tools. tools_alone: also in a chat
    without a system message. calls: calls and results. calls_alone: also where the request has no
    tools. several_calls: more than one call in a message. text_beside_calls: text in a message with
    calls, before them. text_before_calls: or else as a turn of its own before them.
    user_after_results: a user turn right after tool results. notes_in_results: that turn would change
    what comes before it (templates drop the thinking before a question), so a program's note belongs
    inside the result.

    What interrupted agents leave behind: assistant_runs: two turns of the assistant in a row.
    assistant_first: one before any question. no_question: no question at all. empty_answers: a turn of
    the assistant that says nothing. unanswered: a call without a result. orphans: a result without a
    call. system_alone: a system message and nothing else.
    """

    leading_system: bool = True
    late_system: bool = True
    user_runs: bool = True
    tools: bool = True
    tools_alone: bool = True
    calls: bool = True
    calls_alone: bool = True
    several_calls: bool = True
    text_beside_calls: bool = True
    text_before_calls: bool = True
    user_after_results: bool = True
    notes_in_results: bool = False
    assistant_runs: bool = True
    assistant_first: bool = True
    no_question: bool = True
    empty_answers: bool = True
    unanswered: bool = True
    orphans: bool = True
    system_alone: bool = True


def turn_rules(tokenizer: Tokenizer, style: TemplateStyle) -> TurnRules:
    """What the template of this tokenizer can render."""
    return _TemplateProbe(tokenizer, style).rules()


def _message(role: Role, text: str, *, answers: ToolCall | None = None) -> Message:
    return Message(role, (TextPart(text),), tool_call_id=answers.id if answers else None)


TOOL = Tool("lookabout", "Looks about.", {"type": "object", "properties": {}})
_FIRST = ToolCall("call00001", TOOL.name, {"at": "hazelsky"})
_OTHER = ToolCall("call00002", TOOL.name, {"at": "hazelsea"})
RULE, _LATE, _LATER = (_message("system", text) for text in ("aspenrule", "cedarlate", "yewlater"))
ASK, _AGAIN, MORE = (_message("user", text) for text in ("alderask", "rowanask", "elmask"))
ANSWER = _message("assistant", "birchanswer")
RESULT = _message("tool", "lindenresult", answers=_FIRST)
_OTHER_RESULT = _message("tool", "mapleresult", answers=_OTHER)
ANSWER_TOO = _message("assistant", "pineanswer")
CALL = Message("assistant", tool_calls=(_FIRST,))
_CALLS = Message("assistant", tool_calls=(_FIRST, _OTHER))
THOUGHT = Message("assistant", tool_calls=(_FIRST,), reasoning="oakthought")
_TOLD_CALL = replace(CALL, parts=ANSWER.parts)
_OTHER_CALL = Message("assistant", tool_calls=(_OTHER,))
_EMPTY = Message("assistant")
_WITH_CALL, _WITH_THOUGHT = (ASK, CALL, RESULT), (ASK, THOUGHT, RESULT)


class _TemplateProbe:
    """Owner: one call of `turn_rules`."""

    def __init__(self, tokenizer: Tokenizer, style: TemplateStyle) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._seen: dict[tuple[bool, tuple[int, ...]], str] = {}

    def rules(self) -> TurnRules:
        calls = self._shows(_WITH_CALL, tools=True)
        after_results = calls and self._shows((*_WITH_CALL, MORE), tools=True)
        tools = self._names_tool((ASK,)) or self._names_tool((RULE, ASK))
        text_beside_calls = calls and self._takes_text_beside_calls()
        return TurnRules(
            leading_system=self._takes_leading_system(with_calls=calls),
            late_system=self._takes_late_system(with_calls=calls),
            user_runs=self._keeps((ASK,), (MORE,), ())
            and self._keeps((ASK, ANSWER, _AGAIN), (MORE,), ()),
            tools=tools,
            tools_alone=tools and self._names_tool((ASK,)),
            calls=calls,
            calls_alone=calls and self._shows(_WITH_CALL),
            several_calls=calls and self._shows((ASK, _CALLS, RESULT, _OTHER_RESULT), tools=True),
            text_beside_calls=text_beside_calls,
            text_before_calls=text_beside_calls or (calls and self._takes_text_before_calls()),
            user_after_results=after_results,
            notes_in_results=after_results
            and not self._keeps(_WITH_THOUGHT, (MORE,), (), tools=True),
            assistant_runs=self._shows((ASK, ANSWER, ANSWER_TOO, MORE)),
            assistant_first=self._takes_assistant_first(with_calls=calls),
            no_question=self._shows((ANSWER,))
            and (not calls or self._shows((CALL, RESULT), tools=True)),
            empty_answers=self._shows((ASK, _EMPTY, MORE))
            and (not calls or self._shows((*_WITH_CALL, _EMPTY, MORE), tools=True)),
            unanswered=not calls or self._shows((ASK, CALL, MORE), tools=True),
            orphans=not calls or self._shows((ASK, RESULT, MORE), tools=True),
            system_alone=self._shows((RULE,)) and (not calls or self._shows((RULE,), tools=True)),
        )

    def _takes_leading_system(self, *, with_calls: bool) -> bool:
        chats = [((RULE, ASK), False), ((RULE, ASK, ANSWER, MORE), False)]
        if with_calls:
            chats += [((RULE, *_WITH_CALL), True), ((RULE, *_WITH_CALL, ANSWER, MORE), True)]
        return all(self._shows(chat, tools=tools) for chat, tools in chats) and self._keeps(
            (RULE, ASK), (ANSWER, MORE), ()
        )

    def _takes_assistant_first(self, *, with_calls: bool) -> bool:
        # Some templates write the first message as the question, with the tools.
        return self._shows((ANSWER, MORE)) and (
            not with_calls
            or all(self._shows(chat, tools=True) for chat in [(ANSWER, MORE), (CALL, RESULT, MORE)])
        )

    def _takes_text_beside_calls(self) -> bool:
        chat = (ASK, _TOLD_CALL, RESULT)
        ends: list[tuple[Message, ...]] = [(), (ANSWER_TOO, MORE)]
        return all(self._shows((*chat, *end), tools=True) for end in ends)

    def _takes_text_before_calls(self) -> bool:
        chat = (ASK, ANSWER, THOUGHT, RESULT)
        goes_on = (ANSWER_TOO, _OTHER_CALL, _OTHER_RESULT)
        return self._keeps(chat, goes_on, (), tools=True) and self._shows(
            (ASK, ANSWER, CALL, RESULT, ANSWER_TOO, MORE), tools=True
        )

    def _takes_late_system(self, *, with_calls: bool) -> bool:
        places = [
            ((ASK,), (_LATE,), (ANSWER, MORE)),
            ((ASK, ANSWER), (_LATE,), (MORE,)),
            ((ASK, ANSWER), (_LATE, _LATER), (MORE,)),
            ((ASK, ANSWER, MORE), (_LATE,), ()),
            ((RULE, ASK, ANSWER, MORE), (_LATE,), ()),
        ]
        if not all(self._keeps(*place) for place in places):
            return False
        ends: list[tuple[Message, ...]] = [(), (ANSWER, MORE)] if with_calls else []
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

    def _names_tool(self, chat: tuple[Message, ...]) -> bool:
        return TOOL.name in self._rendered(chat, tools=True)

    def _rendered(self, chat: tuple[Message, ...], tools: bool = False) -> str:
        """The chat's text; "" if the template refuses it."""
        key = (tools, tuple(map(id, chat)))  # messages are constants of this file
        if key not in self._seen:
            self._seen[key] = self._render(chat, tools_to_template((TOOL,)) if tools else None)
        return self._seen[key]

    def _render(self, chat: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] | None) -> str:
        tools = self._style.no_tools if tools is None else tools
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
