"""POST /v1/completions: raw prompts, without a chat template."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.api.dialects import JsonRoute, ReplyHead, _openai, _openai_chat
from firn.api.dialects._openai import quote
from firn.api.dialects._other_servers import Lacking, refuse_missing
from firn.api.dialects._output_formats import schema_of_format
from firn.api.http import fields, sse
from firn.api.http.body import INLINE_NBYTES
from firn.api.http.errors import openai_error
from firn.api.services import Services
from firn.core.bounds import INT_MAX
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
    PLAIN_DEFAULTS,
    Defaults,
    FillInMiddle,
    GenerateRequest,
    Namespace,
    RawText,
    RawTokens,
    Source,
    Usage,
)

ID_PREFIX = "cmpl-"
ELSEWHERE: Mapping[str, Lacking] = {
    "tools": Lacking("use /v1/chat/completions", ([],)),
    "top_logprobs": Lacking("use logprobs: how many alternatives to show"),
    "stop_sequences": Lacking("use stop", ([],)),
    "max_output_tokens": Lacking("use max_tokens"),
}
"""Options of other APIs, by what they are called in this one."""
MAX_PROMPTS = 1024
MAX_REPLIES = 1024
"""Prompts times choices in one call."""


class OpenAICompletions:
    path = "/v1/completions"
    summary = "Raw completion, in OpenAI's dialect"
    tool_id_prefix = "call_"
    stream_headers = sse.HEADERS
    inline_nbytes = INLINE_NBYTES

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> CompletionCall:
        members = fields.Fields(body)
        sources = _sources(members)
        model = members.string("model") or ""
        sampling = _openai.sampling(members, self._defaults.sampling)
        max_tokens = _openai.max_tokens(members, low=0)
        stop, stop_tokens = _openai.stop_strings(members), _openai.stop_tokens(members)
        n = _n_choices(members, n_prompts=len(sources))
        top_logprobs = members.integer("logprobs", low=0, high=_openai.MAX_TOP_LOGPROBS)
        ignore_eos = members.boolean("ignore_eos", False)
        echo = members.boolean("echo", False)
        grammar = _openai_chat.grammar(members)
        extensions = _openai.extensions(members, self._defaults)
        if echo and top_logprobs is not None and isinstance(sources[0], FillInMiddle):
            raise InvalidValue("echo", "cannot be combined with logprobs and suffix")
        requests = tuple(
            GenerateRequest(
                model=model,
                source=source,
                sampling=sampling,
                max_tokens=max_tokens,
                stop=stop,
                stop_tokens=stop_tokens,
                n=n,
                top_logprobs=top_logprobs,
                ignore_eos=ignore_eos,
                echo=echo,
                grammar=grammar,
                **extensions,
            )
            for source in sources
        )
        stream = members.boolean("stream", False)
        include_usage = _openai.include_usage(members)
        _openai.skip_inert(members)
        refuse_missing(members, ELSEWHERE)
        return CompletionCall(requests, stream, members.unread(), include_usage)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return _error_object(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[JsonRoute, ...]:
        return ()


DIALECT = OpenAICompletions


def _error_object(error: FirnError) -> dict[str, Any]:
    shown = openai_error(error)
    if error.param == "messages":  # what other layers call the prompt in errors
        shown["error"]["param"] = "prompt"
    return shown


def _sources(body: fields.Fields) -> tuple[Source, ...]:
    """A string, strings, token ids, or lists of token ids; a suffix is the text after the reply."""
    prompt, suffix = body.require("prompt"), body.string("suffix")
    # Control tokens in a raw prompt are parsed; with a suffix, the prompt is the text of a file.
    add, parse = body.boolean("add_special", True), body.boolean("parse_special", not suffix)
    add = body.boolean("add_special_tokens", add)  # vLLM's name for it

    def raw(text: str) -> Source:
        if suffix:
            return FillInMiddle(text, suffix, add_special=add, parse_special=parse)
        return RawText(text, add_special=add, parse_special=parse)

    if isinstance(prompt, str):
        return (raw(prompt),)
    if not isinstance(prompt, list):
        raise InvalidValue("prompt", f"must be a string or an array, not {fields.kind(prompt)}")
    if not prompt:
        raise InvalidValue("prompt", "must not be empty")
    if suffix and not isinstance(prompt[0], str):
        raise InvalidValue("suffix", "needs the prompt as text, not as tokens")
    match prompt[0]:
        case str():
            fields.array(prompt, "prompt", high=MAX_PROMPTS)
            return tuple(raw(fields.string(text, f"prompt[{i}]")) for i, text in enumerate(prompt))
        case list():
            fields.array(prompt, "prompt", high=MAX_PROMPTS)
            return tuple(
                _tokens(fields.array(ids, f"prompt[{i}]", low=1), f"prompt[{i}]")
                for i, ids in enumerate(prompt)
            )
        case _:
            return (_tokens(prompt, "prompt"),)


def _tokens(ids: list[Any], param: str) -> RawTokens:
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= INT_MAX:
            raise InvalidValue(f"{param}[{i}]", "must be a token id, a non-negative integer")
    return RawTokens(tuple(ids))


def _n_choices(body: fields.Fields, *, n_prompts: int) -> int:
    n = _openai.n_choices(body)
    best_of = body.integer("best_of", low=1)
    if best_of is not None and best_of != n:
        raise InvalidValue("best_of", "is not supported unless it equals n")
    if n * n_prompts > MAX_REPLIES:
        raise InvalidValue("n", f"times the number of prompts must be at most {MAX_REPLIES}")
    return n


@dataclass(frozen=True, slots=True)
class CompletionCall:
    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    include_usage: bool
    background = False

    def encoder(self, head: ReplyHead) -> CompletionEncoder:
        return CompletionEncoder(head, include_usage=self.include_usage)

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        return _fold(head, events, with_logprobs=self.requests[0].top_logprobs is not None)


# --- streaming -----------------------------------------------------------------------------


class CompletionEncoder(_openai.StreamEncoder):
    def __init__(self, head: ReplyHead, *, include_usage: bool) -> None:
        super().__init__(
            head, id_prefix=ID_PREFIX, kind="text_completion", include_usage=include_usage
        )
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self.render = {
            Started: lambda _: "",
            Resumed: lambda _: "",
            Progress: sse.progress,
            TextDelta: self._text,
            # A raw completion is never split into these; if it were, nothing would be lost.
            ReasoningDelta: lambda event: self._piece(event.choice, event.text),
            ToolCallStarted: lambda _: "",
            ToolCallDelta: lambda event: self._piece(event.choice, event.arguments),
            ChoiceFinished: self._finished,
            Ended: self.ended,
            Failed: lambda event: sse.data(_openai.dumps(_error_object(event.error))),
        }

    def _text(self, event: TextDelta) -> str:
        if not event.logprobs:
            return self._piece(event.choice, event.text)
        logprobs = _openai.dumps(_logprobs(event.logprobs, self._offsets[event.choice]))
        return self._piece(event.choice, event.text, logprobs=logprobs)

    def _finished(self, event: ChoiceFinished) -> str:
        return self._piece(event.choice, "", finish=f'"{_reason(event.reason)}"')

    def _piece(
        self, choice: int, text: str, *, logprobs: str = "null", finish: str = "null"
    ) -> str:
        return self.chunk(
            f'{{"index":{choice},"text":{quote(text)},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}'
        )


def _reason(reason: FinishReason) -> str:
    return "stop" if reason == "tool_calls" else reason


# --- not streaming -------------------------------------------------------------------------


@dataclass(slots=True)
class _CompletionChoice:
    """One choice while its events are folded."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    reason: str | None = None


