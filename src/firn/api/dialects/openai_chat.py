"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from firn.api import sse
from firn.api.dialects import Extra, Head, _fields, _openai, _openai_chat
from firn.api.dialects._openai import quote
from firn.api.dialects._output_formats import schema_of_format
from firn.api.dialects._template_kwargs import template_kwargs
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
from firn.core.values import PLAIN_DEFAULTS, Chat, Defaults, GenerateRequest, Namespace, Usage

ID_PREFIX = "chatcmpl-"


class OpenAIChat:
    path = "/v1/chat/completions"
    summary = "Chat, in OpenAI's dialect"
    tool_id_prefix = "call_"
    stream_headers = sse.HEADERS

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> ChatCall:
        given, defaults = _fields.Fields(body), self._defaults
        tools = _openai_chat.tools(given)
        reasoning = defaults.reasoning(_openai_chat.reasoning(given))
        request = GenerateRequest(
            model=given.string("model") or "",
            source=Chat(
                messages=_openai_chat.messages(given),
                tools=tools,
                tool_choice=_openai_chat.tool_choice(given, tools),
                template_kwargs=defaults.kwargs(template_kwargs(given), reasoning),
                continues=given.boolean("continue_final_message", False),
            ),
            sampling=_openai.sampling(given, defaults.sampling),
            max_tokens=_openai.max_tokens(given),
            stop=_openai.stop_strings(given),
            n=_openai.n_choices(given),
            top_logprobs=_top_logprobs(given),
            ignore_eos=given.boolean("ignore_eos", False),
            grammar=_openai_chat.grammar(given),
            reasoning=reasoning,
            cache=_openai.cache_control(given),
        )
        stream = given.boolean("stream", False)
        include_usage = _openai.include_usage(given)
        _openai.skip_inert(given)
        return ChatCall((request,), stream, given.unread(), include_usage)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return _openai.error_object(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[Extra, ...]:
        return ()


DIALECT = OpenAIChat


def _top_logprobs(body: _fields.Fields) -> int | None:
    wanted = body.boolean("logprobs", False)
    top = body.integer("top_logprobs", low=0, high=_openai.MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidValue("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


@dataclass(frozen=True, slots=True)
class ChatCall:
    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    include_usage: bool
    background = False

    def encoder(self, head: Head) -> ChatEncoder:
        return ChatEncoder(head, include_usage=self.include_usage)

    def fold(self, head: Head, events: Iterable[Event]) -> dict[str, Any]:
        return _fold(head, events, with_logprobs=self.requests[0].top_logprobs is not None)


# --- streaming -----------------------------------------------------------------------------


class ChatEncoder(_openai.StreamEncoder):
    def __init__(self, head: Head, *, include_usage: bool) -> None:
        super().__init__(
            head,
            id_prefix=ID_PREFIX,
            kind="chat.completion.chunk",
            include_usage=include_usage,
        )
        self._begun: set[int] = set()
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
            Failed: lambda event: sse.data(_openai.dumps(_openai.error_object(event.error))),
        }

    def _text(self, event: TextDelta) -> str:
        logprobs = _openai.dumps(_logprobs(event.logprobs)) if event.logprobs else "null"
        return self._delta(event.choice, f'"content":{quote(event.text)}', logprobs=logprobs)

    def _reasoning(self, event: ReasoningDelta) -> str:
        return self._delta(event.choice, f'"reasoning_content":{quote(event.text)}')

    def _tool_call(self, event: ToolCallStarted) -> str:
        return self._delta(
            event.choice,
            f'"tool_calls":[{{"index":{event.index},"id":{quote(event.id)},"type":"function",'
            f'"function":{{"name":{quote(event.name)},"arguments":""}}}}]',
        )

    def _tool_arguments(self, event: ToolCallDelta) -> str:
        return self._delta(
            event.choice,
            f'"tool_calls":[{{"index":{event.index},'
            f'"function":{{"arguments":{quote(event.arguments)}}}}}]',
        )

    def _finished(self, event: ChoiceFinished) -> str:
        return self._delta(event.choice, "", finish=f'"{event.reason}"')

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
class _Reply:
    """One choice while its events are gathered."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
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
                function = {"name": event.name, "arguments": ""}
                self.calls.append({"id": event.id, "type": "function", "function": function})
            case ToolCallDelta():
                self.calls[event.index]["function"]["arguments"] += event.arguments
            case ChoiceFinished():
                self.reason = event.reason

    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _fold(head: Head, events: Iterable[Event], *, with_logprobs: bool) -> dict[str, Any]:
    replies: dict[int, _Reply] = {}
    usage = Usage(0, 0)
    for event in events:
        match event:
            case Started() | Resumed() | Progress() | Failed():
                pass
            case Ended():
                usage = event.usage
            case _:
                replies.setdefault(event.choice, _Reply()).take(event)
    return {
        "id": f"{ID_PREFIX}{head.id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": choice,
                "message": reply.message(),
                "logprobs": _logprobs(reply.logprobs) if with_logprobs else None,
                "finish_reason": reply.reason,
            }
            for choice, reply in sorted(replies.items())
        ],
        "usage": _openai.usage_object(usage),
    }


def _logprobs(tokens: Sequence[TextLogprob]) -> dict[str, Any]:
    def shown(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": _openai.logarithm(logprob), "bytes": list(raw)}

    content = [
        {
            **shown(token.text, token.raw, token.logprob),
            "top_logprobs": [shown(*candidate) for candidate in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


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
        "parallel_tool_calls": {"type": ["boolean", "null"]},
        "response_format": schema_of_format(),
        "reasoning_effort": {"enum": [*_openai_chat.EFFORTS, None]},
        "enable_thinking": {"type": ["boolean", "null"]},
        "thinking_budget": {"type": ["integer", "null"], "minimum": 0},
        "chat_template_kwargs": {"type": ["object", "null"]},
        "continue_final_message": {"type": ["boolean", "null"]},
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
