"""What Ollama's two generating routes share: options, and replies as lines of JSON.

A stream has a line of JSON for each piece; the last line has the counts. A line with empty content keeps
the connection alive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from firn.api.dialects import JsonRoute, ReplyHead, _openai
from firn.api.dialects._output_formats import wanted_format
from firn.api.http import fields
from firn.api.http.body import INLINE_NBYTES
from firn.api.http.errors import ollama_error
from firn.api.http.fields import Fields
from firn.api.routes.ollama_fields import RENAMED, durations
from firn.api.services import Services
from firn.core.errors import FirnError, InvalidValue
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    Failed,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import (
    PLAIN_DEFAULTS,
    Defaults,
    GenerateRequest,
    Grammar,
    PicturePart,
    Reasoning,
    Sampling,
    Usage,
)

STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
EFFORTS = ("low", "medium", "high")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
ANY_SEED = -1
"""The seed from clients that send every option, and want no seed."""
MAX_PICTURES = 64

ShowPiece = Callable[[str, str, Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""(text, thinking, finished tool calls) -> a piece of a reply, as one of the routes shows it."""


class OllamaDialect:
    """What the dialects of both routes have in common."""

    tool_id_prefix = "call_"
    stream_headers = STREAM_HEADERS
    inline_nbytes = INLINE_NBYTES

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return ollama_error(error)

    def routes(self, services: Services) -> tuple[JsonRoute, ...]:
        return ()


# --- decoding ------------------------------------------------------------------------------


def sampling(options: Fields, default: Sampling) -> Sampling:
    given = {name: options.get(RENAMED.get(name, name)) for name in SAMPLING}
    if given["seed"] == ANY_SEED:
        given["seed"] = None
    try:
        picked = _openai.sampling(Fields(given, options.path), default)
    except InvalidValue as error:
        for ours, theirs in RENAMED.items():
            if error.param == options.name(ours):
                why = error.message.partition(": ")[2]
                raise InvalidValue(options.name(theirs), why) from None
        raise
    _openai.skip_windows(options, picked)
    return picked


def max_tokens(options: Fields) -> int | None:
    """num_predict; None: absent or below zero, so that the server's default applies."""
    n = options.integer("num_predict", low=-2)
    return None if n is None or n < 0 else n


