"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from firn.api.dialects import JsonRoute, ReplyHead, _openai, _openai_chat, _openai_tools
from firn.api.dialects._custom_tools import CustomInput, custom_input
from firn.api.dialects._openai import quote
from firn.api.dialects._other_servers import Lacking, refuse_missing
from firn.api.dialects._output_formats import schema_of_format
from firn.api.dialects._template_kwargs import template_kwargs
from firn.api.http import fields, sse
from firn.api.http.body import INLINE_NBYTES
from firn.api.http.errors import openai_error
from firn.api.services import Services
from firn.core.errors import FirnError, InvalidValue
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    Failed,
    FinishReason,
    Progress,
    ReasoningDelta,
    Resumed,
    Started,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import (
    EFFORTS,
    PLAIN_DEFAULTS,
    Chat,
    Defaults,
    GenerateRequest,
    Namespace,
    Usage,
)

ID_PREFIX = "chatcmpl-"
ELSEWHERE: Mapping[str, Lacking] = {
    "best_of": Lacking("is not supported; use n", (1,)),
    "echo": Lacking("use /v1/completions", (False,)),
    "add_special_tokens": Lacking("the chat template adds them; use /v1/completions", (False,)),
    "max_output_tokens": Lacking("use max_tokens"),
    "stop_sequences": Lacking("use stop", ([],)),
    "suffix": Lacking("use /v1/completions", ("",)),
    "system": Lacking("send a message with the role system"),
    "text": Lacking("use response_format"),
}
"""Options of other APIs, by what they are called in this one."""


