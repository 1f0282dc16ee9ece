"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect.

Each token of a prompt is counted once: read from the cache, written to it, or neither:
    # [0, n_cached) cache_read   [n_cached, n_prompt - 1) cache_creation   the last one: input
Tokens that are skipped are input. Whatever is computed is also stored, but only a client
that marks something with cache_control sees it as cache_creation; for others it is input.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firn.api.calls.prompting import count_tokens, decoded_request
from firn.api.dialects import JsonRoute, ReplyHead, RouteRequest, _anthropic, _openai
from firn.api.dialects._content_blocks import (
    BlockClosed,
    BlockEvent,
    BlockGrown,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
)
from firn.api.dialects._openai import dumps, quote
from firn.api.dialects._other_servers import Lacking, refuse_missing
from firn.api.dialects._template_kwargs import template_kwargs
from firn.api.http import fields, sse
from firn.api.http.body import INLINE_NBYTES
from firn.api.services import Services
from firn.core.bounds import INT_MAX
from firn.core.errors import ContextTooLong, FirnError
from firn.core.events import ChoiceFinished, Ended, Event, Failed, Progress, Resumed, Started
from firn.core.values import (
    PLAIN_DEFAULTS,
    Chat,
    Defaults,
    GenerateRequest,
    Message,
    Namespace,
    Usage,
)

