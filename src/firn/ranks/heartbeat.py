"""Finds out whether the process at the other end of a connection is still running.

A process that is killed closes its connections. One that is frozen (SIGSTOP, a debugger, a machine
that swaps) does not, and the other ranks would wait for it in a collective forever. So each end
sends a call every second, on a thread that does nothing else, and an end that receives nothing for
ten seconds gives up.

Silence is counted in beats, not by the clock, so that a group that was frozen as a whole continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from firn.ranks.calls import RankCall
from firn.ranks.wire import ALIVE, LinkClosed, RankLink, encode

BEAT_S = 1.0
N_SILENT = 10
"""Beats without a byte from the other end after which it counts as frozen."""


class Heartbeat:
    """Owner: the end of the connection that created it. Its threads end with the connection."""

    def __init__(
        self, link: RankLink, *, silent: Callable[[], object], name: str, beat_s: float = BEAT_S
    ) -> None:
        """silent: called once, on the watching thread, when the other end counts as frozen."""
        self._link = link
        self._silent = silent
        self._name = name
        self._beat_s = beat_s
        self._wait = threading.Event().wait
        # Two threads: a send blocks while the other end does not read, which is when we must watch.
        threading.Thread(target=self._send, name=f"firn-beat-{name}", daemon=True).start()

    def watch(self) -> None:
        """From now on silence counts. Until then, a rank that loads its model may be silent."""
        threading.Thread(target=self._watch, name=f"firn-watch-{self._name}", daemon=True).start()

    def _send(self) -> None:
        beat = encode(RankCall(ALIVE))
        try:
            while not self._wait(self._beat_s):
                self._link.send(beat)
        except LinkClosed:
            return  # the receiving thread notices it too

    def _watch(self) -> None:
        n_silent, n_heard = 0, self._link.n_received
        while n_silent < N_SILENT:
            self._wait(self._beat_s)
            if self._link.is_closed:
                return
            n_silent = n_silent + 1 if self._link.n_received == n_heard else 0
            n_heard = self._link.n_received
        self._silent()
