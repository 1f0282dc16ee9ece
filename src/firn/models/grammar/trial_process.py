"""Starts the trial process, and asks it about grammars (see `trial`)."""

from __future__ import annotations

import base64
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from firn.core.errors import Overloaded
from firn.models.grammar.trial import PID_NBYTES

log = logging.getLogger("firn.grammar")

MODULE = "firn.models.grammar.trial"
TIMEOUT_S = 60.0
"""For one trial; the first waits until the process has read the vocabulary."""
PROMPT_S, LOW_PRIORITY = 0.1, 15
"""A trial that takes longer has this priority from then on: no stream shall wait for a hard grammar."""


@dataclass(frozen=True, slots=True)
class VocabularySpec:
    """What llguidance builds its tokenizer from: a definition, or else each token's bytes."""

    n_vocab: int
    eos: Sequence[int]
    definition: str | None = None
    tokens: Sequence[bytes] = ()
    special: Sequence[int] = ()

    def message(self) -> bytes:
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        fields = {"n_vocab": self.n_vocab, "eos": list(self.eos), "definition": self.definition}
        return json.dumps({**fields, "tokens": tokens, "special": list(self.special)}).encode()


class TrialFailed(Exception):
    """What was asked has ended its child: it takes too much time, memory or stack."""


class TrialProcess:
    """Owner: the compiler. Thread-safe: trials of several threads run side by side.

    The process starts with the first trial, or `start`, and again if it has ended.
    """

    def __init__(self, vocabulary: VocabularySpec) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        with self._lock:
            if self._control is None:
                self._control = self._started()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request. Raises TrialFailed, and Overloaded if no process can be had."""
        message = json.dumps(request).encode()
        for _ in range(2):
            reply = self._asked(message)
            if reply is not None:
                break
            log.warning("the process that tries grammars has ended; another one starts")
        else:
            raise Overloaded("Grammars cannot be compiled at the moment; try again shortly.")
        if not reply:
            raise TrialFailed
        return dict(json.loads(reply))

    def _asked(self, message: bytes) -> bytes | None:
        """The reply; empty: the child has ended before it; None: there was no child."""
        mine, theirs = socket.socketpair()
        with mine:
            mine.settimeout(TIMEOUT_S)
            try:
                with theirs:
                    self._pass_on(theirs)
                child = int.from_bytes(mine.recv(PID_NBYTES, socket.MSG_WAITALL), "big")
                if not child:
                    raise BrokenPipeError
            except OSError:
                self._drop()
                return None
            pieces = []
            try:
                mine.sendall(len(message).to_bytes(8, "big") + message)
                mine.settimeout(PROMPT_S)
                with suppress(TimeoutError):
                    pieces.append(mine.recv(1 << 20))
                if not pieces:
                    _yield_to_streams(child)
                mine.settimeout(TIMEOUT_S)
                while piece := mine.recv(1 << 20):
                    pieces.append(piece)
            except OSError:
                return b""
        return b"".join(pieces)

    def _pass_on(self, theirs: socket.socket) -> None:
        with self._lock:
            if self._control is None:
                self._control = self._started()
            socket.send_fds(self._control, [b"."], [theirs.fileno()])

    def _drop(self) -> None:
        with self._lock:
            self._control = None
            self._end()

    def _started(self) -> socket.socket:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, ours, self.process)
        message = self._vocabulary.message()
        ours.sendall(len(message).to_bytes(8, "big") + message)
        return ours


def _yield_to_streams(child: int) -> None:
    """Let everything else that runs here go first."""
    with suppress(OSError):  # it has just ended
        os.setpriority(os.PRIO_PROCESS, child, LOW_PRIORITY)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()  # which ends it
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
