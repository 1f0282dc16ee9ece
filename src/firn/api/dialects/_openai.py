"""What the OpenAI dialects share: common fields, usage, logprobs, the frames of streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, TypedDict

from firn.api.dialects import ReplyHead
from firn.api.http import fields, sse
from firn.api.http.fields import Fields, keep_alive_s
from firn.core.bounds import GREEDY_BELOW, INT_MAX, SAMPLING
from firn.core.errors import InvalidValue
from firn.core.events import Ended, Event, TextLogprob
from firn.core.values import CacheControl, Defaults, Sampling, Usage

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PREDICTION_CHARS = 1 << 20
MAX_PREDICTION_PARTS = 256
MAX_TTL_S = 10 * 365 * 86400
MAX_SALT_CHARS = 1024
SPECULATION = ("auto", "off")
PENALTY_WINDOWS = (
    "repeat_last_n", "repetition_context_size", "presence_context_size", "frequency_context_size",
)  # fmt: skip
"""Options of other servers: how many of the last tokens a penalty looks at."""

quote = encode_basestring_ascii
"""Encodes text as a JSON string, with quotes, in ASCII."""

# --- decoding ------------------------------------------------------------------------------


def sampling(body: Fields, default: Sampling) -> Sampling:
    """default: for whatever the body leaves out."""

    def number(name: str) -> float:
        bound = SAMPLING[name]
        return body.number(
            name,
            getattr(default, name),
            low=bound.low,
            high=bound.high,
            above_low=bound.above_low,
        )

    temperature, repetition = number("temperature"), number("repetition_penalty")
    if body.get("repetition_penalty") is None:  # as llama.cpp and LM Studio call it
        bound = SAMPLING["repetition_penalty"]
        repetition = body.number(
            "repeat_penalty", repetition, low=bound.low, high=bound.high, above_low=bound.above_low
        )
    top_k = body.integer("top_k", low=int(SAMPLING["top_k"].low))
    seed = body.integer("seed", low=-(2**63), high=2**64 - 1)
    picked = Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=number("top_p"),
        top_k=default.top_k if top_k is None else max(0, top_k),
        min_p=number("min_p"),
        seed=None if seed is None else seed % 2**64,
        repetition_penalty=repetition,
        presence_penalty=number("presence_penalty"),
        frequency_penalty=number("frequency_penalty"),
        logit_bias=_logit_bias(body),
    )
    skip_windows(body, picked)
    return picked


def skip_windows(body: Fields, picked: Sampling) -> None:
    """Skip how far back penalties look, if there are none."""
    if picked.repetition_penalty == 1 and not picked.presence_penalty + picked.frequency_penalty:
        body.skip(*PENALTY_WINDOWS)


def _logit_bias(body: Fields) -> tuple[tuple[int, float], ...]:
    given = body.get("logit_bias")
    if given is None:
        return ()
    biases: list[tuple[int, float]] = []
    for key, value in fields.mapping(given, "logit_bias").items():
        # Not int() alone: it accepts " 5", "+5", "1_000" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidValue("logit_bias", f"{key[:32]!r} is not a token id")
        bias = fields.number(value, f"logit_bias.{key}", low=-100, high=100)
        biases.append((int(key), bias))
    return tuple(biases)


def max_tokens(body: Fields, *, low: int = 1) -> int | None:
    """max_completion_tokens is the newer name and takes precedence. n_predict is llama.cpp's, where -1
    is no limit."""
    older = body.integer("max_tokens", low=low)
    newer = body.integer("max_completion_tokens", low=low)
    other = body.integer("n_predict", low=-1)
    given = [n for n in (newer, older, None if other == -1 else other) if n is not None]
    return given[0] if given else None


def n_choices(body: Fields) -> int:
    return body.integer("n", low=1, high=MAX_CHOICES) or 1


def stop_strings(body: Fields) -> tuple[str, ...]:
    given = body.get("stop")
    if given is None:
        return ()
    if isinstance(given, str):
        return (fields.string(given, "stop", max_chars=MAX_STOP_CHARS, empty=False),)
    if not isinstance(given, list):
        raise InvalidValue("stop", f"must be a string or an array, not {fields.kind(given)}")
    return stop_array(given, "stop")


def stop_array(given: object, param: str) -> tuple[str, ...]:
    """The strings of an array, without duplicates."""
    strings = (
        fields.string(text, f"{param}[{i}]", max_chars=MAX_STOP_CHARS, empty=False)
        for i, text in enumerate(fields.array(given, param, high=MAX_STOPS))
    )
    return tuple(dict.fromkeys(strings))


class Extensions(TypedDict):
    """firn's own fields, by the names of `GenerateRequest`."""

    cache: CacheControl
    cache_salt: str
    speculates: bool
    keep: float | None


