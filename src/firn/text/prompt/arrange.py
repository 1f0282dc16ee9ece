"""Arranges messages so that a model's template can render them. Pure.

A message stays where it was sent and changes nothing before it: a prompt that grows by a message
keeps its prefix. Only leading system messages are merged. A message that the template cannot render
in its place becomes part of the message next to it (see `TurnRules`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby, islice, takewhile

from firn.core.values import Message, MessagePart, Role, TextPart, ToolCall
from firn.text.prompt.joined_parts import JoinedParts
from firn.text.prompt.turn_rules import TurnRules

SEPARATOR = "\n\n"
LATE_SYSTEM = "<system-message>\n{}\n</system-message>"
"""How a user turn carries a later system message that the template cannot render."""

EARLIER = "(The conversation began earlier.)"
"""The first user turn of a chat that begins otherwise, if the template requires one."""
BESIDE_CALL = "<assistant-message>\n{}\n</assistant-message>"
"""How a call's result carries the text beside the call, if the template has no place for it."""
NO_RESULT = "(There is no result.)"
"""The result of an abandoned call, if the template requires one."""

_CHANGING_LINE = re.compile(
    r"^[ \t]{0,16}x-[a-z0-9-]{0,64}(?:billing|attribution)[a-z0-9-]{0,64}[ \t]{0,16}:.*(?:\r?\n|\Z)",
    re.IGNORECASE | re.MULTILINE,
)
"""Repetitions are bounded: with unbounded ones, a name of a megabyte takes quadratic time."""


def arrange(
    messages: Sequence[Message], rules: TurnRules, *, with_tools: bool = False
) -> tuple[Message, ...]:
    """The messages in a form that the template can render. with_tools: it also gets tools."""
    leading = list(takewhile(lambda m: m.role == "system", messages))
    turns = [t for m in messages[len(leading) :] for t in _place(m, rules)]
    if not rules.empty_answers:
        turns = [t for t in turns if t.role != "assistant" or t.tool_calls or t.text.strip()]
    if not rules.orphans:
        turns = _orphans_as_user_turns(turns)
    if not rules.unanswered:
        turns = _answered(turns)
    if not rules.several_calls:
        turns = _one_call_each(turns)
    if rules.calls and not (rules.text_beside_calls or rules.text_before_calls):
        turns = _text_into_results(turns)
    turns = _into_results(turns, rules)
    if not rules.user_runs:
        turns = _merge(turns, "user")
    if not rules.assistant_runs:
        turns = _merge(turns, "assistant")
    asked = any(turn.role == "user" for turn in turns)
    takes_first = rules.assistant_first and (asked or rules.no_question)
    if turns and turns[0].role != "user" and not takes_first:
        turns = [Message("user", (TextPart(EARLIER),)), *turns]
    if rules.text_before_calls and not rules.text_beside_calls:
        turns = [t for m in turns for t in _text_before_calls(m)]
    system = _merged_system(leading)
    if with_tools and not rules.tools_alone and not system:
        system = [Message("system")]
    return tuple(_with_system(system, turns, rules)) or (Message("user", (TextPart(EARLIER),)),)


def strip_changing_lines(text: str) -> str:
    """Removes the billing or attribution lines that a client changes with each request."""
    return _CHANGING_LINE.sub("", text)


# --- system messages -----------------------------------------------------------------------


def _merged_system(messages: Sequence[Message]) -> list[Message]:
    kept = []
    for message in messages:
        stripped = _map_texts(message, strip_changing_lines)
        # An empty system message is deliberate (no default prompt); one emptied by stripping isn't.
        if stripped.parts or not message.parts:
            kept.append(stripped)
    return [_join(kept)] if kept else []


def _with_system(system: list[Message], turns: list[Message], rules: TurnRules) -> list[Message]:
    """Puts the system message in front, or at the start of the first user turn."""
    if not system or (rules.leading_system and (turns or rules.system_alone)):
        return system + turns
    (first,) = system
    opening = replace(first, role="user")
    if not first.text.strip():
        return turns
    if not turns or turns[0].role != "user":
        return [opening, *turns]
    return [_join([opening, turns[0]]), *turns[1:]]


def _place(message: Message, rules: TurnRules) -> list[Message]:
    """A late system message in a form that the template can show; any other message unchanged."""
    if message.role != "system":
        return [message]
    kept = _map_texts(message, strip_changing_lines)
    if not kept.text.strip():
        return []
    if rules.late_system:
        return [kept]
    marked = TextPart(LATE_SYSTEM.format(kept.text))
    return [Message("user", (marked,), checkpoint=kept.checkpoint, aside=True)]


def _map_texts(message: Message, change: Callable[[str], str]) -> Message:
    parts: list[MessagePart] = []
    for part in message.parts:
        if not isinstance(part, TextPart):
            parts.append(part)
            continue
        text = change(part.text)
        if text == part.text:
            parts.append(part)
        elif text.strip():
            parts.append(TextPart(text))
    return replace(message, parts=tuple(parts))


