"""Carries events from the engine thread to the asyncio thread.

The engine publishes once per step; the router hands each event to the session waiting for it.
Everything but `publish` happens on the asyncio thread. Calls, and the memory of what they have not sent
yet, are shared by keys; without keys, by addresses.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from firn.core.errors import FirnError, KeyLimit, QueueFull, ShuttingDown
from firn.core.events import EngineEvent, JobFailed, PromptLogprobs, Token, TokenLogprob
from firn.core.ports import Delivery
from firn.core.shares import Share, Shares
from firn.core.units import GIB
from firn.core.values import RequestId

MAX_CALLS = 2048
"""Open at a time, in any stage."""
REPLIES_NBYTES = GIB
"""Memory for what has been computed and not sent yet, of all calls together."""
TOKEN_NBYTES, LOGPROB_NBYTES = 200, 600
"""What a token and each of its logprobs take, rendered once."""
MAX_TAKEN = 256
"""Deliveries that a session works off before other tasks have their turn."""


class ReplyTooLarge(KeyLimit):
    code = "reply_too_large"

    def __init__(self) -> None:
        super().__init__(
            "The replies of this key that are not sent yet take too much memory: read streams faster, "
            "or ask for fewer logprobs."
        )


class EventQueue:
    """The deliveries of one call, in order. Owner: its session, on the asyncio thread.

    `take` returns everything that has arrived, or an empty list if nothing arrives for `silence_s`
    (up to twice that: the queue has one periodic timer instead of a new one for each token).

    What it holds, and what was taken from it, counts until `sent`. Beyond its share the call fails: the
    last delivery is then ReplyTooLarge, and `cancel` is called.
    """

    def __init__(
        self, *, silence_s: float, place: Share, memory: Share, cancel: Callable[[], None]
    ) -> None:
        self._deliveries: deque[Delivery] = deque()
        self._place = place
        self._memory = memory
        self._cancel = cancel
        self._n_unsent = 0
        """Bytes of what was taken and not sent."""
        self._failed = False
        self._waiter: asyncio.Future[None] | None = None
        self._silence_s = silence_s
        self._n_taken = 0
        """Deliveries taken without waiting."""
        self._silent = True
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(silence_s, self._check_silence)

    def put(self, delivery: Delivery) -> None:
        if self._failed:
            return
        nbytes = _nbytes(delivery[1])
        if nbytes and not self._memory.grow(nbytes):
            self._failed = True
            self._cancel()
            delivery = delivery[0], JobFailed(ReplyTooLarge())
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
            self._n_taken = 0
        elif self._n_taken >= MAX_TAKEN:
            self._n_taken = 0
            await asyncio.sleep(0)
        waiting = self._deliveries
        taken = [waiting.popleft() for _ in range(min(len(waiting), MAX_TAKEN))]
        self._n_taken += len(taken)
        self._n_unsent += sum(_nbytes(event) for _, event in taken)
        return taken

    def sent(self, *, n_held_logprobs: int = 0) -> None:
        """What was taken so far takes no memory any more, except logprobs of text that is held back."""
        held = min(n_held_logprobs * LOGPROB_NBYTES, self._n_unsent)
        self._memory.shrink(self._n_unsent - held)
        self._n_unsent = held

    def close(self) -> None:
        self._timer.cancel()
        self._memory.close()
        self._place.close()

    def _check_silence(self) -> None:
        if self._silent:
            self._wake()
        self._silent = True
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nbytes(event: EngineEvent) -> int:
    match event:
        case Token(logprob=None):
            return TOKEN_NBYTES
        case Token(logprob=TokenLogprob() as logprob):
            return TOKEN_NBYTES + _logprob_nbytes(logprob)
        case PromptLogprobs():
            return sum(map(_logprob_nbytes, event.logprobs))
        case _:
            return 0


def _logprob_nbytes(logprob: TokenLogprob) -> int:
    return LOGPROB_NBYTES * (1 + len(logprob.top))


class EventRouter:
    """Owner of the queues; knows where the events of each request go, and how many calls are open.

    One per app, for as long as it lives.
    """

    def __init__(self, *, max_calls: int = MAX_CALLS, replies_nbytes: int = REPLIES_NBYTES) -> None:
        self._places = Shares(max_calls)
        self._memory = Shares(replies_nbytes)
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

    def open(
        self,
        ids: Iterable[RequestId],
        client: str,
        *,
        silence_s: float,
        cancel: Callable[[], None] = lambda: None,
    ) -> EventQueue:
        """One queue for all requests of a call. Raises QueueFull; ShuttingDown while draining.

        client: who gets a share of calls and memory.
        cancel: called if the call fails because what it has not sent takes too much memory.
        """
        if self._draining:
            raise ShuttingDown()
        place = self._places.open(client)
        if not place.grow():
            raise QueueFull
        self._loop = asyncio.get_running_loop()
        memory = self._memory.open(client)
        queue = EventQueue(silence_s=silence_s, place=place, memory=memory, cancel=cancel)
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
