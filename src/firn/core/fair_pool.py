"""Threads that keys share: the work of one key never fills all of them, nor the queue before others'."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_working = threading.local()


def worker_key() -> str:
    """The key whose work this thread does; empty: it is no thread of a pool."""
    return getattr(_working, "key", "")


class FairPool:
    """Each key has a queue of its own; a free thread takes from one key after the other. Thread-safe.

    A key may use all threads but one, which waits for the other keys: however long a key's work takes,
    another's begins at once. Owner: the process.
    """

    def __init__(self, n_threads: int, *, name: str) -> None:
        self._n_threads = n_threads
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        """Whose turn is next first."""
        self._running: Counter[str] = Counter()

    def of(self, key: str) -> Executor:
        """The pool, for the work of this key."""
        return _KeyPool(self, key)

    def submit(self, key: str, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(key, deque()).append(_Work(future, work))
            self._start()
        return future

    def close(self) -> None:
        """Begin nothing more, whatever the threads are doing."""
        with self._lock:
            for work in (work for queue in self._waiting.values() for work in queue):
                work.future.cancel()
            self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """With the lock: give a free thread the next work."""
        per_key = max(self._n_threads - 1, 1)
        while self._running.total() < self._n_threads:
            key = next((k for k in self._waiting if self._running[k] < per_key), None)
            if key is None:
                return
            queue = self._waiting[key]
            work = queue.popleft()
            self._waiting.move_to_end(key)
            if not queue:
                del self._waiting[key]
            if work.future.set_running_or_notify_cancel():
                self._running[key] += 1
                self._threads.submit(self._run, key, work)

    def _run(self, key: str, work: _Work) -> None:
        result, error = None, None
        _working.key = key
        try:
            result = work.call()
        except BaseException as e:  # the caller gets it, as from any executor
            error = e
        with self._lock:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            self._start()
        if error is not None:
            work.future.set_exception(error)
        else:
            work.future.set_result(result)


class _Work:
    __slots__ = ("call", "future")

    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future = future
        self.call = call


class _KeyPool(Executor):
    """Gives a key's work to the pool."""

    def __init__(self, pool: FairPool, key: str) -> None:
        self._pool = pool
        self._key = key

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._pool.submit(self._key, lambda: fn(*args, **kwargs))
