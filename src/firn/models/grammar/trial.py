"""The trial process: compiles grammars before the server does. `TrialProcess` starts and asks it.

A grammar may overflow the compiler's stack, or take minutes and gigabytes. So this process, which has
one thread and the vocabulary, forks a child for each grammar: whatever that does ends the child. It
sees requests only, and answers in JSON.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from firn.models.grammar.relax_schema import relax
from firn.models.grammar.schema_faults import is_endless, locate
from firn.models.grammar.source import (
    LIMITS,
    STACK_NBYTES,
    Source,
    assembled,
    fault_of,
    in_llguidance,
    on_large_stack,
    one_line,
)

CPU_S = 2.0
"""CPU time of one trial; the server then takes as long again."""
WALL_S = 30.0
"""For a machine that is busy with other things."""
MAX_NBYTES = 128 * 2**20
"""Memory of one compiled grammar."""
RELAX_S = 1.0
"""CPU time to find out what can be enforced of all schemas of one request."""
LOCATE_S = 0.5
"""CPU time to find which part of a refused schema is at fault; the part found by then is named."""
N_STEPS = 4
"""Tokens of a random reply whose masks are computed."""
STEP_S = 0.1
"""CPU time for one mask: all streams wait for it."""
MORE, NO_MORE = b"+", b"-"
PID_NBYTES = 4
"""A child sends its number before the work: one that ends after this has been ended by its grammar."""

Reply = dict[str, Any]


class GrammarRefused(Exception):
    """A grammar is at fault: which of the request's, and what to tell its sender."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index
        self.message = message


class VocabularyTable:
    """A vocabulary as llguidance takes it: token by token."""

    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special: Sequence[int],
        eos: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = list(special)
        self.eos_token_id = eos
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode(text)


