"""Events on their way from the engine thread to the sessions that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from firn.api.event_router import EventRouter
from firn.core.errors import EngineDead, ShuttingDown
from firn.core.events import JobDone, JobFailed, Token
from firn.core.values import RequestId

A, B = RequestId("a"), RequestId("b")


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
        queues = {id: router.open([id], silence_s=60) for id in (A, B)}
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
        queue = router.open([A], silence_s=60)
        for i in range(3):
            router.publish([(A, Token(0, i))])
        taken = await queue.take()
        assert [event for _, event in taken] == [Token(0, i) for i in range(3)]
        router.close([A], queue)

    run(work)


def test_the_batch_may_be_reused_by_its_sender() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], silence_s=60)
        batch = [(A, JobDone())]
        router.publish(batch)
        batch.clear()
        assert await queue.take() == [(A, JobDone())]
        router.close([A], queue)

    run(work)


def test_the_requests_of_a_call_share_a_queue() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A, B], silence_s=60)
        router.publish([(B, JobDone()), (A, JobDone())])
        assert await queue.take() == [(B, JobDone()), (A, JobDone())]
        assert router.n_calls == 1
        router.close([A, B], queue)
        assert router.n_calls == 0

    run(work)


def test_events_for_closed_calls_are_dropped() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue, other = router.open([A], silence_s=60), router.open([B], silence_s=60)
        router.close([A], queue)
        router.publish([(A, JobDone()), (B, JobDone())])
        assert await other.take() == [(B, JobDone())]
        router.close([B], other)

    run(work)


def test_silence_is_an_empty_take() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A], silence_s=0.001)
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
        queue = router.open([A], silence_s=60)
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
        router.close([A], router.open([A], silence_s=60))

    run(work)
    router.publish([(A, JobDone())])  # the loop is closed: dropped without an error


def test_a_draining_router_refuses_calls_and_can_fail_the_rest() -> None:
    async def work(_: CountingLoop) -> None:
        router = EventRouter()
        queue = router.open([A, B], silence_s=60)
        router.drain()
        assert router.draining
        with pytest.raises(ShuttingDown):
            router.open([RequestId("c")], silence_s=60)
        error = EngineDead()
        router.fail_all(error)
        assert await queue.take() == [(A, JobFailed(error)), (B, JobFailed(error))]
        router.close([A, B], queue)

    run(work)
