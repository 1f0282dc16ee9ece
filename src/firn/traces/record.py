"""`--record-trace`: one JSON line per request, in Mooncake's form with more fields (see read.py).

No text and no token is written: blocks are named by hashes with a salt that is stored in the user's
cache folder and never in the trace, so that nobody who has only the trace can test whether it
contains a prompt. Requests with the same model and namespace share names; others never do.

`record` only queues; hashing and writing happen on a thread. Requests that do not fit in the queue are
dropped and counted. Several processes may append to one file: a line is one write.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
from collections import deque
from pathlib import Path

import numpy as np

from firn.core.errors import SetupError
from firn.core.keys import packed_tokens
from firn.core.private_folder import make_private
from firn.core.units import GIB
from firn.core.values import KeyTokens, ServedRequest
from firn.traces.read import line_of
from firn.traces.trace import TraceEntry

log = logging.getLogger("firn.traces")

MAX_QUEUED_TOKENS = 4 << 20
"""Limit for the requests that wait to be written: 80 MiB with their key tokens."""
MAX_FILE_NBYTES = GIB
END_S = 2.0
SALT_NBYTES = 32
ID_BITS = 52
"""Numbers of this size stay exact in every JSON reader."""


def open_trace(path: Path) -> int:
    """A descriptor to append to. A new file is readable only by this user. Raises SetupError."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
    except OSError as e:
        raise SetupError(f"--record-trace {path}: {e.strerror}") from e
    os.set_blocking(fd, True)  # the thread that writes may wait for a slow reader
    return fd


class Recorder:
    """Implements core.ports.Recorder. Owner: the server; `record` from any thread."""

    def __init__(
        self,
        fd: int,
        *,
        model: str,
        block: int,
        token_nbytes: int,
        salt: bytes,
        max_file_nbytes: int = MAX_FILE_NBYTES,
        max_queued_tokens: int = MAX_QUEUED_TOKENS,
    ) -> None:
        """Takes ownership of the descriptor."""
        self._fd = fd
        self._model = model
        self._block = block
        self._token_nbytes = token_nbytes
        self._salt = salt
        self._max_file_nbytes = max_file_nbytes
        self._max_queued_tokens = max_queued_tokens
        self._queue: deque[ServedRequest] = deque()
        self._n_queued = 0
        """In tokens."""
        self._changed = threading.Condition()
        self._closing = False
        self._why_not = ""
        """Why nothing is written any more."""
        self.n_dropped = 0
        self._thread = threading.Thread(target=self._run, name="firn-trace", daemon=True)
        self._thread.start()

    def record(self, served: ServedRequest) -> None:
        n_tokens = len(served.prompt) + len(served.reply)
        with self._changed:
            full = self._queue and self._n_queued + n_tokens > self._max_queued_tokens
            if self._closing or self._why_not or full:
                self.n_dropped += 1
                return
            self._queue.append(served)
            self._n_queued += n_tokens
            self._changed.notify()

    def close(self) -> None:
        """Writes the queued requests, for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._stop(f"writing the last requests took longer than {END_S:g} s")
        if self.n_dropped:
            log.warning("--record-trace: %d requests are missing from the trace", self.n_dropped)

    def _run(self) -> None:
        with contextlib.closing(_Descriptor(self._fd)):
            while (served := self._next()) is not None:
                try:
                    self._write(served)
                except Exception as e:
                    # The thread's outermost frame: serving goes on without a trace.
                    self._stop(repr(e))

    def _next(self) -> ServedRequest | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            if not self._queue:
                return None
            served = self._queue.popleft()
            self._n_queued -= len(served.prompt) + len(served.reply)
            return served

    def _write(self, served: ServedRequest) -> None:
        line = f"{self._line(served)}\n".encode()
        if os.fstat(self._fd).st_size + len(line) > self._max_file_nbytes:
            self._stop(f"the file has reached {self._max_file_nbytes >> 20} MiB")
            return
        while line:
            line = line[os.write(self._fd, line) :]

    def _stop(self, why: str) -> None:
        with self._changed:
            is_news = not self._why_not
            self._why_not = why
            self.n_dropped += 1 + len(self._queue)
            self._queue.clear()
            self._n_queued = 0
        if is_news:
            log.warning("--record-trace: recording stopped: %s", why)

    def _line(self, served: ServedRequest) -> str:
        prompt = packed_tokens(served.prompt).tokens
        n_prompt, block = len(prompt), self._block
        root = self._hash(self._model.encode(), served.namespace.encode())
        chain = self._chain(root, np.append(prompt, np.array(served.reply, dtype=np.uint64)))
        n_whole, rest = n_prompt // block, None
        if n_prompt % block:
            above = chain[n_whole - 1] if n_whole else root
            raw = prompt[n_whole * block :].astype("<u8", copy=False).tobytes()
            rest = _number(self._hash(above, raw))
        names = tuple(map(_number, chain))
        entry = TraceEntry(
            served.at_s,
            n_prompt,
            served.n_reply,
            names[:n_whole],
            names[n_whole:],
            served.tiers,
            served.first_s,
            self._model,
            self._token_nbytes,
        )
        return line_of(entry, block=block, rest=rest)

    def _chain(self, root: bytes, tokens: KeyTokens) -> list[bytes]:
        """The digest of every whole block."""
        raw = tokens.astype("<u8", copy=False).tobytes()
        step, parent, digests = 8 * self._block, root, list[bytes]()
        for start in range(0, len(raw) - step + 1, step):
            parent = self._hash(parent, raw[start : start + step])
            digests.append(parent)
        return digests

    def _hash(self, *fields: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._salt, digest_size=16)
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8]) >> (64 - ID_BITS)


def user_salt(folder: Path) -> bytes:
    """The user's salt, made on first use, to join traces of several processes and days.

    If the folder cannot be used, a salt for this process alone.
    """
    path = folder / "trace.salt"
    fresh = secrets.token_bytes(SALT_NBYTES)
    with contextlib.suppress(OSError):
        make_private(folder)
        temp = folder / f".trace.salt.{os.getpid()}"
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(fresh)
            with contextlib.suppress(FileExistsError):
                os.link(temp, path)  # the first process wins; all others use its salt
        finally:
            temp.unlink(missing_ok=True)
        kept = path.read_bytes()
        if len(kept) == SALT_NBYTES:
            return kept
    log.warning("%s cannot be used: this trace cannot be joined with others", path)
    return fresh
