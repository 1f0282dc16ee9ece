"""Events on their way from the engine thread to the sessions that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from firn.api.calls.event_router import (
    LOGPROB_NBYTES,
    MAX_TAKEN,
    EventQueue,
    EventRouter,
    ReplyTooLarge,
)
from firn.core.errors import EngineDead, QueueFull, ShuttingDown
from firn.core.events import JobDone, JobFailed, Token, TokenLogprob
from firn.core.values import Namespace, RequestId

A, B = RequestId("a"), RequestId("b")
KEY, OTHER = Namespace("k"), Namespace("o")


class CountingLoop(asyncio.SelectorEventLoop):
    n_wakeups = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:
        self.n_wakeups += 1
        return super().call_soon_threadsafe(*args, **options)


def run(work: Callable[[CountingLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        # If an event never arrives, the test fails instead of hanging.
        runner.run(asyncio.wait_for(work(loop), 10))


def from_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_one_wakeup_per_step_whatever_the_batch() -> None:
    async def work(loop: CountingLoop) -> None:
        router = EventRouter()
        queues = {id: router.open([id], KEY, silence_s=60) for id in (A, B)}
        batch = [(id, Token(0, i)) for i in range(5) for id in (A, B)]
        from_thread(lambda: router.publish(batch))
        assert loop.n_wakeups == 1
        for id, queue in queues.items():
            assert await queue.take() == [(id, Token(0, i)) for i in range(5)]
            router.close([id], queue)

    run(work)


def test_take_returns_all_that_has_arrived() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], KEY, silence_s=60)
        for i in range(3):
            router.publish([(A, Token(0, i))])
        taken = await queue.take()
        assert [event for _, event in taken] == [Token(0, i) for i in range(3)]
        router.close([A], queue)

    run(work)


def test_the_batch_may_be_reused_by_its_sender() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], KEY, silence_s=60)
        batch = [(A, JobDone())]
        router.publish(batch)
        batch.clear()
        assert await queue.take() == [(A, JobDone())]
        router.close([A], queue)

    run(work)


def test_the_requests_of_a_call_share_a_queue() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A, B], KEY, silence_s=60)
        router.publish([(B, JobDone()), (A, JobDone())])
        assert await queue.take() == [(B, JobDone()), (A, JobDone())]
        assert router.n_calls == 1
        router.close([A, B], queue)
        assert router.n_calls == 0

    run(work)


def test_events_for_closed_calls_are_dropped() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue, other = router.open([A], KEY, silence_s=60), router.open([B], KEY, silence_s=60)
        router.close([A], queue)
        router.publish([(A, JobDone()), (B, JobDone())])
        assert await other.take() == [(B, JobDone())]
        router.close([B], other)

    run(work)


def test_silence_is_an_empty_take() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], KEY, silence_s=0.001)
        assert await queue.take() == []
        assert await queue.take() == []
        router.publish([(A, JobDone())])
        while not (taken := await queue.take()):
            pass
        assert taken == [(A, JobDone())]
        router.close([A], queue)

    run(work)


def test_a_cancelled_take_loses_nothing() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], KEY, silence_s=60)
        waiting = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        router.publish([(A, JobDone())])
        assert await queue.take() == [(A, JobDone())]
        router.close([A], queue)

    run(work)


def test_publishing_without_an_open_loop_does_nothing() -> None:
    router = EventRouter()
    router.publish([(A, JobDone())])

    async def work(_: CountingLoop) -> None:
        router.close([A], router.open([A], KEY, silence_s=60))

    run(work)
    router.publish([(A, JobDone())])  # the loop is closed: dropped without an error


def test_a_draining_router_refuses_calls_and_can_fail_the_rest() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A, B], KEY, silence_s=60)
        router.drain()
        assert router.draining
        with pytest.raises(ShuttingDown):
            router.open([RequestId("c")], KEY, silence_s=60)
        error = EngineDead()
        router.fail_all(error)
        assert await queue.take() == [(A, JobFailed(error)), (B, JobFailed(error))]
        router.close([A, B], queue)

    run(work)


# --- what keys share -----------------------------------------------------------------------


def with_logprobs(id: int, n: int = 20) -> Token:
    return Token(0, id, TokenLogprob(id, -1.0, ((id, -1.0),) * n))


async def failure(queue: EventQueue) -> ReplyTooLarge | None:
    """Whether the call fails, once all that it was sent is taken."""
    while batch := await queue.take():
        event = batch[-1][1]
        if isinstance(event, JobFailed):
            assert isinstance(event.error, ReplyTooLarge)
            return event.error
        if isinstance(event, JobDone):
            return None
    return None


def test_a_reply_that_nobody_reads_ends_before_it_fills_memory() -> None:
    async def work(_: CountingLoop) -> None:
        router, cancelled = EventRouter(replies_nbytes=400 * LOGPROB_NBYTES * 21), list[str]()
        slow = router.open([A], KEY, silence_s=60, cancel=lambda: cancelled.append("slow"))
        other = router.open([B], OTHER, silence_s=60, cancel=lambda: cancelled.append("other"))
        router.publish([(B, with_logprobs(1))])
        for i in range(1000):
            router.publish([(A, with_logprobs(i))])
        router.publish(
            [(A, JobDone()), *((B, with_logprobs(i)) for i in range(50)), (B, JobDone())]
        )
        await asyncio.sleep(0)
        assert cancelled == ["slow"], "the engine need not compute the rest"
        assert await failure(other) is None
        assert await failure(slow) is not None
        router.close([A], slow)
        router.close([B], other)
        again = router.open([A], KEY, silence_s=60)
        router.publish([*((A, with_logprobs(i)) for i in range(150)), (A, JobDone())])
        assert await failure(again) is None, "closed calls hold nothing"

    run(work)


def test_what_is_sent_takes_no_memory() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter(replies_nbytes=100 * LOGPROB_NBYTES * 21)
        queue = router.open([A], KEY, silence_s=60)
        for i in range(1000):
            router.publish([(A, with_logprobs(i))])
            assert (await queue.take())[0][1] == with_logprobs(i)
            queue.sent()
        router.publish([(A, JobDone())])
        assert await failure(queue) is None

    run(work)


def test_logprobs_whose_text_is_held_back_take_memory_when_the_rest_is_sent() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter(replies_nbytes=100 * LOGPROB_NBYTES * 21)
        queue = router.open([A], KEY, silence_s=60)
        for i in range(1, 1001):
            router.publish([(A, with_logprobs(i))])
            (event,) = (event for _, event in await queue.take())
            if isinstance(event, JobFailed):
                break
            queue.sent(n_held_logprobs=21 * i)
        assert 90 < i <= 101
        router.close([A], queue)
        again = router.open([A], KEY, silence_s=60)
        for i in range(1000):
            router.publish([(A, with_logprobs(i))])
            assert (await again.take())[0][1] == with_logprobs(i)
            again.sent(n_held_logprobs=21 * 50 if i < 500 else 0)
        router.close([A], again)

    run(work)


def test_a_long_backlog_is_taken_in_pieces() -> None:
    """The asyncio thread serves others in between."""

    async def work(loop: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], KEY, silence_s=60)
        router.publish([(A, Token(0, i)) for i in range(10 * MAX_TAKEN)])
        await asyncio.sleep(0)
        turns, ids = 0, list[int]()

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        turn()
        while len(ids) < 10 * MAX_TAKEN:
            batch = await queue.take()
            assert len(batch) <= MAX_TAKEN
            ids += [event.id for _, event in batch if isinstance(event, Token)]
        assert ids == list(range(10 * MAX_TAKEN))
        assert turns > 5

    run(work)


def test_one_key_cannot_take_all_calls() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter(max_calls=4)
        open_calls = [router.open([], KEY, silence_s=60) for _ in range(2)]
        with pytest.raises(QueueFull):
            router.open([], KEY, silence_s=60)
        other = router.open([], OTHER, silence_s=60)
        for queue in (*open_calls, other):
            router.close([], queue)
        assert router.n_calls == 0
        router.close([], router.open([], KEY, silence_s=60))

    run(work)
