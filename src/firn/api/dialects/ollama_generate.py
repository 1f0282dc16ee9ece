"""POST /api/generate: Ollama's single prompt, through the chat template or raw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firn.api.dialects import _ollama, _openai
from firn.api.dialects._ollama import OllamaCall, OllamaDialect
from firn.api.dialects._other_servers import refuse_missing
from firn.api.dialects._template_kwargs import template_kwargs
from firn.api.http.fields import Fields, keep_alive_s
from firn.api.routes.ollama_fields import model_name
from firn.core.errors import InvalidValue
from firn.core.values import (
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


class OllamaGenerate(OllamaDialect):
    path = "/api/generate"
    summary = "One prompt, in Ollama's dialect"

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> OllamaCall:
        members, defaults = Fields(body), self._defaults
        options = members.object("options")
        model = model_name(members)
        reasoning = defaults.reasoning(_ollama.reasoning(members))
        source = _source(members, defaults, reasoning)
        sampling = _ollama.sampling(options, defaults.sampling)
        n_predict = _ollama.max_tokens(options)
        stop = _openai.stop_strings(options)
        grammar, top_logprobs = _ollama.grammar(members), _ollama.top_logprobs(members)
        stay_s, extensions = keep_alive_s(members), _openai.extensions(members, defaults)
        stream = members.boolean("stream", True)
        refuse_missing(members, under="options")
        ignored = members.unread()
        if source is None:
            done_reason = "unload" if stay_s == 0 else "load"
            return OllamaCall((), stream, ignored, _show, model, done_reason)
        request = GenerateRequest(
            model=model,
            source=source,
            sampling=sampling,
            max_tokens=n_predict,
            stop=stop,
            top_logprobs=top_logprobs,
            grammar=grammar,
            reasoning=reasoning,
            **extensions,
        )
        return OllamaCall((request,), stream, ignored, _show)

    def schema(self) -> dict[str, Any]:
        return _schema()


DIALECT = OllamaGenerate


def _source(body: Fields, defaults: Defaults, reasoning: Reasoning) -> Source | FillInMiddle | None:
    """None: the body has no prompt, and only asks for the model to be loaded."""
    prompt, suffix = body.string("prompt") or "", body.string("suffix")
    system, pictures = body.string("system"), _ollama.pictures(body)
    raw, kwargs = body.boolean("raw", False), defaults.kwargs(template_kwargs(body), reasoning)
    body.skip("context")  # from an earlier reply; firn sends none
    if not prompt and not pictures and not suffix:
        return None
    if pictures and (raw or suffix):
        raise InvalidValue(
            "images", "need the chat template, and cannot be combined with raw or suffix"
        )
    if suffix:
        return FillInMiddle(prompt, suffix)
    if raw:
        return RawText(prompt)
    messages = [Message("user", (TextPart(prompt), *pictures))]
    if system:
        messages.insert(0, Message("system", (TextPart(system),)))
    return Chat(tuple(messages), template_kwargs=kwargs)


def _show(text: str, thinking: str, calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    shown: dict[str, Any] = {"response": text}
    if thinking:
        shown["thinking"] = thinking
    if calls:
        shown["tool_calls"] = list(calls)
    return shown


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
