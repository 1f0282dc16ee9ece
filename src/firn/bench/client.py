"""A server under test, used over HTTP as any client would: one streamed chat, with its times."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from firn.bench.report import BenchError

N_ATTEMPTS = 3
LIST_S = 10.0
WORDS = "amber basin cedar delta ember fjord grove haven inlet jetty knoll larch marsh north oxbow pines"
WORD_LIST = WORDS.split()

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimedReply:
    """One streamed answer. times: perf_counter values, one for each piece of text."""

    text: str
    first_s: float
    total_s: float
    times: tuple[float, ...]
    n_prompt: int
    n_cached: int
    n_completion: int


@dataclass(frozen=True, slots=True)
class Target:
    """url: with or without /v1. model: its name in the API."""

    url: str
    model: str
    name: str = ""
    api_key: str | None = None
    timeout_s: float = 300.0

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        on_piece: Callable[[float], object] = lambda now: None,
        **options: object,
    ) -> TimedReply:
        """A streamed chat, greedy unless `options`, which are added to the request, say otherwise.
        Raises BenchError for anything but a complete answer."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
            **options,
        }
        start = time.perf_counter()
        reader = _StreamReader(start, on_piece)
        try:
            with contextlib.closing(_connection(self.url, self.timeout_s)) as connection:
                response = self._post(connection, json.dumps(body))
                if response.status in (400, 422) and ignore_eos:
                    response.read()  # perhaps it does not know the field
                    del body["ignore_eos"]
                    response = self._post(connection, json.dumps(body))
                if response.status != 200:
                    body_start = response.read()[:200]
                    raise BenchError(f"the server answered {response.status}: {body_start!r}")
                for event in _events(response):
                    reader.add(event)
        except BenchError as e:
            raise BenchError(f"{self.name or self.url}: {e}") from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise BenchError(f"{self.name or self.url}: the connection broke: {e!r}") from e
        if not reader.ended:
            raise BenchError(f"{self.name or self.url}: the stream ended without a finish_reason")
        return reader.reply(time.perf_counter() - start)

    def _post(self, connection: http.client.HTTPConnection, body: str) -> http.client.HTTPResponse:
        """Retries when the server resets the connection: mlx-lm's accepts five at a time."""
        for attempt in range(N_ATTEMPTS):
            try:
                path = f"{_base(self.url)}/chat/completions"
                connection.request("POST", path, body, _headers(self.api_key))
                return connection.getresponse()
            except ConnectionResetError:
                if attempt + 1 == N_ATTEMPTS:
                    raise
                connection.close()
        raise AssertionError


class _StreamReader:
    """A reply's stream, as far as it has been read."""

    def __init__(self, start: float, on_piece: Callable[[float], object]) -> None:
        self._start = start
        self._on_piece = on_piece
        self._text: list[str] = []
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._first_s = 0.0
        self.ended = False

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            raise BenchError(f"the server sent an error: {str(event['error'])[:200]}")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            piece = _text(choice.get("delta") or {})
            self.ended = self.ended or bool(choice.get("finish_reason"))
            if not piece and not self.ended:
                continue
            now = time.perf_counter()
            self._first_s = self._first_s or now - self._start
            if piece:
                self._text.append(piece)
                self._times.append(now)
                self._on_piece(now)

    def reply(self, total_s: float) -> TimedReply:
        usage = self._usage
        details = usage.get("prompt_tokens_details") or {}
        return TimedReply(
            "".join(self._text),
            self._first_s,
            total_s,
            tuple(self._times),
            n_prompt=usage.get("prompt_tokens") or 0,
            n_cached=details.get("cached_tokens") or 0,
            n_completion=usage.get("completion_tokens") or len(self._times),
        )


def models(url: str, *, api_key: str | None = None, timeout_s: float = LIST_S) -> list[str]:
    """The names that a server lists. Raises BenchError."""
    try:
        with contextlib.closing(_connection(url, timeout_s)) as connection:
            connection.request("GET", f"{_base(url)}/models", headers=_headers(api_key))
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise BenchError(f"{url} answered {response.status}: {body[:200]!r}")
            listed = json.loads(body).get("data", ())
            return [str(entry["id"]) for entry in listed if entry.get("id")]
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as e:
        raise BenchError(f"no server answers at {url}: {e}") from e


def target(url: str, *, model: str | None = None, api_key: str | None = None) -> Target:
    """The server at this address, with the first model that it lists if none is named."""
    if model is None:
        listed = models(url, api_key=api_key)
        if not listed:
            raise BenchError(f"{url} lists no models: name one with --model")
        model = listed[0]
    return Target(url, model, api_key=api_key)


def words(n: int, *, seed: object) -> str:
    """Text that is unique to the seed; about five tokens per word."""
    rng = random.Random(str(seed))
    return " ".join(f"{rng.choice(WORD_LIST)}{rng.randrange(100)}" for _ in range(n))


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"{url} is not an address; write it like http://127.0.0.1:8000")
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def _base(url: str) -> str:
    path = urlsplit(url).path.rstrip("/")
    return path if path.endswith("/v1") else f"{path}/v1"


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers | ({"authorization": f"Bearer {api_key}"} if api_key else {})


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each data line; skips comment lines and the end mark."""
    for line in lines:
        if line.startswith(b"data:") and not line.strip().endswith(b"[DONE]"):
            yield json.loads(line[5:])


def _text(delta: Mapping[str, Any]) -> str:
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return (delta.get("content") or "") + reasoning