def extensions(body: Fields, defaults: Defaults) -> Extensions:
    return {
        "cache": cache_control(body, stores=defaults.stores),
        "cache_salt": cache_salt(body),
        "speculates": speculates(body),
        "keep": keep(body),
    }


def cache_control(body: Fields, *, stores: bool) -> CacheControl:
    """stores: see `Defaults`."""
    cache = body.object("cache")
    ttl = cache.get("ttl")
    control = CacheControl(
        read=cache.boolean("read", body.boolean("cache_prompt", True)),  # llama.cpp's name for it
        write=cache.boolean("write", True) and stores,
        ttl_s=None
        if ttl is None
        else fields.number(ttl, cache.name("ttl"), low=0, high=MAX_TTL_S, above_low=True),
    )
    cache.refuse_unread()
    return control


def cache_salt(body: Fields) -> str:
    """What keeps this request's cached prefix apart from others of its key; empty: nothing does.

    `cache_salt` as in vLLM and SGLang, which also has `extra_key`. It is combined with the caller's
    namespace and never replaces it.
    """
    given = []
    for name in ("cache_salt", "extra_key"):
        value = body.get(name)
        if value is not None:
            text = fields.string(value, name, max_chars=MAX_SALT_CHARS, empty=False)
            given.append([name, text])
    return dumps(given) if given else ""


def speculates(body: Fields) -> bool:
    """Whether tokens may be drafted for this request, if the server drafts at all."""
    given = body.get("speculation")
    return given is None or fields.one_of(given, "speculation", SPECULATION) == "auto"


def keep(body: Fields) -> float | None:
    """The share of a long uncached prompt that must be read; None: the server's own setting."""
    if body.get("sparse_prefill") is None:
        return None
    given = body.object("sparse_prefill")
    share = fields.number(given.require("keep"), given.name("keep"), low=0.01, high=1)
    given.refuse_unread()
    return round(share, 2)


def prediction(body: Fields) -> str:
    """The text that the caller expects in the reply."""
    given = body.object("prediction")
    kind = given.get("type")
    if kind is not None:
        fields.one_of(kind, given.name("type"), ("content",))
    content = given.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return fields.string(content, given.name("content"), max_chars=MAX_PREDICTION_CHARS)
    texts = []
    for part in fields.objects(content, given.name("content"), high=MAX_PREDICTION_PARTS):
        fields.one_of(part.require("type"), part.name("type"), ("text",))
        texts.append(
            fields.string(part.require("text"), part.name("text"), max_chars=MAX_PREDICTION_CHARS)
        )
    return "".join(texts)[:MAX_PREDICTION_CHARS]


def stop_tokens(body: Fields) -> tuple[int, ...]:
    """`stop_token_ids`, as in vLLM and SGLang."""
    given = body.get("stop_token_ids")
    if given is None:
        return ()
    return tuple(
        fields.integer(token, f"stop_token_ids[{i}]", low=0)
        for i, token in enumerate(fields.array(given, "stop_token_ids", high=MAX_STOP_TOKENS))
    )


def include_usage(body: Fields) -> bool:
    return body.object("stream_options").boolean("include_usage", False)


def skip_inert(body: Fields) -> None:
    """Skip fields of OpenAI's own service that mean nothing here."""
    body.skip("user", "metadata", "store", "service_tier", "safety_identifier")
    body.skip("prompt_cache_key", "prompt_cache_retention")
    keep_alive_s(body)  # for a server of several models, which has read it
    if body.get("stream_options") is not None:
        body.object("stream_options").skip("include_obfuscation")
    if body.get("ignore_eos"):  # then every reply has max_tokens tokens
        body.skip("min_tokens")


# --- rendering -----------------------------------------------------------------------------


def approximate(usage: Usage) -> dict[str, Any]:
    """For the usage of a reply: how many tokens of its prompt were skipped; empty if none."""
    return {"approximate": {"skipped_tokens": usage.n_skipped}} if usage.n_skipped else {}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_completion,
        "total_tokens": usage.n_prompt + usage.n_completion,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.n_reasoning,
            "accepted_prediction_tokens": usage.n_accepted,
            "rejected_prediction_tokens": usage.n_drafted - usage.n_accepted,
        },
        **approximate(usage),
    }


