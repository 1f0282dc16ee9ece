"""What a chat template expects and can do: read once per model, from its source and by rendering."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import EFFORTS, Message, PicturePart, TextPart, Tool, ToolCall
from firn.text.prompt.messages import TemplateStyle, normalize_calls, to_template, tools_to_template
from firn.text.prompt.turn_rules import TurnRules, turn_rules

MESSAGE_OPENERS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<|header_start|>",
    "<start_of_turn>",
    "<|turn>",
    "[INST]",
    "[SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "<|start|>",
    "<|start_of_role|>",
    "<|START_OF_TURN_TOKEN|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|tool|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<role>",
    "[|system|]",
    "[|user|]",
    "[|assistant|]",
    "]~b]",
)
"""Tokens known to begin a message. Others are found by rendering a small chat."""

_ALPHA, _BETA, _GAMMA, _DELTA, _EPSILON = "alpha", "beta", "gamma", "delta", "epsilon"

REASONING_FIELDS: Sequence[Mapping[str, Any]] = (
    {"reasoning_key": "reasoning_content"},
    {"reasoning_key": "reasoning"},
    {"reasoning_key": "thinking"},
    {"reasoning_parts": True},
)
"""Where templates look for reasoning, the commonest first."""
_WRITTEN_PART = re.compile(r"""['"]thinking['"]""")
"""A template that takes no parts writes the list itself."""


_JSON = re.compile(r'"input":\s*"delta"')
_NO_JSON = re.compile(r"""'input':\s*'delta'|\\"input\\":""")
"""Arguments as Python writes an object, or as JSON in a JSON string."""

_NAMED = r"(?:\.{0}\b|\[['\"]{0}['\"]\])"
"""Access to a field: message.content, message['content']."""


@dataclass(frozen=True, slots=True)
class Template:
    """What is known of a chat template. openers: ids of the tokens that begin a message."""

    style: TemplateStyle
    rules: TurnRules
    openers: tuple[int, ...]

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> Template:
        style = replace(read_style(tokenizer.chat_template or ""), lists=_wants_lists(tokenizer))
        style = _with_reasoning(tokenizer, _probe(tokenizer, style))
        return cls(style, turn_rules(tokenizer, style), openers(tokenizer))


def shows_pictures_in_results(tokenizer: Tokenizer, template: Template, placeholder: str) -> bool:
    """Whether the template shows a picture in a tool's result."""
    call = Message("assistant", tool_calls=(ToolCall("call00001", _ALPHA, {}),))
    seen = Message("tool", (PicturePart(""),), tool_call_id="call00001")
    chat = (Message("user", (TextPart(_BETA),)), call, seen)
    tools = tools_to_template((Tool(_ALPHA),))
    try:
        text = tokenizer.render(to_template(chat, style=template.style), tools=tools, kwargs={})
    except TemplateFailed:
        return False
    return placeholder in text


def _wants_lists(tokenizer: Tokenizer) -> bool:
    """Whether the template drops text that is not in a list of parts, as LLaVA's does."""

    def shows(content: Any) -> bool:
        try:
            chat = [{"role": "user", "content": content}]
            return _ALPHA in tokenizer.render(chat, tools=None, kwargs={})
        except TemplateFailed:
            return False

    return not shows(_ALPHA) and shows([{"type": "text", "text": _ALPHA}])


def _probe(tokenizer: Tokenizer, style: TemplateStyle) -> TemplateStyle:
    """The style with what shows a call, wherever the template fails without it or drops the call."""

    def rendered(
        call: ToolCall, style: TemplateStyle, tools: Sequence[Tool] = (Tool(_ALPHA),)
    ) -> str:
        result = Message("tool", (TextPart(_BETA),), tool_call_id=call.id)
        asked = Message("user", (TextPart(_GAMMA),))
        chat = (asked, Message("assistant", tool_calls=(call,)), result)
        given = tools_to_template(tools) or style.no_tools
        try:
            messages = to_template(normalize_calls(chat, style), style=style)
            return tokenizer.render(messages, tools=given, kwargs={})
        except TemplateFailed:
            return ""

    def shows(
        call: ToolCall, style: TemplateStyle, tools: Sequence[Tool] = (Tool(_ALPHA),)
    ) -> bool:
        return _DELTA in rendered(call, style, tools)

    call = ToolCall("call00001", _ALPHA, {"input": _DELTA})
    short, long = (replace(call, id=id) for id in ("call_1", "chatcmpl-tool-0123456789abcdef"))
    text = replace(call, arguments=_DELTA)

    def all_ids(style: TemplateStyle) -> bool:
        return shows(short, style) and shows(long, style)

    other_content = replace(style, none_content=not style.none_content)
    if not shows(call, style) and shows(call, other_content):
        style = other_content
    other_arguments = replace(style, text_arguments=not style.text_arguments)
    if _NO_JSON.search(rendered(call, style)) and _JSON.search(rendered(call, other_arguments)):
        style = other_arguments
    if not all_ids(style) and all_ids(replace(style, short_ids=True)):
        style = replace(style, short_ids=True)
    if not shows(text, style) and shows(text, replace(style, object_arguments=True)):
        style = replace(style, object_arguments=True)
    if not shows(call, style, ()) and shows(call, replace(style, empty_tools=True), ()):
        style = replace(style, empty_tools=True)
    return style


