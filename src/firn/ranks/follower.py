"""A follower's end of its connection to rank 0.

When that ends without a word, so does this process, whatever its threads are at: one may hang in a
collective that nobody else takes part in any more.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from typing import Any

from firn.core.errors import SetupError
from firn.core.ranks import RankCall
from firn.ranks.wire import Closed, Line, encode

log = logging.getLogger("firn.ranks")


class Follower:
    def __init__(self, rank: int, line: Line) -> None:
        self.rank = rank
        self._line = line
        self._calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
        self._is_ending = False
        self.is_following = False
        """The start is over."""
        line.listen(self._take, self._gone, name="firn-rank-0")

    def _take(self, call: RankCall) -> None:
        if call.name == "end":
            self._is_ending = True
        self._calls.put(call)

    def _gone(self) -> None:
        if self._is_ending:
            return
        if self.is_following:  # else rank 0 has said why
            log.critical("rank 0 is gone: rank %d ends", self.rank)
        os._exit(1)

    def next(self) -> RankCall:
        """Waits for it."""
        return self._calls.get()

    def expect(self, name: str) -> RankCall:
        """The next call, which is this one. Raises SetupError."""
        call = self.next()
        if call.name != name:
            raise SetupError(f"rank 0 said {call.name!r} before {name!r}")
        return call

    def put(self, call: RankCall) -> None:
        """A call to oneself, from any thread: done between those of rank 0."""
        self._calls.put(call)

    def answer(self, name: str, *args: Any) -> None:
        """Any thread."""
        try:
            self._line.send(encode(RankCall(name, args)))
        except Closed:
            self._gone()

    def heed_signals(self) -> None:
        """Rank 0 decides when to end: a signal is passed on, and a second one ends this rank at once."""
        n_asked = 0

        def stop(*_: object) -> None:
            nonlocal n_asked
            n_asked += 1
            if n_asked > 1:
                os._exit(130)
            # Not here: this thread may be in the midst of an answer.
            threading.Thread(target=self.answer, args=("stop",), daemon=True).start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