def finite_logprob(value: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes -9999 for an impossible token."""
    return None if value is None else max(value, -9999.0)


def logprob_objects(tokens: Iterable[TextLogprob]) -> list[dict[str, Any]]:
    """Tokens with their likeliest alternatives, as chats and Responses show them."""

    def shown(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(raw)}

    return [
        shown(token.text, token.raw, token.logprob)
        | {"top_logprobs": [shown(*candidate) for candidate in token.top]}
        for token in tokens
    ]


def dumps(value: Mapping[str, Any] | list[Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


class StreamEncoder:
    """What the streams of chats and completions have in common. Owner: the task that writes it.

    A chunk is a fixed string around the part that changes: this runs for every token, on the thread
    that serves all calls, and building and dumping a dict would cost several times as much. render:
    a function for every type of event.
    """

    render: Mapping[type[Event], Callable[[Any], str]]

    def __init__(self, head: ReplyHead, *, id_prefix: str, kind: str, include_usage: bool) -> None:
        self._start = (
            f'data: {{"id":"{id_prefix}{head.id}","object":"{kind}",'
            f'"created":{head.created},"model":{quote(head.model)},"choices":['
        )
        self._end = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._include_usage = include_usage

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return sse.KEEP_ALIVE.encode()
        render = self.render
        return "".join([render[type(event)](event) for event in events]).encode("ascii")

    def chunk(self, choice: str) -> str:
        """A frame with this one choice, given as JSON."""
        return f"{self._start}{choice}{self._end}"

    def ended(self, event: Ended) -> str:
        if not self._include_usage:
            return sse.DONE
        usage = dumps(usage_object(event.usage))
        return f'{self._start}],"usage":{usage}}}\n\n{sse.DONE}'


# --- schema --------------------------------------------------------------------------------

BOOLEAN = {"type": ["boolean", "null"]}


def _number(low: float, high: float, *, above_low: bool = False) -> dict[str, Any]:
    least = "exclusiveMinimum" if above_low else "minimum"
    return {"type": ["number", "null"], least: low, "maximum": high}


def _integer(low: int, high: int = INT_MAX) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def common_schema() -> dict[str, Any]:
    """JSON schema of the fields that OpenAI's dialects share, by name."""
    return {
        "model": {"type": ["string", "null"], "description": "The served model's name."},
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        **_sampling_schema(),
        "stop": _stop_schema(),
        "n": _integer(1, MAX_CHOICES),
        "stop_token_ids": {
            "type": ["array", "null"],
            "items": {"type": "integer", "minimum": 0},
            "maxItems": MAX_STOP_TOKENS,
        },
        "ignore_eos": BOOLEAN,
        "stream": BOOLEAN,
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": BOOLEAN},
        },
        **extension_schema(),
    }


def _sampling_schema() -> dict[str, Any]:
    def bounded(name: str) -> dict[str, Any]:
        bound = SAMPLING[name]
        return _number(bound.low, bound.high, above_low=bound.above_low)

    return {
        "temperature": bounded("temperature") | {"description": "0 is greedy."},
        "top_p": bounded("top_p"),
        "top_k": _integer(-1) | {"description": "0 and -1: off."},
        "min_p": bounded("min_p"),
        "seed": _integer(-(2**63), 2**64 - 1),
        "repetition_penalty": bounded("repetition_penalty"),
        "presence_penalty": bounded("presence_penalty"),
        "frequency_penalty": bounded("frequency_penalty"),
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    }


def _stop_schema() -> dict[str, Any]:
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    several = {"type": "array", "items": stop, "maxItems": MAX_STOPS}
    return {"oneOf": [{"type": "null"}, stop, several]}


def extension_schema() -> dict[str, Any]:
    """firn's own extensions."""
    return {
        "speculation": {
            "enum": [*SPECULATION, None],
            "description": "off: draft no tokens for this request.",
        },
        "sparse_prefill": {
            "type": ["object", "null"],
            "description": "Read only this share of the uncached part of a long prompt: approximate.",
            "required": ["keep"],
            "properties": {"keep": {"type": "number", "minimum": 0.01, "maximum": 1}},
            "additionalProperties": False,
        },
        "cache": {
            "type": ["object", "null"],
            "description": "What the prefix cache does for this request; ttl in seconds.",
            "properties": {
                "read": BOOLEAN,
                "write": BOOLEAN,
                "ttl": _number(0, MAX_TTL_S, above_low=True),
            },
            "additionalProperties": False,
        },
        "cache_salt": {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": MAX_SALT_CHARS,
            "description": "Nothing cached is shared between requests with different salts.",
        },
    }