def _with_reasoning(tokenizer: Tokenizer, style: TemplateStyle) -> TemplateStyle:
    """The style by which reasoning is shown, in a turn that calls a tool or else in an answer."""
    asked = Message("user", (TextPart(_ALPHA),))
    call = ToolCall("call00001", _BETA, {"input": _GAMMA})
    calls = Message("assistant", tool_calls=(call,), reasoning=_EPSILON)
    answers = Message("assistant", (TextPart(_DELTA),), reasoning=_EPSILON)
    result = Message("tool", (TextPart(_DELTA),), tool_call_id=call.id)
    tools = tools_to_template((Tool(_BETA),))

    def shows(style: TemplateStyle) -> bool:
        chats = ((asked, calls, result), tools), ((asked, answers), style.no_tools)
        for chat, given in chats:
            messages = to_template(normalize_calls(chat, style), style=style)
            with suppress(TemplateFailed):
                text = tokenizer.render(messages, tools=given, kwargs={})
                if _EPSILON in text and not _WRITTEN_PART.search(text):
                    return True
        return False

    styles = (replace(style, **fields) for fields in REASONING_FIELDS)
    return next(filter(shows, styles), style)


def keeps_header(tokenizer: Tokenizer, style: TemplateStyle, kwargs: Mapping[str, Any]) -> bool:
    """Whether the next turn's prompt begins with all of this one's, including the reply's header.

    It does not where the header opens reasoning, or closes empty reasoning, that history leaves out.
    """
    question = Message("user", (TextPart(_ALPHA),))
    later = (Message("assistant", (TextPart(_BETA),)), Message("user", (TextPart(_GAMMA),)))
    try:
        now, then = (
            tokenizer.render(to_template(chat, style=style), tools=None, kwargs=kwargs)
            for chat in ((question,), (question, *later))
        )
    except TemplateFailed:
        return False
    return then.startswith(now)


def reasoning_kwargs(enabled: bool | None, effort: str | None) -> dict[str, Any]:
    """Template variables by the names that templates use for them."""
    kwargs: dict[str, Any] = {}
    if enabled is not None:
        kwargs["enable_thinking"] = kwargs["thinking"] = enabled
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    return kwargs


def nearest_effort(
    tokenizer: Tokenizer, style: TemplateStyle, effort: str, *, enabled: bool | None
) -> str:
    """The effort, or the nearest that the template takes: of two, the higher."""
    chat = to_template((Message("user", (TextPart(_ALPHA),)),), style=style)
    at = EFFORTS.index(effort) if effort in EFFORTS else 0

    def is_taken(other: str) -> bool:
        try:
            tokenizer.render(chat, tools=None, kwargs=reasoning_kwargs(enabled, other))
        except TemplateFailed:
            return False
        return True

    others = sorted(EFFORTS, key=lambda e: (abs(EFFORTS.index(e) - at), -EFFORTS.index(e)))
    return next(filter(is_taken, (effort, *others)), effort)


def read_style(source: str) -> TemplateStyle:
    """Reads the style from the template's source, which is empty for a template that is code."""

    def has(pattern: str) -> bool:
        return re.search(pattern, source) is not None

    return TemplateStyle(
        none_content=has(_NAMED.format("content") + r" is (?:not )?none"),
        short_ids=has(r"length\s*!=\s*9\b"),
        text_arguments=has(r"\+\s*[\w.\[\]'\"]+" + _NAMED.format("arguments") + r"\s*(?:\+|\}\})"),
        names_results=has(r"\bmessage" + _NAMED.format("name")),
        either_reasoning="both content and thinking" in source,
    )


def openers(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that begin a message in this model's prompts."""
    known = {text: tokenizer.token_id(text) for text in MESSAGE_OPENERS}
    ids = {token for token in known.values() if token is not None}
    template = tokenizer.chat_template or ""
    if not any(token is not None and text in template for text, token in known.items()):
        ids |= _learn_openers(tokenizer)
    return tuple(sorted(ids))


def _learn_openers(tokenizer: Tokenizer) -> set[int]:
    r"""The control tokens between the messages of a small chat.

    # alpha <end> \n <start> assistant \n beta: the second control token opens the next message
    # alpha <start> beta:                       the only one does
    """
    chat = [
        {"role": "user", "content": _ALPHA},
        {"role": "assistant", "content": _BETA},
        {"role": "user", "content": _GAMMA},
    ]
    try:
        text = tokenizer.render(chat, tools=None, kwargs={})
    except TemplateFailed:
        return set()
    openers = set()
    for before, after in ((_ALPHA, _BETA), (_BETA, _GAMMA)):
        between = text.partition(before)[2].partition(after)[0]
        ids = tokenizer.encode(between, add_special=False)
        control = [t for t in ids if t in tokenizer.special]
        if control:
            openers.add(control[1] if len(control) > 1 else control[0])
    return openers