class OpenAIChat:
    path = "/v1/chat/completions"
    summary = "Chat, in OpenAI's dialect"
    tool_id_prefix = "call_"
    stream_headers = sse.HEADERS
    inline_nbytes = INLINE_NBYTES

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> ChatCall:
        members, defaults = fields.Fields(body), self._defaults
        offered = _openai_tools.offered(members)
        reasoning = defaults.reasoning(_openai_chat.reasoning(members))
        request = GenerateRequest(
            model=members.string("model") or "",
            source=Chat(
                messages=_openai_chat.messages(members),
                tools=offered.tools,
                tool_choice=offered.choice,
                template_kwargs=defaults.kwargs(template_kwargs(members), reasoning),
                continues=members.boolean("continue_final_message", False),
            ),
            sampling=_openai.sampling(members, defaults.sampling),
            max_tokens=_openai.max_tokens(members),
            stop=_openai.stop_strings(members),
            stop_tokens=_openai.stop_tokens(members),
            n=_openai.n_choices(members),
            top_logprobs=_top_logprobs(members),
            ignore_eos=members.boolean("ignore_eos", False),
            grammar=_openai_chat.grammar(members),
            reasoning=reasoning,
            **_openai.extensions(members, defaults),
            prediction=_openai.prediction(members),
        )
        stream = members.boolean("stream", False)
        include_usage = _openai.include_usage(members)
        shape = ReplyShape(
            offered.custom,
            legacy_functions=offered.legacy_functions,
            hides_reasoning=_hides_reasoning(members),
        )
        _openai.skip_inert(members)
        refuse_missing(members, ELSEWHERE)
        return ChatCall((request,), stream, members.unread(), include_usage, shape)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return openai_error(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[JsonRoute, ...]:
        return ()


DIALECT = OpenAIChat


def _hides_reasoning(body: fields.Fields) -> bool:
    """`include_reasoning`, as in vLLM, and `reasoning.exclude`."""
    excluded = body.object("reasoning").boolean("exclude", False)
    return excluded or not body.boolean("include_reasoning", True)


def _top_logprobs(body: fields.Fields) -> int | None:
    wanted = body.boolean("logprobs", False)
    top = body.integer("top_logprobs", low=0, high=_openai.MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidValue("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """How a reply is shown. custom: tools that take a text. legacy_functions: calls are shown as one
    function_call. hides_reasoning: what the model thinks is left out."""

    custom: frozenset[str] = frozenset()
    legacy_functions: bool = False
    hides_reasoning: bool = False

    def reason(self, reason: FinishReason) -> str:
        return "function_call" if self.legacy_functions and reason == "tool_calls" else reason


@dataclass(frozen=True, slots=True)
class ChatCall:
    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    include_usage: bool
    shape: ReplyShape
    background = False

    def encoder(self, head: ReplyHead) -> ChatEncoder:
        return ChatEncoder(head, include_usage=self.include_usage, shape=self.shape)

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        with_logprobs = self.requests[0].top_logprobs is not None
        return _fold(head, events, self.shape, with_logprobs=with_logprobs)


# --- streaming -----------------------------------------------------------------------------


class ChatEncoder(_openai.StreamEncoder):
    def __init__(self, head: ReplyHead, *, include_usage: bool, shape: ReplyShape) -> None:
        super().__init__(
            head,
            id_prefix=ID_PREFIX,
            kind="chat.completion.chunk",
            include_usage=include_usage,
        )
        self._shape = shape
        self._begun: set[int] = set()
        self._custom: dict[int, tuple[int, CustomInput]] = {}
        """The custom tool's call that is being written, as its index and its input, by choice."""
        self.render = {
            Started: lambda _: "",
            Resumed: lambda _: "",
            Progress: sse.progress,
            TextDelta: self._text,
            ReasoningDelta: self._reasoning,
            ToolCallStarted: self._tool_call,
            ToolCallDelta: self._tool_arguments,
            ChoiceFinished: self._finished,
            Ended: self.ended,
            Failed: lambda event: sse.data(_openai.dumps(openai_error(event.error))),
        }

    def _text(self, event: TextDelta) -> str:
        logprobs = _openai.dumps(_logprobs(event.logprobs)) if event.logprobs else "null"
        return self._delta(event.choice, f'"content":{quote(event.text)}', logprobs=logprobs)

    def _reasoning(self, event: ReasoningDelta) -> str:
        if self._shape.hides_reasoning:
            return ""
        return self._delta(event.choice, f'"reasoning_content":{quote(event.text)}')

    def _tool_call(self, event: ToolCallStarted) -> str:
        if self._shape.legacy_functions:
            delta = f'"function_call":{{"name":{quote(event.name)},"arguments":""}}'
            return self._delta(event.choice, delta)
        kind, member = "function", "arguments"
        before = self._end_input(event.choice)
        if event.name in self._shape.custom:
            self._custom[event.choice] = (event.index, CustomInput())
            kind, member = "custom", "input"
        return before + self._delta(
            event.choice,
            f'"tool_calls":[{{"index":{event.index},"id":{quote(event.id)},"type":"{kind}",'
            f'"{kind}":{{"name":{quote(event.name)},"{member}":""}}}}]',
        )

    def _tool_arguments(self, event: ToolCallDelta) -> str:
        if self._shape.legacy_functions:
            delta = f'"function_call":{{"arguments":{quote(event.arguments)}}}'
            return self._delta(event.choice, delta)
        if event.choice in self._custom:
            index, custom = self._custom[event.choice]
            return self._input(event.choice, index, custom.feed(event.arguments))
        return self._delta(
            event.choice,
            f'"tool_calls":[{{"index":{event.index},'
            f'"function":{{"arguments":{quote(event.arguments)}}}}}]',
        )

    def _input(self, choice: int, index: int, text: str) -> str:
        """A piece of the text of a custom tool's call."""
        if not text:
            return ""
        return self._delta(
            choice, f'"tool_calls":[{{"index":{index},"custom":{{"input":{quote(text)}}}}}]'
        )

    def _end_input(self, choice: int) -> str:
        """The rest of the text of a custom tool's call, if one was being written."""
        if choice not in self._custom:
            return ""
        index, custom = self._custom.pop(choice)
        return self._input(choice, index, custom.flush())

    def _finished(self, event: ChoiceFinished) -> str:
        finish = f'"{self._shape.reason(event.reason)}"'
        return self._end_input(event.choice) + self._delta(event.choice, "", finish=finish)

    def _delta(
        self, choice: int, delta: str, *, logprobs: str = "null", finish: str = "null"
    ) -> str:
        role = ""
        if choice not in self._begun:
            self._begun.add(choice)
            role = self._delta(choice, '"role":"assistant","content":""')
        return role + self.chunk(
            f'{{"index":{choice},"delta":{{{delta}}},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}'
        )


# --- not streaming -------------------------------------------------------------------------


@dataclass(slots=True)
class _ChatChoice:
    """One choice while its events are folded."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallStarted] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    """The pieces of each call's arguments."""
    logprobs: list[TextLogprob] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.text.append(event.text)
                self.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                self.reasoning.append(event.text)
            case ToolCallStarted():
                self.calls.append(event)
                self.arguments.append([])
            case ToolCallDelta():
                self.arguments[event.index].append(event.arguments)
            case ChoiceFinished():
                self.reason = event.reason

    def message(self, shape: ReplyShape) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.reasoning and not shape.hides_reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        calls = [
            _shaped(call, "".join(pieces), shape)
            for call, pieces in zip(self.calls, self.arguments, strict=True)
        ]
        if calls and shape.legacy_functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message


def _shaped(call: ToolCallStarted, arguments: str, shape: ReplyShape) -> dict[str, Any]:
    if call.name in shape.custom:
        custom = {"name": call.name, "input": custom_input(arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _fold(
    head: ReplyHead, events: Iterable[Event], shape: ReplyShape, *, with_logprobs: bool
) -> dict[str, Any]:
    replies: dict[int, _ChatChoice] = {}
    usage = Usage(0, 0)
    for event in events:
        match event:
            case Started() | Resumed() | Progress() | Failed():
                pass
            case Ended():
                usage = event.usage
            case _:
                replies.setdefault(event.choice, _ChatChoice()).take(event)
    return {
        "id": f"{ID_PREFIX}{head.id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": choice,
                "message": reply.message(shape),
                "logprobs": _logprobs(reply.logprobs) if with_logprobs else None,
                "finish_reason": shape.reason(reply.reason) if reply.reason else None,
            }
            for choice, reply in sorted(replies.items())
        ],
        "usage": _openai.usage_object(usage),
    }


def _logprobs(tokens: Sequence[TextLogprob]) -> dict[str, Any]:
    return {"content": _openai.logprob_objects(tokens), "refusal": None}


# --- schema --------------------------------------------------------------------------------


def _schema() -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(_openai_chat.ROLES)},
            "content": {"type": ["string", "array", "null"]},
            "name": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
        },
    }
    properties = _openai.common_schema() | {
        "messages": {"type": "array", "minItems": 1, "items": message},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {"type": ["string", "object", "null"]},
        "functions": {"type": ["array", "null"], "items": {"type": "object"}},
        "function_call": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": {"type": ["boolean", "null"]},
        "response_format": schema_of_format(),
        "reasoning_effort": {"enum": [*EFFORTS, None]},
        "enable_thinking": {"type": ["boolean", "null"]},
        "thinking_budget": {"type": ["integer", "null"], "minimum": 0},
        "chat_template_kwargs": {"type": ["object", "null"]},
        "continue_final_message": {"type": ["boolean", "null"]},
        "include_reasoning": {"type": ["boolean", "null"]},
        "prediction": {
            "type": ["object", "null"],
            "description": "Text that the reply will probably repeat, which makes it faster.",
            "properties": {
                "type": {"enum": ["content", None]},
                "content": {"type": ["string", "array", "null"], "items": {"type": "object"}},
            },
        },
    }
    example = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    return cast(
        "dict[str, Any]",
        {
            "type": "object",
            "required": ["messages"],
            "properties": properties,
            "example": example,
        },
    )
