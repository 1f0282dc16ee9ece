"""POST /api/generate: Ollama's single prompt, through the chat template or raw."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.api.dialects import Extra, Head, _ollama, _openai
from firn.api.dialects._fields import Fields
from firn.api.services import Services
from firn.core.errors import FirnError
from firn.core.events import Event
from firn.core.values import (
    PLAIN_DEFAULTS,
    Chat,
    Defaults,
    FillInMiddle,
    GenerateRequest,
    Message,
    Namespace,
    RawText,
    Reasoning,
    Source,
    TextPart,
)


class OllamaGenerate:
    path = "/api/generate"
    summary = "One prompt, in Ollama's dialect"
    tool_id_prefix = "call_"
    stream_headers = _ollama.STREAM_HEADERS

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> OllamaGenerateCall:
        given, defaults = Fields(body), self._defaults
        options = given.object("options")
        model = _ollama.model_name(given)
        reasoning = defaults.reasoning(_ollama.reasoning(given))
        source = _source(given, defaults, reasoning)
        sampling = _ollama.sampling(options, defaults.sampling)
        n_predict = _ollama.max_tokens(options)
        stop = _openai.stop_strings(options)
        grammar = _ollama.grammar(given)
        keep_alive_s = _ollama.check_keep_alive(given)
        speculates, sparse_keep = _openai.speculates(given), _openai.sparse_keep(given)
        stream = given.boolean("stream", True)
        ignored = given.unread()
        if source is None:
            why = "unload" if keep_alive_s == 0 else "load"
            return OllamaGenerateCall((), stream, ignored, why)
        request = GenerateRequest(
            model=model,
            source=source,
            sampling=sampling,
            max_tokens=n_predict,
            stop=stop,
            grammar=grammar,
            reasoning=reasoning,
            speculates=speculates,
            sparse_keep=sparse_keep,
        )
        return OllamaGenerateCall((request,), stream, ignored)

    def render_error(self, error: FirnError) -> dict[str, Any]:
        return _ollama.error_object(error)

    def schema(self) -> dict[str, Any]:
        return _schema()

    def routes(self, services: Services) -> tuple[Extra, ...]:
        return ()


DIALECT = OllamaGenerate


def _source(body: Fields, defaults: Defaults, reasoning: Reasoning) -> Source | FillInMiddle | None:
    """None: there is nothing to read; it is asked for to have the model loaded."""
    prompt, suffix = body.string("prompt") or "", body.string("suffix")
    system, images = body.string("system"), _ollama.images(body)
    raw = body.boolean("raw", False)
    body.skip("context")  # what was said before is in the cache
    if not prompt and not images and not suffix:
        return None
    if suffix:
        return FillInMiddle(prompt, suffix)
    if raw:
        return RawText(prompt)
    messages = [Message("user", (TextPart(prompt), *images))]
    if system:
        messages.insert(0, Message("system", (TextPart(system),)))
    return Chat(tuple(messages), template_kwargs=defaults.kwargs({}, reasoning))


def _piece(text: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    shown: dict[str, Any] = {"response": text}
    if thinking:
        shown["thinking"] = thinking
    if calls:
        shown["tool_calls"] = list(calls)
    return shown


FORM = _ollama.Form(_piece)


@dataclass(frozen=True, slots=True)
class OllamaGenerateCall:
    """why: nothing is generated, and this is the reason that the reply gives."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    ignored: tuple[str, ...]
    why: str | None = None
    began_ns: int = field(default_factory=time.perf_counter_ns)
    background = False

    def encoder(self, head: Head) -> _ollama.LineEncoder:
        return _ollama.LineEncoder(head, FORM, began_ns=self.began_ns, why=self.why)

    def fold(self, head: Head, events: Iterable[Event]) -> dict[str, Any]:
        return _ollama.fold(head, list(events), FORM, began_ns=self.began_ns, why=self.why)


def _schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": [],
        "properties": _ollama.common_schema()
        | {
            "prompt": text,
            "suffix": text,
            "system": text,
            "images": {"type": ["array", "null"], "items": {"type": "string"}},
            "raw": {"type": ["boolean", "null"]},
        },
        "example": {"prompt": "Hello!", "stream": False},
    }