# --- calls and results ---------------------------------------------------------------------


def _orphans_as_user_turns(messages: Iterable[Message]) -> list[Message]:
    """Turns results without a call into user text."""
    arranged: list[Message] = []
    called: set[str | None] = set()
    for message in messages:
        called |= {call.id for call in message.tool_calls}
        if message.role == "tool" and message.tool_call_id not in called:
            message = Message("user", message.parts, checkpoint=message.checkpoint)
        arranged.append(message)
    return arranged


def _answered(messages: Sequence[Message]) -> list[Message]:
    """Adds a result to every abandoned call; the last calls may still be waiting for theirs."""
    arranged: list[Message] = []
    abandoned: list[ToolCall] = []
    for i, message in enumerate(messages):
        if message.role != "tool":
            arranged += [_no_result(call) for call in abandoned]
            abandoned = _abandoned(messages, i) if message.tool_calls else []
        arranged.append(message)
    return arranged


def _abandoned(messages: Sequence[Message], at: int) -> list[ToolCall]:
    """The calls of the message at `at` that have no result before the assistant's next turn."""
    calls = list(messages[at].tool_calls)
    if messages[at + 1 : at + 2] and messages[at + 1].role != "tool":
        return calls
    turn = takewhile(lambda m: m.role != "assistant", islice(messages, at + 1, None))
    ids = [m.tool_call_id for m in turn if m.role == "tool"]
    answered = set(ids)
    missing = [call for call in calls if call.id not in answered]
    # A result with an unknown id also answers one of the calls.
    n_strange = max(len(ids) - (len(calls) - len(missing)), 0)
    return missing[n_strange:]


def _no_result(call: ToolCall) -> Message:
    return Message("tool", (TextPart(NO_RESULT),), tool_call_id=call.id)


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits parallel calls into single ones, each followed by its result."""
    arranged: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) < 2:
            arranged.append(message)
            continue
        results = list(takewhile(lambda m: m.role == "tool", messages[at:]))
        at += len(results)
        by_id: dict[str | None, list[Message]] = {}
        for result in results:
            by_id.setdefault(result.tool_call_id, []).append(result)
        for i, call in enumerate(message.tool_calls):
            first = message if i == 0 else Message("assistant")
            arranged.append(replace(first, tool_calls=(call,), checkpoint=False))
            arranged += by_id.pop(call.id, ())
        ids = {call.id for call in message.tool_calls}
        arranged += [r for r in results if r.tool_call_id not in ids]
    return arranged


def _text_before_calls(message: Message) -> list[Message]:
    """Makes the text beside calls a turn of its own. Reasoning stays with what it led to."""
    if not message.tool_calls or not message.text.strip():
        return [message]
    text = replace(message, tool_calls=(), reasoning=None, checkpoint=False)
    return [text, replace(message, parts=())]


def _text_into_results(messages: Iterable[Message]) -> list[Message]:
    """Moves the text beside calls to the start of the first result."""
    arranged: list[Message] = []
    for message in messages:
        calling = arranged[-1] if arranged else message
        if message.role == "tool" and calling.tool_calls and calling.text.strip():
            arranged[-1] = replace(calling, parts=())
            told = Message("tool", (TextPart(BESIDE_CALL.format(calling.text)),))
            message = replace(message, parts=_join_parts([told, message]))
        arranged.append(message)
    return arranged


def _into_results(messages: Iterable[Message], rules: TurnRules) -> list[Message]:
    """Moves a user turn that follows tool results into the last result, if it cannot stay."""
    groups: list[list[Message]] = []
    for message in messages:
        inside = not rules.user_after_results or (message.aside and rules.notes_in_results)
        if inside and message.role == "user" and groups and groups[-1][0].role == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_join(group) if len(group) > 1 else group[0] for group in groups]


# --- merging -------------------------------------------------------------------------------


def _merge(messages: Iterable[Message], side: Role) -> list[Message]:
    merged: list[Message] = []
    for role, run in groupby(messages, key=lambda m: m.role):
        group = list(run)
        merged += [_join(group)] if role == side and len(group) > 1 else group
    return merged


def _join(messages: Sequence[Message]) -> Message:
    return replace(
        messages[0],
        parts=_join_parts(messages),
        checkpoint=any(m.checkpoint for m in messages),
        tool_calls=tuple(call for m in messages for call in m.tool_calls),
        reasoning=SEPARATOR.join(m.reasoning for m in messages if m.reasoning) or None,
    )


def _join_parts(messages: Sequence[Message]) -> tuple[MessagePart, ...]:
    """All parts in order, with a blank line between texts of different messages."""
    joined = JoinedParts()
    for message in messages:
        for i, part in enumerate(message.parts):
            if i:
                joined.end_text()
            joined.add(part, between=SEPARATOR)
    return joined.result()
