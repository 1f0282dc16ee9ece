"""A client of the OpenAI API for the terminal: one chat request out, a stream of pieces back.

Errors of the server and the connection are raised as RequestFailed, with a one-line message.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import httpx

from firn.config import UsageError
from firn.core.errors import FirnError
from firn.core.values import Usage
from firn.host.machine import is_loopback

CONNECT_TIMEOUT_S = 10.0
LIST_TIMEOUT_S = 30.0
"""Listing models needs no loaded model: whatever takes longer hangs, or is not a model server."""
MAX_LISTED = 1000
"""The most models that firn lists in one answer; other servers ignore it."""
_PROGRESS = re.compile(r"(\d+)\s*/\s*(\d+)")


class RequestFailed(FirnError):
    """The server cannot be reached, refused the request, or broke off."""

    code = "server_fault"


class ServerNotFound(RequestFailed):
    """No server answers at the address."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat; None: the server decides."""

    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of the conversation. `images` are data URLs; they come before the text."""

    role: str
    content: str
    images: tuple[str, ...] = ()


# --- what comes back -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The server has read `n_done` of the prompt's tokens."""

    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class ReplyText:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyFinished:
    reason: str


@dataclass(frozen=True, slots=True)
class TokenCounts:
    usage: Usage


Piece = PrefillProgress | ReplyText | ReasoningText | ReplyFinished | TokenCounts

# --- server-sent events --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SseData:
    text: str


@dataclass(frozen=True, slots=True)
class SseComment:
    text: str