ID_PREFIX = "msg_"
ELSEWHERE: Mapping[str, Lacking] = {
    "logprobs": Lacking("use /v1/chat/completions", (False,)),
    "max_completion_tokens": Lacking("use max_tokens"),
    "max_output_tokens": Lacking("use max_tokens"),
    "n": Lacking("a message is one reply; use /v1/chat/completions", (1,)),
    "reasoning_effort": Lacking("use output_config.effort"),
    "response_format": Lacking("use output_config.format"),
    "stop": Lacking("use stop_sequences", ([], "")),
}
"""Options of other APIs, by what they are called in this one."""
PING = sse.named("ping", '{"type":"ping"}')
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages:
    path = "/v1/messages"
    summary = "Messages, in Anthropic's dialect"
    tool_id_prefix = "toolu_"
    stream_headers = sse.HEADERS
    inline_nbytes = INLINE_NBYTES

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> MessagesCall:
        members = fields.Fields(body)
        tools, left_out = _anthropic.tools(members)
        messages = _anthropic.messages(members)
        reasoning = self._defaults.reasoning(_anthropic.reasoning(members))
        request = GenerateRequest(
            model=members.string("model") or "",
            source=Chat(
                messages=messages,
                tools=tools,
                tool_choice=_anthropic.tool_choice(members, tools),
                template_kwargs=self._defaults.kwargs(template_kwargs(members), reasoning),
                continues=_continues_last_message(messages),
            ),
            sampling=_openai.sampling(members, self._defaults.sampling),
            max_tokens=members.integer("max_tokens", low=0),
            stop=_anthropic.stop_sequences(members),
            stop_tokens=_openai.stop_tokens(members),
            ignore_eos=members.boolean("ignore_eos", False),
            grammar=_anthropic.grammar(members),
            reasoning=reasoning,
            **_openai.extensions(members, self._defaults),
        )
        stream = members.boolean("stream", False)
        options = MessageOptions(
            hides_thinking=not _anthropic.shows_thinking(members),
            counts_creation=request.cache.write and _marks_anything(members, messages),
        )
        members.object("context_management")  # what it asks for is reported, but not done
        members.skip("metadata", "service_tier", "inference_geo", "speed", "container")
        members.skip("diagnostics", "user_profile_id", "betas", "workspace_id")
        refuse_missing(members, ELSEWHERE)
        return MessagesCall((request,), stream, (*members.unread(), *left_out), options)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return _error_object(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[JsonRoute, ...]:
        async def count(route_request: RouteRequest) -> Mapping[str, Any]:
            request = await decoded_request(services, self, route_request)
            return {"input_tokens": await count_tokens(services, request, route_request.namespace)}

        path, summary = f"{self.path}/count_tokens", "How many tokens a prompt has"
        return (JsonRoute("POST", path, summary, count, schema=_schema()),)


DIALECT = AnthropicMessages


def _continues_last_message(messages: Sequence[Message]) -> bool:
    """Whether the last message is text of the assistant, which the reply continues."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        return False
    return bool(last.text.strip())


def _marks_anything(body: fields.Fields, messages: Sequence[Message]) -> bool:
    tools = body.get("tools") or ()
    return any(m.checkpoint for m in messages) or any(t.get("cache_control") for t in tools)


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """How a reply is shown."""

    hides_thinking: bool = False
    counts_creation: bool = False

    def usage(self, usage: Usage) -> dict[str, Any]:
        fresh = max(usage.n_prompt - usage.n_cached, 0)
        created = max(fresh - usage.n_skipped - 1, 0) if self.counts_creation else 0
        return {
            "input_tokens": fresh - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.n_cached,
            "output_tokens": usage.n_completion,
            **_openai.approximate(usage),
        }


@dataclass(frozen=True, slots=True)
class MessagesCall:
    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    options: MessageOptions
    background = False

    def encoder(self, head: ReplyHead) -> MessageEncoder:
        return MessageEncoder(head, self.options)

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        return _fold(head, events, self.options)


# --- streaming -----------------------------------------------------------------------------


class MessageEncoder:
    """Owner: the task that writes the stream. message_start waits until it is known what was cached."""

    def __init__(self, head: ReplyHead, options: MessageOptions) -> None:
        self._head = head
        self._options = options
        self._blocks = ContentBlocks()
        self._n_prompt = 0
        self._begun = False

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return (PING if self._begun else sse.KEEP_ALIVE).encode()
        return "".join([self._render(event) for event in events]).encode("ascii")

    def _render(self, event: Event) -> str:
        match event:
            case Started():
                self._n_prompt = event.n_prompt
                return ""
            case Resumed():
                return self._begin(event.n_cached)
            case Progress():
                return f"{self._begin(0)}{sse.progress(event)}{PING}"
            case Ended():
                return self._begin(0) + self._end(event.usage)
            case Failed():
                return sse.named("error", dumps(_error_object(event.error)))
            case _:
                changes = self._blocks.take(event)
                return self._begin(0) + "".join([self._render_change(change) for change in changes])

    def _begin(self, n_cached: int) -> str:
        if self._begun:
            return ""
        self._begun = True
        usage = self._options.usage(Usage(self._n_prompt, 0, n_cached))
        message = _message(self._head, [], usage, None)
        return _frame("message_start", f'"message":{dumps(message)}') + PING

    def _render_change(self, change: BlockEvent) -> str:
        block = change.block
        match change:
            case BlockOpened():
                shown = dumps(_shown(block, self._options))
                return _frame(
                    "content_block_start", f'"index":{block.index},"content_block":{shown}'
                )
            case BlockGrown():
                return self._grown(block, change.piece)
            case BlockClosed():
                sign = ""
                if block.kind == "reasoning":
                    sign = _delta(block, "signature", "signature", _signature(block))
                return sign + _frame("content_block_stop", f'"index":{block.index}')

    def _grown(self, block: ContentBlock, piece: str) -> str:
        match block.kind:
            case "text":
                return _delta(block, "text", "text", piece)
            case "reasoning":
                hidden = self._options.hides_thinking
                return "" if hidden else _delta(block, "thinking", "thinking", piece)
            case "call":
                return _delta(block, "input_json", "partial_json", piece)

    def _end(self, usage: Usage) -> str:
        delta = {**_stop(self._blocks.finish), "stop_details": None}
        changed = f'"delta":{dumps(delta)},"usage":{dumps(self._options.usage(usage))}'
        return _frame("message_delta", changed) + _frame("message_stop", "")


def _frame(kind: str, members: str) -> str:
    comma = "," if members else ""
    return f'event: {kind}\ndata: {{"type":"{kind}"{comma}{members}}}\n\n'


def _delta(block: ContentBlock, kind: str, member: str, text: str) -> str:
    return (
        f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{block.index},'
        f'"delta":{{"type":"{kind}_delta","{member}":{quote(text)}}}}}\n\n'
    )


# --- whole replies -------------------------------------------------------------------------


def _fold(head: ReplyHead, events: Iterable[Event], options: MessageOptions) -> dict[str, Any]:
    blocks, usage = ContentBlocks(), Usage(0, 0)
    for event in events:
        blocks.take(event)
        if isinstance(event, Ended):
            usage = event.usage
    content = [_whole(block, options) for block in blocks.all]
    return _message(head, content, options.usage(usage), blocks.finish)


def _message(
    head: ReplyHead, content: list[Any], usage: dict[str, Any], finish: ChoiceFinished | None
) -> dict[str, Any]:
    return {
        "id": f"{ID_PREFIX}{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **_stop(finish),
        "usage": usage,
    }


def _stop(finish: ChoiceFinished | None) -> dict[str, Any]:
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finish.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
    return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": None}


def _shown(block: ContentBlock, options: MessageOptions) -> dict[str, Any]:
    """A block as it begins."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _whole(block: ContentBlock, options: MessageOptions) -> dict[str, Any]:
    shown = _shown(block, options)
    match block.kind:
        case "text":
            return shown | {"text": block.text}
        case "reasoning":
            thinking = "" if options.hides_thinking else block.text
            return shown | {"thinking": thinking, "signature": _signature(block)}
        case "call":
            return shown | {"input": _input(block.text)}


def _input(text: str) -> dict[str, Any]:
    """The arguments as an object; empty if they are not one, because max_tokens cut them off or
    they are nested too deeply: this API has no field for such a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _signature(block: ContentBlock) -> str:
    """Clients drop thinking without a signature. It is not checked when they send it back."""
    digest = hashlib.blake2b(block.text.encode("utf-8", "surrogatepass"), digest_size=32)
    return base64.b64encode(digest.digest()).decode()


def _error_object(error: FirnError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if isinstance(error, ContextTooLong):  # agents compact when they read these words
        message = f"prompt is too long: {error.n_prompt} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


# --- schema --------------------------------------------------------------------------------


def _schema() -> dict[str, Any]:
    common = _openai.common_schema()
    shared = (
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stream",
        "stop_token_ids",
        *_openai.extension_schema(),
    )
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    text_or_blocks = {"type": ["string", "array", "null"], "items": {"type": "object"}}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": list(_anthropic.ROLES)}, "content": text_or_blocks},
    }
    stop = {"type": "string", "minLength": 1, "maxLength": _openai.MAX_STOP_CHARS}
    optional = {"type": ["object", "null"]}
    properties = {name: common[name] for name in (*shared, *penalties)} | {
        "messages": {"type": "array", "minItems": 1, "items": message},
        "max_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": INT_MAX},
        "system": text_or_blocks,
        "stop_sequences": {"type": ["array", "null"], "items": stop, "maxItems": 16},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": optional,
        "thinking": optional,
        "output_config": optional,
        "output_format": optional,
        "cache_control": optional,
        "metadata": {},
    }
    example = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    return {
        "type": "object",
        "required": ["messages"],
        "properties": properties,
        "example": example,
    }
