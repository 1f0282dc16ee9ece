"""Carries events from the engine thread to the asyncio thread.

The engine publishes once per step; the router hands each event to the session waiting for it.
Everything but `publish` happens on the asyncio thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from firn.core.errors import FirnError, ShuttingDown
from firn.core.events import JobFailed
from firn.core.ports import Delivery
from firn.core.values import RequestId


class EventQueue:
    """The deliveries of one call, in order. Owner: its session, on the asyncio thread.

    `take` returns everything that has arrived, or an empty list if nothing arrives for `silence_s`
    (up to twice that: the queue has one periodic timer instead of a new one for each token).
    """

    def __init__(self, *, silence_s: float) -> None:
        self._deliveries: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None
        self._silence_s = silence_s
        self._silent = True
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(silence_s, self._check_silence)

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._silent = False
        self._wake()

    async def take(self) -> list[Delivery]:
        if not self._deliveries:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._deliveries = self._deliveries, []
        return taken

    def close(self) -> None:
        self._timer.cancel()

    def _check_silence(self) -> None:
        if self._silent:
            self._wake()
        self._silent = True
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EventRouter:
    """Owner of the queues; knows where the events of each request go, and how many calls are open.

    One per app, for as long as it lives.
    """

    def __init__(self) -> None:
        self._queues: dict[RequestId, EventQueue] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._n_calls = 0

    # --- engine thread -------------------------------------------------------------------

    def publish(self, batch: Sequence[Delivery]) -> None:
        """Called once per step. Any thread. Wakes the event loop once, however large the batch."""
        loop = self._loop
        if loop is None:
            return  # no call has been accepted yet
        try:
            loop.call_soon_threadsafe(self._deliver, tuple(batch))
        except RuntimeError:
            if not loop.is_closed():
                raise
            # The HTTP server has stopped and its clients are gone: nobody waits for these events.

    # --- asyncio thread ------------------------------------------------------------------

    def open(self, ids: Iterable[RequestId], *, silence_s: float) -> EventQueue:
        """One queue for all requests of a call. Raises ShuttingDown while draining."""
        if self._draining:
            raise ShuttingDown()
        self._loop = asyncio.get_running_loop()
        queue = EventQueue(silence_s=silence_s)
        for request in ids:
            self._queues[request] = queue
        self._n_calls += 1
        return queue

    def close(self, ids: Iterable[RequestId], queue: EventQueue) -> None:
        """Forget the call; events still on their way to it are dropped."""
        for request in ids:
            self._queues.pop(request, None)
        queue.close()
        self._n_calls -= 1

    @property
    def n_calls(self) -> int:
        """Calls that were accepted and have not ended."""
        return self._n_calls

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Accept no new calls; running ones continue."""
        self._draining = True

    def fail(self, request: RequestId, error: FirnError) -> None:
        """End one call with this error, unless it has ended already."""
        self._deliver([(request, JobFailed(error))])

    def fail_all(self, error: FirnError) -> None:
        """End every running call with this error."""
        self._deliver([(request, JobFailed(error)) for request in self._queues])

    def _deliver(self, batch: Sequence[Delivery]) -> None:
        for delivery in batch:
            queue = self._queues.get(delivery[0])
            if queue is not None:
                queue.put(delivery)