class SseDecoder:
    """Bytes in any pieces, whole events out. Owner: one response."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[SseData | SseComment]:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [event for line in lines for event in self._line(line)]

    def flush(self) -> list[SseData | SseComment]:
        """Drops an event whose closing empty line never arrived: the stream was cut."""
        self._rest, self._data = b"", []
        return []

    def _line(self, raw: bytes) -> Iterator[SseData | SseComment]:
        line = raw.rstrip(b"\r").decode("utf-8", errors="replace")
        name, _, value = line.partition(":")
        if not line:
            if self._data:
                yield SseData("\n".join(self._data))
            self._data = []
        elif not name:
            yield SseComment(value.strip())
        elif name == "data":
            self._data.append(value.removeprefix(" "))


# --- the client ----------------------------------------------------------------------------


class ChatClient:
    """Talks to one server. Owner: the chat command, on the main thread."""

    def __init__(
        self, url: str, *, api_key: str | None = None, list_timeout_s: float = LIST_TIMEOUT_S
    ) -> None:
        self._list_timeout_s = list_timeout_s
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        self._has_key = api_key is not None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = self._connections()
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise RequestFailed(f"{url} or the API key cannot be used: {error}") from error

    def _connections(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers=self._headers,
            # A long prompt may take minutes before the first byte.
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # A server on this machine is never reached through a proxy.
            trust_env=not is_loopback(httpx.URL(self.url).host),
        )

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def served_model(self) -> str:
        """The first model that the server lists."""
        return str(self.served_models()[0]["id"])

    def served_models(self) -> list[dict[str, Any]]:
        """The models that the server lists; at least one, each with its id."""
        try:
            response = self._http.get(
                "/v1/models", params={"limit": MAX_LISTED}, timeout=self._list_timeout_s
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._raise_failure(error)
        self._check(response)
        try:
            models: list[dict[str, Any]] = response.json()["data"]
            str(models[0]["id"])
            return models
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{self.url} does not look like an OpenAI-style server.") from error

    def stored_block(self, key: str) -> dict[str, Any]:
        """What the server's cache knows of the prefix that ends with this block."""
        try:
            response = self._http.get(f"/v1/cache/tree/{key}", timeout=self._list_timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._raise_failure(error)
        self._check(response)
        try:
            block: dict[str, Any] = response.json()
            if block.get("enabled") is False:
                raise RequestFailed(f"{self.url} has no prefix cache: {block.get('why')}")
            str(block["node"]), dict(block["where"])
            return block
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(f"{self.url} does not look like a firn server.") from error

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._raise_failure(error)
        if response.status_code in (404, 405) and "POST " in response.text:  # a server without it
            raise RequestFailed(f"{self.url} serves one model, which is always loaded.")
        self._check(response)
        try:
            answer: dict[str, Any] = response.json()
            str(answer["id"])
            str(answer["state"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"{self.url} does not look like a firn server.") from error
        return answer

    def ask(
        self, turns: Sequence[ChatTurn], *, options: ChatOptions
    ) -> Generator[Piece, None, None]:
        """The reply, piece by piece. Closing the iterator drops the request."""
        body = _body(turns, options)
        decoder = SseDecoder()
        finished = False
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code >= 400:
                    response.read()
                self._check(response)
                for chunk in response.iter_bytes():
                    for event in decoder.feed(chunk):
                        for piece in _pieces(event):
                            finished = finished or isinstance(piece, ReplyFinished)
                            yield piece
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._raise_failure(error)
        except UnicodeEncodeError as error:  # undecodable bytes of a file or an argument
            raise RequestFailed("The message is not UTF-8 text.") from error
        except KeyboardInterrupt:
            # Just after the request was sent, httpx would leave the connection open, and the server
            # would go on.
            self._http.close()
            self._http = self._connections()
            raise
        if not finished:
            raise RequestFailed(f"{self.url} ended the reply before it was finished.")

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 401:
            if self._has_key:
                raise RequestFailed(f"{self.url} does not accept this API key.")
            raise RequestFailed(
                f"{self.url} requires an API key: give --api-key or set FIRN_API_KEY."
            )
        if response.status_code >= 400:
            raise RequestFailed(f"{self.url} answered {response.status_code}: {_message(response)}")

    def _raise_failure(self, error: httpx.HTTPError | httpx.InvalidURL) -> NoReturn:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise ServerNotFound(
                f"No server answers at {self.url}; start one with `firn serve` or give --url."
            ) from error
        if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
            raise RequestFailed(
                f"{self.url} is not a valid address; try http://127.0.0.1:8000."
            ) from error
        if isinstance(error, httpx.ReadTimeout):
            raise RequestFailed(f"{self.url} accepts connections but does not answer.") from error
        raise RequestFailed(f"The connection to {self.url} broke: {error}") from error


def _body(turns: Sequence[ChatTurn], options: ChatOptions) -> dict[str, Any]:
    messages = [{"role": turn.role, "content": _content(turn)} for turn in turns]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    body: dict[str, Any] = {
        "model": options.model or "",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    return body


def _content(turn: ChatTurn) -> str | list[dict[str, Any]]:
    if not turn.images:
        return turn.content
    images = [{"type": "image_url", "image_url": {"url": url}} for url in turn.images]
    return [*images, {"type": "text", "text": turn.content}]


def image_url(path: Path) -> str:
    """A picture file as a data URL. Raises UsageError."""
    try:
        data = path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~someone, who does not exist
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: the picture cannot be read: {why}") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200] or response.reason_phrase


def _pieces(event: SseData | SseComment) -> Iterator[Piece]:
    if isinstance(event, SseComment):
        progress = _PROGRESS.search(event.text)
        if progress:
            yield PrefillProgress(int(progress[1]), int(progress[2]))
        return
    if event.text == "[DONE]":
        return
    try:
        chunk = json.loads(event.text)
    except ValueError as error:
        raise RequestFailed("The server sent an event that is not JSON.") from error
    if not isinstance(chunk, Mapping):
        return
    if chunk.get("error"):
        fault = chunk["error"]
        raise RequestFailed(
            str(fault.get("message", fault) if isinstance(fault, Mapping) else fault)
        )
    for choice in chunk.get("choices") or ():
        yield from _choice(choice)
    if chunk.get("usage"):
        yield TokenCounts(_usage(chunk["usage"]))


def _choice(choice: Mapping[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta") or {}
    # Servers disagree about the name; firn and most local ones use reasoning_content.
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if reasoning:
        yield ReasoningText(reasoning)
    if delta.get("content"):
        yield ReplyText(delta["content"])
    if choice.get("finish_reason"):
        yield ReplyFinished(choice["finish_reason"])


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        n_prompt=usage.get("prompt_tokens") or 0,
        n_completion=usage.get("completion_tokens") or 0,
        n_cached=details.get("cached_tokens") or 0,
    )
