"""Reads traces: firn's own, Mooncake's JSONL, and lists of agents' sessions.

A line of a Mooncake trace has `timestamp` (milliseconds), `input_length`, `output_length` and
`hash_ids`, one for each block of 512 tokens. firn's own lines have the same form and more fields,
`block_tokens` among them.

A session is a list of messages, or an object that has one. Every message of the assistant is one
request, whose prompt is everything before it. Token counts are estimated from the text, and so are
times where none are given.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any

from firn.traces.trace import TraceEntry, TraceError

MOONCAKE_BLOCK = 512
SESSION_BLOCK = 256
CHARS_PER_TOKEN = 4
TURN_S, SESSION_S = 15.0, 60.0
"""Between turns, and between the beginnings of sessions, if the file has no times."""
MESSAGES = ("messages", "conversations", "conversation", "turns", "trajectory", "history")
ASSISTANTS = frozenset({"assistant", "gpt", "ai", "model", "agent"})
TIMES = ("timestamp", "created_at", "time", "start_time")


@dataclass(frozen=True)
class TraceSource:
    """A trace while it is read: requests in the order of the file."""

    block: int
    entries: Iterator[TraceEntry]


def read(path: Path, *, model: str | None = None) -> TraceSource:
    """model: selects its requests from a trace of several models. Raises TraceError, OSError.

    The file is opened once: it may be a pipe.
    """
    file = path.open("rb")
    text: IO[bytes] = file
    if file.peek(1)[:1] == b"[":
        with file:
            raw = file.read()
        whole = _list(raw)
        if whole is not None:
            return TraceSource(SESSION_BLOCK, _of_sessions(whole, str(path)))
        text = BytesIO(raw)
    lines = _objects(text, path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"There is no request in {path}.")
    number, line = first
    if isinstance(line, list) or any(name in line for name in MESSAGES):
        sessions = (one for _, one in chain([first], lines))
        return TraceSource(SESSION_BLOCK, _of_sessions(sessions, str(path)))
    if "hash_ids" not in line:
        raise TraceError(
            f"{path}, line {number} has neither hash_ids (a trace) nor messages (a session)."
        )
    requests = _of_model(chain([first], lines), path, model)
    first = next(requests, None)
    if first is None:
        raise TraceError(f"There is no request of {model} in {path}.")
    number, line = first
    block = _block(line, path, number)
    return TraceSource(block, _of_lines(chain([first], requests), path, block))


def _list(raw: bytes) -> list[Any] | None:
    """The sessions of a file that is one list, either of sessions or of one session's messages;
    None for any other file."""
    try:
        items = json.loads(raw)
    except ValueError:
        return None
    is_session = items and isinstance(items[0], dict) and ("role" in items[0] or "from" in items[0])
    return [items] if is_session else list(items)


def _objects(text: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    """The number and JSON value of each line; closes the text at its end."""
    with text:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as e:
                if number > 1 and not line.endswith(b"\n"):
                    return  # its writer was stopped in the middle of the line
                raise TraceError(f"{path}, line {number} is not JSON: {e}") from e
            if not isinstance(value, dict | list):
                raise TraceError(f"{path}, line {number} is neither an object nor a list.")
            yield number, value


def _block(line: Mapping[str, Any], path: Path, number: int) -> int:
    block = line.get("block_tokens", MOONCAKE_BLOCK)
    if not isinstance(block, int) or block < 1:
        raise TraceError(f"{path}, line {number}: block_tokens must be a whole number above 0.")
    return block


def _of_model(
    lines: Iterable[tuple[int, Any]], path: Path, model: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines:
        if not isinstance(line, dict):
            raise TraceError(f"{path}, line {number} is not a request: expected a JSON object.")
        if model is None or line.get("model") == model:
            yield number, line


def _of_lines(
    lines: Iterable[tuple[int, dict[str, Any]]], path: Path, block: int
) -> Iterator[TraceEntry]:
    for number, line in lines:
        if _block(line, path, number) != block:
            raise TraceError(
                f"{path}, line {number}: blocks of {line.get('block_tokens')} tokens after blocks "
                f"of {block}; all must have the same size (if there are several models, choose "
                "one: --model, or --trace-model of `firn bench replay`)."
            )
        try:
            yield _entry(line, block)
        except (KeyError, TypeError, ValueError) as e:
            raise TraceError(f"{path}, line {number}: {e!r}") from e


def _entry(line: Mapping[str, Any], block: int) -> TraceEntry:
    n_prompt, n_reply = int(line["input_length"]), int(line.get("output_length") or 0)
    n_whole = n_prompt // block
    names = line["hash_ids"]
    if len(names) < n_whole:
        raise ValueError(f"{len(names)} hash_ids for {n_prompt} tokens in blocks of {block}")
    reply = line.get("output_hash_ids") or ()
    first_ms = line.get("first_token_ms")
    return TraceEntry(
        at_s=float(line["timestamp"]) / 1000,
        n_prompt=n_prompt,
        n_reply=n_reply,
        blocks=_names(names[:n_whole]),
        reply_blocks=_names(reply),
        cached=tuple((str(k), int(n)) for k, n in (line.get("cached") or {}).items()),
        first_s=None if first_ms is None else float(first_ms) / 1000,
        model=str(line.get("model") or ""),
        token_nbytes=int(line.get("token_bytes") or 0),
    )


def line_of(entry: TraceEntry, *, block: int, rest: int | None = None) -> str:
    """An entry as a line that `read` understands. rest: the hash of a last block that is not whole."""
    first_ms = None if entry.first_s is None else round(entry.first_s * 1000, 1)
    fields = {
        "timestamp": round(entry.at_s * 1000),
        "input_length": entry.n_prompt,
        "output_length": entry.n_reply,
        "hash_ids": entry.blocks if rest is None else (*entry.blocks, rest),
        "output_hash_ids": entry.reply_blocks,
        "block_tokens": block,
        "model": entry.model,
        "cached": dict(entry.cached),
        "first_token_ms": first_ms,
        "token_bytes": entry.token_nbytes,
    }
    return json.dumps(fields, separators=(",", ":"))


def _names(values: Sequence[Any]) -> tuple[int, ...]:
    try:
        array("Q", values)  # all of them are numbers that fit: the usual case, and fast
        return tuple(values)
    except (TypeError, OverflowError):
        return tuple(map(_unsigned, values))


def _unsigned(value: Any) -> int:
    if isinstance(value, str):
        return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest())
    return int(value) & (1 << 64) - 1


# --- sessions ------------------------------------------------------------------------------


def _of_sessions(sessions: Iterable[Any], where: str) -> Iterator[TraceEntry]:
    for i, session in enumerate(sessions):
        try:
            yield from _of_session(session, start_s=i * SESSION_S)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise TraceError(f"{where}: session {i + 1} cannot be read: {e!r}") from e


def _of_session(session: Any, *, start_s: float) -> Iterator[TraceEntry]:
    about: Mapping[str, Any] = session if isinstance(session, dict) else {}
    messages = session if isinstance(session, list) else _messages(about)
    at = _time(about)
    at = start_s if at is None else at
    text = _HashedText(SESSION_BLOCK)
    if about.get("tools"):
        text.add(json.dumps(about["tools"], sort_keys=True))
    if isinstance(about.get("system"), str):
        text.add(f"system\n{about['system']}")
    for message in messages:
        role = str(message.get("role") or message.get("from") or "user")
        content = _text(message)
        sent_at = _time(message)
        at = at if sent_at is None else sent_at
        if role.lower() not in ASSISTANTS:
            text.add(f"{role}\n{content}")
            continue
        n_prompt, blocks = text.n_tokens, tuple(text.blocks)
        text.add(f"{role}\n{content}")
        reply = tuple(text.blocks[len(blocks) :])
        yield TraceEntry(at, n_prompt, text.n_tokens - n_prompt, blocks, reply)
        at += TURN_S


def _messages(session: Mapping[str, Any]) -> Sequence[Any]:
    for name in MESSAGES:
        messages = session.get(name)
        if isinstance(messages, list):
            return messages
    raise ValueError("it has no list of messages")


def _text(message: Mapping[str, Any]) -> str:
    parts = [message.get(name) for name in ("content", "value", "text", "tool_calls")]
    return "".join(p if isinstance(p, str) else json.dumps(p, sort_keys=True) for p in parts if p)


def _time(entry: Mapping[str, Any]) -> float | None:
    """In seconds; None: the entry has no time. Numbers above 1e11 (year 5138) are milliseconds."""
    time = next((entry[name] for name in TIMES if entry.get(name) is not None), None)
    if isinstance(time, str):
        return datetime.fromisoformat(time).timestamp()
    if time is None or not math.isfinite(float(time)):
        return None
    return float(time) / 1000 if float(time) > 1e11 else float(time)


class _HashedText:
    """A text as it grows: its length in tokens, and the hashes of its whole blocks."""

    def __init__(self, block: int) -> None:
        self._n_chars = block * CHARS_PER_TOKEN
        self._rest = ""
        self._digest = b""
        self.blocks: list[int] = []

    @property
    def n_tokens(self) -> int:
        n_whole = len(self.blocks) * self._n_chars
        return -(-(n_whole + len(self._rest)) // CHARS_PER_TOKEN)

    def add(self, text: str) -> None:
        rest = self._rest + text + "\n"
        while len(rest) >= self._n_chars:
            piece, rest = rest[: self._n_chars], rest[self._n_chars :]
            raw = piece.encode("utf-8", "surrogatepass")
            self._digest = hashlib.blake2b(raw, key=self._digest, digest_size=16).digest()
            self.blocks.append(int.from_bytes(self._digest[:8]))
        self._rest = rest
