"""Rank 0's end of the connections to the others.

Calls go out in the order in which they were told. Answers come by a thread for each follower, and are
handed on by one thread of their own, so that whoever hears them may wait: a follower that is gone is
noticed meanwhile.

Owner: the process, for as long as it lives.
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
from firn.core.ranks import OnAnswer, RankCall, RankLost
from firn.ranks.wire import Closed, Line, encode

log = logging.getLogger("firn.ranks")

END_S = 5.0
"""How long a group that has lost a rank has to tell its clients, before the process is ended."""
MAX_NOTED = 1 << 16
"""Bytes of calls that wait for the next one."""


class Leader:
    """Implements core.ranks.Followers."""

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self._lines = dict(lines)
        self._lock = threading.Lock()
        self._noted = bytearray()
        self._hearing = threading.Lock()
        self._hearers: dict[str, OnAnswer] = {"failed": self._failed, "stop": lambda *_: None}
        self._early: list[tuple[int, RankCall]] = []
        """Answers that nobody was there for yet."""
        self._news: queue.SimpleQueue[tuple[int, RankCall]] = queue.SimpleQueue()
        self.is_lost = False
        self._is_ending = False
        self._on_lost: Callable[[], object] | None = None
        for rank, line in self._lines.items():
            self._listen(rank, line)
        threading.Thread(target=self._hand_on, name="firn-ranks", daemon=True).start()

    @property
    def n_followers(self) -> int:
        return len(self._lines)

    # --- to them ---------------------------------------------------------------------------

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        data = encode(RankCall(name, args, blob))
        with self._lock:
            if self._noted:
                data = bytes(self._noted) + data
                self._noted.clear()
            self._send(data)

    def note(self, name: str, *args: Any) -> None:
        data = encode(RankCall(name, args))
        with self._lock:
            self._noted += data
            if len(self._noted) > MAX_NOTED:
                self._send(bytes(self._noted))
                self._noted.clear()

    def flush(self) -> None:
        with self._lock:
            if self._noted:
                self._send(bytes(self._noted))
                self._noted.clear()

    def _send(self, data: bytes) -> None:
        if self.is_lost:
            raise RuntimeError("the group of ranks has ended")
        for rank, line in self._lines.items():
            try:
                line.send(data)
            except Closed as e:
                raise self.lose(f"rank {rank} is gone") from e

    # --- from them -------------------------------------------------------------------------

    def hear(self, name: str, take: OnAnswer) -> None:
        with self._hearing:
            self._hearers[name] = take
            early = [news for news in self._early if news[1].name == name]
            self._early = [news for news in self._early if news[1].name != name]
        for rank, call in early:
            take(rank, call)

    def _listen(self, rank: int, line: Line) -> None:
        line.listen(
            lambda call: self._news.put((rank, call)),
            lambda: self._gone(rank),
            name=f"firn-rank-{rank}",
        )

    def _hand_on(self) -> None:
        while True:
            rank, call = self._news.get()
            with self._hearing:
                take = self._hearers.get(call.name)
                if take is None:
                    self._early.append((rank, call))
                    continue
            try:
                take(rank, call)
            except Exception as e:
                self.lose(f"rank {rank} said {call.name!r}, and that failed: {e!r}")

    def gather(self, name: str, *, timeout_s: float) -> dict[int, RankCall]:
        """One answer of this name from everybody. Raises SetupError."""
        heard: queue.SimpleQueue[tuple[int, RankCall]] = queue.SimpleQueue()
        self.hear(name, lambda rank, call: heard.put((rank, call)))
        found: dict[int, RankCall] = {}
        try:
            while len(found) < len(self._lines):
                rank, call = heard.get(timeout=timeout_s)
                found[rank] = call
        except queue.Empty:
            missing = sorted(set(self._lines) - set(found))
            raise SetupError(f"rank {missing[0]} did not answer for {timeout_s:.0f} s") from None
        finally:
            with self._hearing:
                del self._hearers[name]
        return found

    # --- the end ---------------------------------------------------------------------------

    def watch(self, *, lost: Callable[[], object], asked: Callable[[], object]) -> None:
        """From now on there are clients: `lost` tells them. Until then a loss ends the start.

        asked: a follower was asked to stop, and all are to.
        """
        self._on_lost = lost

        def heard(rank: int, call: RankCall) -> None:
            asked()

        self.hear("stop", heard)

    def end(self) -> None:
        """All is done: the others write what they have, and end."""
        self._is_ending = True
        if not self.is_lost:
            try:
                self.tell("end")
            except RankLost:
                log.warning("a rank was gone before the end")

    def lose(self, why: str) -> RankLost:
        if not (self.is_lost or self._is_ending):
            self.is_lost = True
            log.critical("%s: the group ends", why)
            threading.Thread(target=self._leave, daemon=True).start()
        return RankLost(why)

    def _gone(self, rank: int) -> None:
        self.lose(f"rank {rank} is gone")

    def _failed(self, rank: int, call: RankCall) -> None:
        """A follower says why it ends. Before there are clients, that is the start's one line."""
        why = f"rank {rank}: {call.args[0]}"
        if self._on_lost is None:
            self.is_lost = True
            print(f"firn: {why}", file=sys.stderr, flush=True)
            os._exit(1)
        self.lose(why)

    def _leave(self) -> None:
        """No thread that hangs in a collective keeps this process alive."""
        if self._on_lost is None:
            os._exit(1)
        self._on_lost()
        threading.Event().wait(END_S)
        os._exit(1)