def main() -> None:
    """argv: the number of the socket on which requests arrive, each as a socket of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's terminal sends it to both
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    control = socket.socket(fileno=int(sys.argv[1]))
    vocabulary = _vocabulary(json.loads(_message(control)))
    while _fork_one(vocabulary, control):
        pass


def _fork_one(vocabulary: LLTokenizer, control: socket.socket) -> bool:
    """Fork a child, which waits for a request and serves it; return when it has one. False: no more
    will come. So a request finds a child that waits already."""
    taken, takes = os.pipe()
    if os.fork() == 0:
        os.close(taken)
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        control.close()
        os.write(takes, MORE if fds else NO_MORE)
        os.close(takes)
        if fds:
            _serve(vocabulary, socket.socket(fileno=fds[0]))
        os._exit(0)
    os.close(takes)
    said = os.read(taken, 1)
    os.close(taken)
    return said != NO_MORE


def _vocabulary(given: Mapping[str, Any]) -> LLTokenizer:
    source: Any = given["definition"]
    if source is None:
        tokens = [base64.b64decode(token) for token in given["tokens"]]
        # Only the text that a grammar forces is tokenized, and that is not used here.
        source = VocabularyTable(
            tokens, special=given["special"], eos=min(given["eos"]), encode=lambda text: []
        )
    return LLTokenizer(source, n_vocab=given["n_vocab"], eos_token=given["eos"])


def _serve(vocabulary: LLTokenizer, asked: socket.socket) -> None:
    """Answer one request and end the process."""
    try:
        _limit()
        asked.sendall(os.getpid().to_bytes(PID_NBYTES, "big"))
        request = json.loads(_message(asked))
        reply = on_large_stack(lambda: _reply(vocabulary, request))
        asked.sendall(json.dumps(reply).encode())
    finally:
        os._exit(0)


def _limit() -> None:
    """Let the system end this process if it takes too long, or too much memory."""
    for timer, seconds in ((signal.ITIMER_PROF, CPU_S), (signal.ITIMER_REAL, WALL_S)):
        signal.setitimer(timer, seconds)
    most = _virtual_nbytes() + STACK_NBYTES + 4 * MAX_NBYTES
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, most)):
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit on address space
            resource.setrlimit(limit, (value, value))


def _reply(vocabulary: LLTokenizer, request: Mapping[str, Any]) -> Reply:
    if "schemas" in request:
        until = time.thread_time() + RELAX_S
        return {"relaxed": [relax(schema, until=until) for schema in request["schemas"]]}
    sources = [Source(*source) for source in request["sources"]]
    try:
        return {"nbytes": _try(vocabulary, sources, forces=request["forces"])}
    except GrammarRefused as e:
        return {"refused": e.index, "message": e.message}


def _try(vocabulary: LLTokenizer, sources: Sequence[Source], *, forces: bool) -> int:
    """Compile the grammar and begin a reply with it. Returns its size. Raises GrammarRefused."""
    before = _private_nbytes()
    for i, source in enumerate(sources):
        if source.kind == "json_schema" and is_endless(json.loads(source.text)):
            raise GrammarRefused(i, "every value of this schema would contain itself")
    matcher = LLMatcher(vocabulary, assembled(sources, forces=forces), log_level=0, limits=LIMITS)
    if matcher.is_error():
        for i, source in enumerate(sources[1:], 1):
            fault = fault_of(in_llguidance(source))
            if fault:
                raise _refused(i, source, fault)
        raise _refused(0, sources[0], one_line(matcher.get_error()))
    _begin_reply(matcher, sources[0])
    nbytes = max(_private_nbytes() - before, 0)
    if nbytes > MAX_NBYTES:
        raise GrammarRefused(0, f"this grammar takes more than {MAX_NBYTES >> 20} MiB of memory")
    return nbytes


def _begin_reply(matcher: LLMatcher, source: Source) -> None:
    """Write the first tokens of a random reply: its masks must exist, and be computed in time."""
    chance = random.Random(0)
    for step in range(N_STEPS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(0, source, one_line(matcher.get_error()))
        token = _any_token(mask, chance)
        if step == 0 and (token is None or (matcher.is_stopped() and not matcher.is_accepting())):
            raise GrammarRefused(0, "no text can satisfy this grammar")
        if time.thread_time() - began > STEP_S:
            raise GrammarRefused(
                0, "this grammar takes too much time for each token; use a simpler one"
            )
        if token is None or matcher.is_stopped() or not matcher.consume_token(token):
            return


def _any_token(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens whose bits are set; None: there is none."""
    start = chance.randrange(len(mask))
    rotated = mask[start:] + mask[:start]
    n_empty = len(rotated) - len(rotated.lstrip(b"\0"))
    if n_empty == len(mask):
        return None
    bits = rotated[n_empty]
    return (start + n_empty) % len(mask) * 8 + (bits & -bits).bit_length() - 1


def _refused(index: int, source: Source, fault: str) -> GrammarRefused:
    at = ""
    if source.kind == "json_schema":
        until = time.thread_time() + LOCATE_S

        def fault_in_time(schema: Any) -> str:
            return fault_of({"json_schema": schema}) if time.thread_time() < until else ""

        pointer, fault = locate(json.loads(source.text), fault, fault_in_time)
        at = f" at #{pointer}"
    names = {"json_schema": "schema", "json_object": "schema", "lark": "grammar"}
    name = names.get(source.kind, source.kind)
    return GrammarRefused(index, f"the {name} is not supported{at}: {one_line(fault)}")


def _message(source: socket.socket) -> bytes:
    """Its length in eight bytes, then the message."""
    header = _exactly(source, 8)
    return _exactly(source, int.from_bytes(header, "big"))


def _exactly(source: socket.socket, n: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < n:
        piece = source.recv(min(n - len(pieces), 1 << 20))
        if not piece:
            sys.exit()
        pieces += piece
    return bytes(pieces)


def _virtual_nbytes() -> int:
    return _statm()[0]


def _private_nbytes() -> int:
    """Memory that is this process's own, now or, on macOS, at most so far."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, resident, shared = _statm()
    return resident - shared


def _statm() -> tuple[int, int, int]:
    """(address space, resident memory, what of it is shared), in bytes; zeros on other systems."""
    try:
        with open("/proc/self/statm") as file:
            virtual, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return (0, 0, 0)
    page = resource.getpagesize()
    return (virtual * page, resident * page, shared * page)


if __name__ == "__main__":
    main()
