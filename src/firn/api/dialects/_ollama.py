"""What the two generating routes of Ollama's API share: fields, options, lines of JSON, durations.

A stream is a line of JSON for each piece, and the last line has the counts. Empty content in between is
harmless, and keeps a connection alive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from firn.api.dialects import Head, _openai
from firn.api.dialects import _fields as fields
from firn.api.dialects._fields import Fields
from firn.core import duration
from firn.core.errors import FirnError, InvalidValue
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    Failed,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.values import Grammar, PicturePart, Reasoning, Sampling, Usage

STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
TAG = ":latest"
EFFORTS = ("low", "medium", "high")
RENAMED = {"repetition_penalty": "repeat_penalty"}
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
MAX_IMAGES = 64

# --- decoding ------------------------------------------------------------------------------


def model_name(body: Fields) -> str:
    """Clients put a tag behind a name that has none."""
    return (body.string("model") or "").removesuffix(TAG)


def sampling(options: Fields, default: Sampling) -> Sampling:
    given = {name: options.get(RENAMED.get(name, name)) for name in SAMPLING}
    return _openai.sampling(Fields(given, options.path), default)


def max_tokens(options: Fields) -> int | None:
    """Below zero: until the model ends it."""
    n = options.integer("num_predict", low=-2)
    return None if n is None or n < 0 else n


def grammar(body: Fields) -> Grammar | None:
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


def check_keep_alive(body: Fields) -> float | None:
    """Seconds; where one model is served it is checked, and the model stays."""
    given = body.get("keep_alive")
    if given is None:
        return None
    try:
        return duration.seconds(given)
    except ValueError as e:
        raise InvalidValue("keep_alive", str(e)) from None


def images(owner: Fields) -> tuple[PicturePart, ...]:
    """Bare base64, or a data URL."""
    given = owner.get("images")
    if given is None:
        return ()
    param = owner.name("images")
    found = []
    for i, value in enumerate(fields.array(given, param, high=MAX_IMAGES)):
        text = fields.string(value, f"{param}[{i}]", empty=False)
        url = text if text.startswith("data:") else f"data:image/png;base64,{text}"
        found.append(PicturePart(url=url, param=f"{param}[{i}]"))
    return tuple(found)


def error_object(error: FirnError) -> dict[str, Any]:
    return {"error": error.message}


# --- replies -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """How one route shows a piece: of text, of thinking, of finished tool calls."""

    piece: Callable[[str, str, Sequence[Mapping[str, Any]]], Mapping[str, Any]]


class Calls:
    """Tool calls while they are written; they are shown whole."""

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
    """An object, whatever was written: a call that was cut off has none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class LineEncoder:
    """One stream. Owned by the task that writes it."""

    def __init__(self, head: Head, form: Form, *, began_ns: int, why: str | None = None) -> None:
        """why: the reply is nothing but this reason."""
        self._head = base(head)
        self._form = form
        self._began_ns = began_ns
        self._first_ns: int | None = None
        self._calls = Calls()
        self._reason = why or "stop"

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return self._line(self._form.piece("", "", ()), done=False)
        return b"".join(map(self._render, events))

    def _render(self, event: Event) -> bytes:
        match event:
            case TextDelta(text=text):
                return self._piece(text, "")
            case ReasoningDelta(text=text):
                return self._piece("", text)
            case ToolCallStarted() | ToolCallDelta():
                self._calls.take(event)
            case ChoiceFinished():
                self._reason = done_reason(event)
                if calls := self._calls.whole():
                    return self._line(self._form.piece("", "", calls), done=False)
            case Ended(usage=usage):
                counts = durations(self._began_ns, self._first_ns) | usage_counts(usage)
                last = {**self._form.piece("", "", ()), "done_reason": self._reason, **counts}
                return self._line(last, done=True)
            case Failed(error=error):
                return json.dumps(error_object(error)).encode("ascii") + b"\n"
        return b""

    def _piece(self, text: str, thinking: str) -> bytes:
        if self._first_ns is None:
            self._first_ns = time.perf_counter_ns()
        return self._line(self._form.piece(text, thinking, ()), done=False)

    def _line(self, content: Mapping[str, Any], *, done: bool) -> bytes:
        return json.dumps({**self._head, **content, "done": done}).encode("ascii") + b"\n"


def fold(
    head: Head, events: Sequence[Event], form: Form, *, began_ns: int, why: str | None = None
) -> dict[str, Any]:
    text, thinking, calls, reason = [], [], Calls(), why or "stop"
    usage = Usage(0, 0)
    for event in events:
        match event:
            case TextDelta():
                text.append(event.text)
            case ReasoningDelta():
                thinking.append(event.text)
            case ToolCallStarted() | ToolCallDelta():
                calls.take(event)
            case ChoiceFinished():
                reason = done_reason(event)
            case Ended():
                usage = event.usage
    content = form.piece("".join(text), "".join(thinking), calls.whole())
    counts = durations(began_ns, None) | usage_counts(usage)
    return {**base(head), **content, "done": True, "done_reason": reason, **counts}


def base(head: Head) -> dict[str, Any]:
    at = datetime.fromtimestamp(head.created, tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": head.model, "created_at": at}


def done_reason(event: ChoiceFinished) -> str:
    return "length" if event.reason == "length" else "stop"


def usage_counts(usage: Usage) -> dict[str, Any]:
    counts = {"prompt_eval_count": usage.n_prompt, "eval_count": usage.n_completion}
    return {**counts, **_openai.approximate(usage)}


def durations(began_ns: int, first_ns: int | None) -> dict[str, int]:
    """In nanoseconds. Where nobody saw the first token come, all of it was writing the reply."""
    now_ns = time.perf_counter_ns()
    first_ns = began_ns if first_ns is None else first_ns
    return {
        "total_duration": now_ns - began_ns,
        "load_duration": 0,
        "prompt_eval_duration": first_ns - began_ns,
        "eval_duration": max(now_ns - first_ns, 1),
    }


def common_schema() -> dict[str, Any]:
    return {
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"], "description": "true where it is not said"},
        "format": {"type": ["string", "object", "null"], "description": "'json' or a JSON schema"},
        "options": {"type": ["object", "null"]},
        "think": {"type": ["boolean", "string", "null"]},
        "keep_alive": {"type": ["string", "number", "null"]},
    }
