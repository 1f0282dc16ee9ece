"""A follower's end of its connection to rank 0.

If the connection closes before the call `end`, or rank 0 falls silent, the thread that notices it
ends the process: the main thread may hang in a collective that no other rank will join.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from typing import Any

from firn.core.errors import SetupError
from firn.ranks.calls import RankCall
from firn.ranks.heartbeat import BEAT_S, N_SILENT, Heartbeat
from firn.ranks.launcher import Launcher
from firn.ranks.wire import LinkClosed, RankLink, encode

log = logging.getLogger("firn.ranks")


class Follower:
    def __init__(self, rank: int, link: RankLink, *, beat_s: float = BEAT_S) -> None:
        self.rank = rank
        self._link = link
        self._calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
        self._is_ending = False
        self._is_following = False
        self._silent_s = N_SILENT * beat_s
        self._launcher = Launcher()
        link.listen(self._take, self._gone, name="firn-rank-0")
        self._beat = Heartbeat(link, silent=self._silent, name="0", beat_s=beat_s)

    def _take(self, call: RankCall) -> None:
        if call.name == "end":
            self._is_ending = True
        self._calls.put(call)

    def _gone(self) -> None:
        if self._is_ending:
            return
        if self._is_following:  # before that, rank 0 itself reports why the start failed
            log.critical("rank 0 is gone (connection closed); rank %d exits", self.rank)
        os._exit(1)

    def _silent(self) -> None:
        if not self._is_ending:
            log.critical(
                "rank 0 has sent nothing for %g s and seems to be frozen; rank %d exits",
                self._silent_s,
                self.rank,
            )
            os._exit(1)

    def begin(self) -> None:
        """The start is over: from now on a silent rank 0 counts as frozen."""
        self._is_following = True
        self._beat.watch()

    def next(self) -> RankCall:
        """Wait for the next call."""
        return self._calls.get()

    def expect(self, name: str) -> RankCall:
        """The next call, which must have this name. Raises SetupError."""
        call = self.next()
        if call.name != name:
            raise SetupError(
                f"rank 0 sent {call.name!r} where {name!r} was due: do all ranks run the same firn?"
            )
        return call

    def put(self, call: RankCall) -> None:
        """Queue one of this process's own calls among those of rank 0. Any thread."""
        self._calls.put(call)

    def answer(self, name: str, *args: Any) -> None:
        """Send a call to rank 0. Any thread."""
        try:
            self._link.send(encode(RankCall(name, args)))
        except LinkClosed:
            self._gone()

    def heed_signals(self, *, outlives_terminal: bool) -> None:
        """Forward a signal, or the end of the launcher, to rank 0, which decides when to stop; exit on
        a second signal.

        outlives_terminal: keep running when the terminal is closed. Otherwise closing it stops the
        process, and may send its signal twice.
        """
        n_signals = 0

        def stop(number: int, frame: object) -> None:
            nonlocal n_signals
            n_signals += 1
            if n_signals > 1 and number != signal.SIGHUP:
                os._exit(130)
            # On another thread: this one may be sending an answer and hold the lock.
            threading.Thread(target=self.answer, args=("stop",), daemon=True).start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        if not outlives_terminal:
            signal.signal(signal.SIGHUP, stop)
        self._launcher.watch(lambda: self.answer("stop"))
