"""KV events for routers, in the form that vLLM publishes: ZeroMQ and msgpack.

    PUB     topic, sequence number (8 bytes, big-endian), [time, [event, ...], 0]
    ROUTER  a sequence number requests what was published since; the answer ends with number -1

    ["BlockStored", [hash], parent hash or None, [token, ...], block size, None, "GPU"]
    ["BlockRemoved", [hash], "GPU"]    ["AllBlocksCleared"]

The first batch of a process clears what an earlier one announced, and its numbers are higher. A
subscriber that comes or comes back gets an empty batch, whose number shows what it has missed.

Events cover whole blocks that a prompt can resume from on this server, in memory or in tiers below
it. They contain the prompts' tokens: anyone who can read them can read the prompts, so only routers
should be able to reach the address.

Owner: the server. The engine thread queues events; a separate thread sends them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from firn.cache.tree import Announcement, Cleared, Removed, StoredBlock
from firn.core.errors import SetupError
from firn.core.values import unpacked

log = logging.getLogger("firn")

TOPIC = b"kv-events"
MEDIUM = "GPU"
MAX_QUEUE = 100_000
"""Events waiting to be sent. If one more arrives, all are dropped and subscribers are told to
forget everything: a lost event may have revoked any of the others."""
MAX_BATCH = 256
N_REPLAYED = 10_000
"""Batches that can be requested again."""
REPLAY_S, SEND_MS = 10.0, 1000
"""A replay delays new events: it is aborted after REPLAY_S, or if its reader stalls for SEND_MS."""
BATCH_S, POLL_MS = 0.02, 50
SUBSCRIBED = b"\x01"
END_SEQ = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Implements announce.Announcer."""

    def __init__(self, address: str) -> None:
        """address: tcp://host:port; replays are answered at the next port. Raises SetupError."""
        zmq, self._pack = _libraries()
        self._queue: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        self._n_lost = 0
        self._stop = threading.Event()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=N_REPLAYED)
        # Subscribers ignore numbers that they have seen, so those of a new process are higher.
        self._seq = time.time_ns() // 1000
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # which learns of its subscribers
        self._pub.xpub_verbose = True
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.router_mandatory = (
            True  # otherwise messages that a slow reader has no room for are dropped
        )
        self._replay.sndtimeo = SEND_MS
        self._send_failed = zmq.ZMQError
        try:
            self._pub.bind(address)
            self._replay.bind(_next_port(address))
        except (zmq.ZMQError, ValueError) as e:
            self._context.destroy(linger=0)
            raise SetupError(f"--kv-events {address}: {e}") from e
        self._queue.put(Cleared())  # what a process before this one had is gone
        self._thread = threading.Thread(target=self._run, name="firn-kv-events", daemon=True)
        self._thread.start()

    def announce(self, event: Announcement) -> None:
        """From the engine thread; does not wait."""
        if self._queue.qsize() >= MAX_QUEUE:
            self._n_lost += 1
            return
        self._queue.put(event)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)
        self._context.destroy(linger=0)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                events = self._take()
                if events or self._has_new_subscriber():
                    self._send(events)
                if self._replay.poll(0 if events else POLL_MS):  # only one: new events wait
                    self._answer()
            except Exception as e:  # the thread's outermost frame
                if not self._stop.is_set():
                    log.warning("KV events failed: %r", e, exc_info=e)

    def _take(self) -> list[Announcement]:
        """The next batch: the queued events, and those that follow within BATCH_S of the first."""
        events: list[Announcement] = []
        if self._n_lost:
            n_lost, self._n_lost = self._n_lost + self._queue.qsize(), 0
            log.warning("%d KV events were dropped: subscribers were told to start over", n_lost)
            while not self._queue.empty():
                self._queue.get_nowait()
            events.append(Cleared())
        try:
            if not events:
                events.append(self._queue.get(timeout=0.0001))
            until = time.monotonic() + BATCH_S
            while len(events) < MAX_BATCH:
                events.append(self._queue.get(timeout=max(until - time.monotonic(), 0)))
        except queue.Empty:
            pass
        return events

    def _has_new_subscriber(self) -> bool:
        """Whether one has come, or come back. An empty batch then shows it what it has missed: after
        a restart that is everything, and there may be no event for a long time."""
        n_messages = 0
        while self._pub.poll(0):
            n_messages += self._pub.recv()[:1] == SUBSCRIBED
        return n_messages > 0

    def _send(self, events: Sequence[Announcement]) -> None:
        payload: bytes = self._pack([time.time(), [_wire(event) for event in events], 0])
        self._sent.append((self._seq, payload))
        self._pub.send_multipart([TOPIC, self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    def _answer(self) -> None:
        client, *rest = self._replay.recv_multipart()
        start = int.from_bytes(rest[-1][:8], "big") if rest else 0
        until = time.monotonic() + REPLAY_S
        try:
            for seq, payload in self._sent:
                if time.monotonic() > until:
                    return
                if seq >= start:
                    self._replay.send_multipart([client, b"", seq.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, b"", END_SEQ, b""])
        except self._send_failed as e:
            log.debug("a replay of KV events was interrupted: %s", e)  # its reader is gone or hangs


def _libraries() -> tuple[Any, Any]:
    """ZeroMQ, and msgpack's packing function. Raises SetupError."""
    try:
        import msgpack
        import zmq
    except ImportError as e:
        raise SetupError(
            "--kv-events needs the packages pyzmq and msgpack: pip install 'firn[events]'."
        ) from e
    return zmq, msgpack.packb


def _wire(event: Announcement) -> list[Any]:
    match event:
        case StoredBlock(key, parent, packed, width):
            tokens = unpacked(packed, width).tolist()
            above = None if parent is None else _hash(parent)
            return ["BlockStored", [_hash(key)], above, tokens, len(tokens), None, MEDIUM]
        case Removed(key):
            return ["BlockRemoved", [_hash(key)], MEDIUM]
        case Cleared():
            return ["AllBlocksCleared"]


def _hash(key: bytes) -> int:
    """Routers expect 64 bits."""
    return int.from_bytes(key[:8], "big")


def _next_port(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.port is None:
        raise ValueError("must be tcp://host:port")
    host = parts.netloc.rpartition(":")[0]
    return f"tcp://{host}:{parts.port + 1}"