def _fold(head: ReplyHead, events: Iterable[Event], *, with_logprobs: bool) -> dict[str, Any]:
    replies: dict[int, _CompletionChoice] = {}
    usage = Usage(0, 0)
    for event in events:
        match event:
            case TextDelta():
                reply = replies.setdefault(event.choice, _CompletionChoice())
                reply.text.append(event.text)
                reply.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                replies.setdefault(event.choice, _CompletionChoice()).text.append(event.text)
            case ToolCallDelta():
                replies.setdefault(event.choice, _CompletionChoice()).text.append(event.arguments)
            case ChoiceFinished():
                replies.setdefault(event.choice, _CompletionChoice()).reason = _reason(event.reason)
            case Ended():
                usage = event.usage
            case _:
                pass
    return {
        "id": f"{ID_PREFIX}{head.id}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": choice,
                "text": "".join(reply.text),
                "logprobs": _logprobs(reply.logprobs, TextOffsets()) if with_logprobs else None,
                "finish_reason": reply.reason,
            }
            for choice, reply in sorted(replies.items())
        ],
        "usage": _openai.usage_object(usage),
    }


class TextOffsets:
    """Where the tokens of one choice begin in its text. Owner: its encoder, or a fold.

    A character may take several tokens: all of them begin where it does.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def take(self, raw: bytes) -> int:
        """Where the token with these bytes begins."""
        start = self._n_chars
        self._n_chars += len(self._decoder.decode(raw))
        return start


def _logprobs(tokens: Sequence[TextLogprob], offsets: TextOffsets) -> dict[str, Any]:
    """The first token of a prompt has no logprob: nothing comes before it."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_openai.finite_logprob(token.logprob) for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else _alternatives(token) for token in tokens
        ],
        "text_offset": [offsets.take(token.raw) for token in tokens],
    }


def _alternatives(token: TextLogprob) -> dict[str, float | None]:
    """Logprobs by text, the picked token's always among them. Parts of characters all have the same
    text: only the likeliest is shown."""
    shown: dict[str, float | None] = {}
    for text, _, logprob in (*token.top, (token.text, token.raw, token.logprob)):
        shown.setdefault(text, _openai.finite_logprob(logprob))
    return shown


# --- schema --------------------------------------------------------------------------------


def _schema() -> dict[str, Any]:
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    prompt = {
        "oneOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            ids,
            {"type": "array", "minItems": 1, "items": ids},
        ]
    }
    properties = _openai.common_schema() | {
        "prompt": prompt,
        "max_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": INT_MAX},
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": INT_MAX},
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "echo": {"type": ["boolean", "null"]},
        "suffix": {"type": ["string", "null"]},
        "add_special": {"type": ["boolean", "null"]},
        "parse_special": {"type": ["boolean", "null"]},
        "response_format": schema_of_format(),
    }
    return {
        "type": "object",
        "required": ["prompt"],
        "properties": properties,
        "example": {"prompt": "Once upon a time", "max_tokens": 16},
    }
