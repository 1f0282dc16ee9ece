"""Whether the process at the other end of a connection still runs.

A process that is killed closes its connections. One that is frozen (SIGSTOP, a debugger, a machine that
swaps) does not, and whoever computes with it waits in a collective for ever. So each end sends a word
every second, on a thread that does nothing else, and an end that hears nothing for ten seconds acts.

Silence is counted in beats, not by a clock: a group that was frozen as a whole goes on where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from firn.core.ranks import RankCall
from firn.ranks.wire import ALIVE, LinkClosed, RankLink, encode

BEAT_S = 1.0
N_SILENT = 10
"""Beats without a byte from the other end: it is taken to be frozen."""


class Heartbeat:
    """Owner: the end of the connection that made it. Its threads end with the connection."""

    def __init__(
        self, link: RankLink, *, silent: Callable[[], object], name: str, beat_s: float = BEAT_S
    ) -> None:
        """silent: called once, on a thread of its own, when the other end has not been heard."""
        self._link = link
        self._silent = silent
        self._name = name
        self._beat_s = beat_s
        self._wait = threading.Event().wait
        # Two threads: a send waits while the other end reads nothing, and that is when we must watch.
        threading.Thread(target=self._send, name=f"firn-beat-{name}", daemon=True).start()

    def watch(self) -> None:
        """From now on silence counts. Before, a rank may load its model without a word."""
        threading.Thread(target=self._watch, name=f"firn-watch-{self._name}", daemon=True).start()

    def _send(self) -> None:
        word = encode(RankCall(ALIVE))
        try:
            while not self._wait(self._beat_s):
                self._link.send(word)
        except LinkClosed:
            return  # whoever receives here has noticed as well

    def _watch(self) -> None:
        n_silent, n_heard = 0, self._link.n_received
        while n_silent < N_SILENT:
            self._wait(self._beat_s)
            if self._link.is_closed:
                return
            n_silent = n_silent + 1 if self._link.n_received == n_heard else 0
            n_heard = self._link.n_received
        self._silent()