def top_logprobs(body: Fields) -> int | None:
    wanted = body.boolean("logprobs", False)
    top = body.integer("top_logprobs", low=0, high=_openai.MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise InvalidValue("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def grammar(body: Fields) -> Grammar | None:
    return wanted_format(body, _format(body))


def _format(body: Fields) -> Grammar | None:
    """`format`: "json", or a JSON schema."""
    given = body.get("format")
    if given is None or given == "":
        return None
    if given == "json":
        return Grammar("json_object", param="format")
    if isinstance(given, str):
        raise InvalidValue("format", "must be 'json' or a JSON schema")
    return Grammar("json_schema", json.dumps(fields.mapping(given, "format")), param="format")


def reasoning(body: Fields) -> Reasoning:
    given = body.get("think")
    if given is None:
        return Reasoning()
    if isinstance(given, bool):
        return Reasoning(enabled=given)
    return Reasoning(enabled=True, effort=fields.one_of(given, "think", EFFORTS))


def pictures(owner: Fields) -> tuple[PicturePart, ...]:
    """`images`: bare base64, or data URLs."""
    given = owner.get("images")
    if given is None:
        return ()
    param = owner.name("images")
    parts = []
    for i, value in enumerate(fields.array(given, param, high=MAX_PICTURES)):
        text = fields.string(value, f"{param}[{i}]", empty=False)
        url = text if text.startswith("data:") else f"data:image/png;base64,{text}"
        parts.append(PicturePart(url=url, param=f"{param}[{i}]"))
    return tuple(parts)


# --- replies -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """Implements LoadCall, too. done_reason: the reply's done_reason if there are no requests."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    show: ShowPiece
    loads: str | None = None
    done_reason: str | None = None
    began_ns: int = field(default_factory=time.perf_counter_ns)
    background = False

    def encoder(self, head: ReplyHead) -> LineEncoder:
        return LineEncoder(head, self.show, began_ns=self.began_ns, done_reason=self.done_reason)

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        return _fold(head, events, self)


class ToolCallBuffer:
    """Collects tool calls as they arrive: this API shows them whole."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, list[str]]] = []

    def take(self, event: ToolCallStarted | ToolCallDelta) -> None:
        if isinstance(event, ToolCallStarted):
            self._calls.append((event.name, []))
        else:
            self._calls[event.index][1].append(event.arguments)

    def whole(self) -> list[dict[str, Any]]:
        return [
            {"function": {"index": i, "name": name, "arguments": _arguments("".join(pieces))}}
            for i, (name, pieces) in enumerate(self._calls)
        ]


def _arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; empty if they are not one, or were cut off."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):  # endless brackets
        return {}
    return value if isinstance(value, dict) else {}


class LineEncoder:
    """Owner: the task that writes the stream."""

    def __init__(
        self, head: ReplyHead, show: ShowPiece, *, began_ns: int, done_reason: str | None = None
    ) -> None:
        """done_reason: see `OllamaCall`."""
        self._head = _head(head)
        self._show = show
        self._began_ns = began_ns
        self._calls = ToolCallBuffer()
        self._reason = done_reason or "stop"

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return self._line(self._show("", "", ()), done=False)
        return b"".join(map(self._render, events))

    def _render(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                shown = self._show(event.text, "", ())
                return self._line({**shown, **_logprobs(event.logprobs)}, done=False)
            case ReasoningDelta(text=text):
                return self._line(self._show("", text, ()), done=False)
            case ToolCallStarted() | ToolCallDelta():
                self._calls.take(event)
            case ChoiceFinished():
                self._reason = _done_reason(event)
                if calls := self._calls.whole():
                    return self._line(self._show("", "", calls), done=False)
            case Ended(usage=usage, first_token_at=at):
                counts = durations(self._began_ns, at) | _usage_counts(usage)
                last = {**self._show("", "", ()), "done_reason": self._reason, **counts}
                return self._line(last, done=True)
            case Failed(error=error):
                return json.dumps(ollama_error(error)).encode("ascii") + b"\n"
        return b""

    def _line(self, content: Mapping[str, Any], *, done: bool) -> bytes:
        return json.dumps({**self._head, **content, "done": done}).encode("ascii") + b"\n"


def _fold(head: ReplyHead, events: Iterable[Event], call: OllamaCall) -> dict[str, Any]:
    text, thinking, calls, reason = [], [], ToolCallBuffer(), call.done_reason or "stop"
    logprobs: list[TextLogprob] = []
    end = Ended(Usage(0, 0))
    for event in events:
        match event:
            case TextDelta():
                text.append(event.text)
                logprobs.extend(event.logprobs)
            case ReasoningDelta():
                thinking.append(event.text)
            case ToolCallStarted() | ToolCallDelta():
                calls.take(event)
            case ChoiceFinished():
                reason = _done_reason(event)
            case Ended():
                end = event
    content = call.show("".join(text), "".join(thinking), calls.whole())
    counts = durations(call.began_ns, end.first_token_at) | _usage_counts(end.usage)
    shown = {**_head(head), **content, **_logprobs(logprobs)}
    return {**shown, "done": True, "done_reason": reason, **counts}


def _logprobs(tokens: Sequence[TextLogprob]) -> dict[str, Any]:
    """The member for the logprobs of these tokens; none unless they were asked for."""
    return {"logprobs": _openai.logprob_objects(tokens)} if tokens else {}


def _head(head: ReplyHead) -> dict[str, Any]:
    at = datetime.fromtimestamp(head.created, tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": head.model, "created_at": at}


def _done_reason(event: ChoiceFinished) -> str:
    return "length" if event.reason == "length" else "stop"


def _usage_counts(usage: Usage) -> dict[str, Any]:
    counts = {"prompt_eval_count": usage.n_prompt, "eval_count": usage.n_completion}
    return {**counts, **_openai.approximate(usage)}


def common_schema() -> dict[str, Any]:
    extensions = _openai.common_schema()
    return {
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"], "description": "default: true"},
        "format": {"type": ["string", "object", "null"], "description": "'json' or a JSON schema"},
        "options": {"type": ["object", "null"]},
        "think": {"type": ["boolean", "string", "null"]},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "keep_alive": {"type": ["string", "number", "null"]},
        "cache": extensions["cache"],
        "cache_salt": extensions["cache_salt"],
    }
