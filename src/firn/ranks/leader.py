"""Rank 0's end of the connections to the others.

Calls are sent in the order of `tell`. One thread per follower receives answers, and another one
passes them to their handlers: even while a handler blocks, a follower that dies or freezes is
noticed.

Owner: the process, for as long as it runs.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from firn.core.errors import SetupError
from firn.ranks.calls import OnAnswer, RankCall, RankLost
from firn.ranks.heartbeat import BEAT_S, N_SILENT, Heartbeat
from firn.ranks.launcher import Launcher
from firn.ranks.wire import LinkClosed, RankLink, encode

log = logging.getLogger("firn.ranks")

END_S = 5.0
"""How long the process may take to tell its clients that a rank is lost, before it exits."""
MAX_PENDING_NBYTES = 1 << 16
"""Size up to which calls of `tell_later` wait for the next `tell`."""


class Leader:
    """Implements calls.Followers."""

    def __init__(self, links: Mapping[int, RankLink], *, beat_s: float = BEAT_S) -> None:
        self._links = dict(links)
        self._launcher = Launcher()
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._handlers_lock = threading.Lock()
        self._handlers: dict[str, OnAnswer] = {"failed": self._failed, "stop": lambda *_: None}
        self._unclaimed: list[tuple[int, RankCall]] = []
        """Answers that arrived before their handler was set."""
        self._answers: queue.SimpleQueue[tuple[int, RankCall]] = queue.SimpleQueue()
        self.is_lost = False
        self._is_ending = False
        self._on_lost: Callable[[], object] | None = None
        self._beats = [self._listen(rank, link, beat_s) for rank, link in self._links.items()]
        threading.Thread(target=self._dispatch, name="firn-ranks", daemon=True).start()

    @property
    def n_followers(self) -> int:
        return len(self._links)

    # --- calls -----------------------------------------------------------------------------

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        data = encode(RankCall(name, args, blob))
        with self._lock:
            if self._pending:
                data = bytes(self._pending) + data
                self._pending.clear()
            self._send(data)

    def tell_later(self, name: str, *args: Any) -> None:
        data = encode(RankCall(name, args))
        with self._lock:
            self._pending += data
            if len(self._pending) > MAX_PENDING_NBYTES:
                self._send(bytes(self._pending))
                self._pending.clear()

    def flush(self) -> None:
        with self._lock:
            if self._pending:
                self._send(bytes(self._pending))
                self._pending.clear()

    def _send(self, data: bytes) -> None:
        if self.is_lost:
            raise RankLost("a rank is gone, so the group ends")
        for rank, link in self._links.items():
            try:
                link.send(data)
            except LinkClosed as e:
                raise self.end_group(f"rank {rank} is gone (connection closed)") from e

    # --- answers ---------------------------------------------------------------------------

    def on_answer(self, name: str, take: OnAnswer) -> None:
        with self._handlers_lock:
            self._handlers[name] = take
            claimed = [answer for answer in self._unclaimed if answer[1].name == name]
            self._unclaimed = [answer for answer in self._unclaimed if answer[1].name != name]
        for rank, call in claimed:
            take(rank, call)

    def _listen(self, rank: int, link: RankLink, beat_s: float) -> Heartbeat:
        link.listen(
            lambda call: self._answers.put((rank, call)),
            lambda: self._gone(rank),
            name=f"firn-rank-{rank}",
        )
        why = f"rank {rank} has sent nothing for {N_SILENT * beat_s:g} s and seems to be frozen"
        return Heartbeat(link, silent=lambda: self.end_group(why), name=str(rank), beat_s=beat_s)

    def _dispatch(self) -> None:
        while True:
            rank, call = self._answers.get()
            with self._handlers_lock:
                take = self._handlers.get(call.name)
                if take is None:
                    self._unclaimed.append((rank, call))
                    continue
            try:
                take(rank, call)
            except RankLost:
                return
            except Exception as e:
                self.end_group(f"handling {call.name!r} from rank {rank} failed: {e!r}")

    def gather(self, name: str, *, timeout_s: float) -> dict[int, RankCall]:
        """Wait for one answer of this name from each follower. Raises SetupError."""
        arrived: queue.SimpleQueue[tuple[int, RankCall]] = queue.SimpleQueue()
        self.on_answer(name, lambda rank, call: arrived.put((rank, call)))
        answers: dict[int, RankCall] = {}
        try:
            while len(answers) < len(self._links):
                rank, call = arrived.get(timeout=timeout_s)
                answers[rank] = call
        except queue.Empty:
            missing = sorted(set(self._links) - set(answers))
            raise SetupError(
                f"rank {missing[0]} did not send {name!r} within {timeout_s:.0f} s"
            ) from None
        finally:
            with self._handlers_lock:
                del self._handlers[name]
        return answers

    # --- the end ---------------------------------------------------------------------------

    def watch(self, *, lost: Callable[[], object], asked: Callable[[], object]) -> None:
        """From now on there are clients. Until then, losing a rank aborts the start, and a rank may
        be silent while it loads.

        lost: tells the clients that a rank is lost. asked: called when a follower receives a signal
        to stop, or the launcher is gone.
        """
        self._on_lost = lost
        for beat in self._beats:
            beat.watch()

        def stop(rank: int, call: RankCall) -> None:
            asked()

        self.on_answer("stop", stop)
        self._launcher.watch(asked)

    def end(self) -> None:
        """Tell the others to write what they have and exit."""
        self._is_ending = True
        if not self.is_lost:
            try:
                self.tell("end")
            except RankLost:
                log.warning("a rank was lost before it could be told to end")

    def end_group(self, why: str) -> RankLost:
        if not (self.is_lost or self._is_ending):
            self.is_lost = True
            log.critical("%s: all ranks exit", why)
            threading.Thread(target=self._leave, daemon=True).start()
        return RankLost(why)

    def _gone(self, rank: int) -> None:
        self.end_group(f"rank {rank} is gone (connection closed)")

    def _failed(self, rank: int, call: RankCall) -> None:
        """A follower reports why it exits. Without clients yet, the start has failed: print it."""
        why = f"rank {rank}: {call.args[0]}"
        if self._on_lost is None:
            self.is_lost = True
            print(f"firn: {why}", file=sys.stderr, flush=True)
            os._exit(1)
        self.end_group(why)

    def _leave(self) -> None:
        """Tell clients and exit, even if another thread hangs in a collective."""
        if self._on_lost is None:
            os._exit(1)
        self._on_lost()
        threading.Event().wait(END_S)
        os._exit(1)
