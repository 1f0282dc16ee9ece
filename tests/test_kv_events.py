"""What a router that speaks vLLM's KV events receives, through a real socket."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from firn import kv_events
from firn.cache.tree import Cleared, Removed, StoredBlock
from firn.core.errors import SetupError
from firn.core.keys import Key
from firn.core.values import Namespace
from firn.kv_events import END_SEQ, TOPIC, EventPublisher
from tests.cache.lab import DENSE, LabEngine, nodes_of, tree

zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")
msgpack = pytest.importorskip("msgpack", reason="the package msgpack is not installed")

BLOCK = 8
WAIT_MS = 30_000
PROMPT = [(7 * i) % 89 + 1 for i in range(50)]


def free_pair() -> int:
    """A port that is free, like the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Router:
    """Keeps the events as an index of blocks: by hash, with parent and tokens."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._port = port
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.seqs: list[int] = []
        self.replayed: list[int] = []

    def hear(self) -> None:
        """Receives and applies the next batch."""
        assert self._sub.poll(WAIT_MS), "nothing is published"
        topic, seq, payload = self._sub.recv_multipart()
        assert topic == TOPIC
        self.seqs.append(int.from_bytes(seq, "big"))
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        at, events, rank = msgpack.unpackb(payload)
        assert (at > 1e9, rank) == (True, 0)
        for kind, *fields in events:
            if kind == "BlockStored":
                hashes, parent, tokens, size, lora, medium = fields
                assert (len(hashes), len(tokens), lora, medium) == (1, size, None, "GPU")
                self.blocks[hashes[0]] = parent, tokens
            elif kind == "BlockRemoved":
                self.blocks.pop(fields[0][0], None)
            else:
                assert [kind, *fields] == ["AllBlocksCleared"]
                self.blocks.clear()

    def chains(self) -> list[list[int]]:
        """Every stored prefix that no other one continues, as tokens."""
        parents = {parent for parent, _ in self.blocks.values()}

        def tokens(block: int | None) -> list[int]:
            if block is None:
                return []
            parent, own = self.blocks[block]
            return tokens(parent) + own

        return sorted(tokens(block) for block in self.blocks if block not in parents)

    def replay(self, start: int) -> int:
        """Ask again for what was published from `start` on; returns the number of batches."""
        asked, n = self._context.socket(zmq.DEALER), 0
        asked.connect(f"tcp://127.0.0.1:{self._port + 1}")
        asked.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert asked.poll(WAIT_MS), "no answer"
            _, seq, payload = asked.recv_multipart()
            if seq == END_SEQ:
                asked.close(0)
                return n
            self.replayed.append(int.from_bytes(seq, "big"))
            self.apply(payload)
            n += 1

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


@contextmanager
def publishing(**options: Any) -> Iterator[tuple[LabEngine, Router]]:
    port = free_pair()
    publisher = EventPublisher(f"tcp://127.0.0.1:{port}")
    cache = tree(DENSE, block=BLOCK, **options)
    cache.records.tree.announcer = publisher
    with Router(port) as router, LabEngine(DENSE, cache=cache) as lab:
        while not router.seqs:  # a new subscriber receives nothing for a moment
            lab.between_steps(lambda: cache.records.clear(None))
            if router._sub.poll(50):
                router.hear()
        yield lab, router


def until(router: Router, chains: list[list[int]]) -> None:
    while router.chains() != sorted(chains):
        router.hear()


def test_blocks_come_and_go() -> None:
    with publishing() as (lab, router):
        outcome = lab.submit(PROMPT, 8).wait()
        said = [*PROMPT, *outcome.tokens()][: (len(PROMPT) + 8) // BLOCK * BLOCK]
        until(router, [said])
        branch = [*PROMPT[:16], *range(200, 230)]
        more = lab.submit(branch, 8).wait()
        both = [said, [*branch, *more.tokens()][: (len(branch) + 8) // BLOCK * BLOCK]]
        until(router, both)
        assert len(router.blocks) < sum(len(c) // BLOCK for c in both), "what they share is one"
        lab.between_steps(lambda: lab.tree.records.clear(Namespace("")))
        until(router, [])
        lab.submit(PROMPT, 8).wait()
        until(router, [said])
        assert router.seqs == list(range(router.seqs[0], router.seqs[-1] + 1))


def test_what_is_evicted_is_told() -> None:
    with publishing(limit_nbytes=1 << 11) as (lab, router):
        for i in range(6):
            lab.submit([100 + i, *PROMPT], 1).wait()
        stored = lab.between_steps(
            lambda: {
                int.from_bytes(n.key[:8], "big")
                for n in nodes_of(lab.tree.records.tree)
                if n.n_tokens == BLOCK
            }
        )
        while set(router.blocks) != stored:
            router.hear()
        assert 0 < len(stored) < 36


def test_a_subscriber_that_missed_something_asks_again() -> None:
    port = free_pair()
    publisher = EventPublisher(f"tcp://127.0.0.1:{port}")
    cache = tree(DENSE, block=BLOCK)
    cache.records.tree.announcer = publisher
    with Router(port) as late, LabEngine(DENSE, cache=cache) as lab:
        lab.submit(PROMPT, 1).wait()
        while len(late.blocks) < len(PROMPT) // BLOCK:
            late.replay(0)
        assert late.chains() == [PROMPT[:48]]
        assert late.replay(10**18) == 0


def test_after_a_flood_subscribers_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dropped events are lost, and an index that misses some of them would be wrong."""
    with publishing() as (lab, router):
        lab.submit(PROMPT, 1).wait()
        until(router, [PROMPT[:48]])
        monkeypatch.setattr(kv_events, "MAX_QUEUE", 0)
        lab.submit([7, *PROMPT], 1).wait()
        until(router, [])
        monkeypatch.undo()
        lab.submit([8, *PROMPT], 1).wait()
        until(router, [[8, *PROMPT][:48]])


def test_nothing_from_before_a_flood_is_told_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event that removes a block again may be among the lost ones."""
    monkeypatch.setattr(kv_events, "MAX_QUEUE", 1)
    publisher = EventPublisher(f"tcp://127.0.0.1:{free_pair()}")
    publisher._stop.set()
    publisher._thread.join()
    publisher.announce(StoredBlock(b"a" * 32, None, b"\1", 1))
    publisher.announce(Removed(b"a" * 32))
    assert publisher._take() == [Cleared()]
    publisher.close()


class Trickle:
    """A queue, and its clock: an event follows every 19 ms, a little sooner than a batch waits."""

    def __init__(self) -> None:
        self._now_s = self._next_s = 100.0

    def time(self) -> float:
        return self._now_s

    def get(self, timeout: float) -> Cleared:
        if self._next_s - self._now_s > timeout:
            self._now_s += timeout
            raise queue.Empty
        self._now_s = self._next_s
        self._next_s += 0.019
        return Cleared()


def test_events_that_keep_coming_do_not_hold_up_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = EventPublisher(f"tcp://127.0.0.1:{free_pair()}")
    publisher._stop.set()
    publisher._thread.join()
    trickle = Trickle()
    monkeypatch.setattr(publisher, "_queue", trickle)
    monkeypatch.setattr(kv_events, "time", SimpleNamespace(monotonic=trickle.time))
    assert len(publisher._take()) == 2, "the first, and what came in the 20 ms after it"
    publisher.close()


class Watched(list[tuple[int, bytes]]):
    """Batches to replay; `is_taken` is set once `mark` of them have been taken."""

    def __init__(self, n: int, *, mark: int) -> None:
        super().__init__((i, bytes(1 << 14)) for i in range(n))
        self.mark = mark
        self.is_taken = threading.Event()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for i, batch in enumerate(super().__iter__()):
            if i == self.mark:
                self.is_taken.set()
            yield batch


def test_a_reader_that_does_not_keep_up_gets_the_whole_replay() -> None:
    port, sent = free_pair(), Watched(6000, mark=1000)
    publisher = EventPublisher(f"tcp://127.0.0.1:{port}")
    publisher._sent = sent  # type: ignore[assignment]
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger = 0
        reader.connect(f"tcp://127.0.0.1:{port + 1}")
        reader.send_multipart([b"", bytes(8)])
        assert sent.is_taken.wait(WAIT_MS / 1000)
        seqs = []
        while not seqs or seqs[-1] != END_SEQ:
            assert reader.poll(WAIT_MS), "the end is missing"
            seqs.append(reader.recv_multipart()[1])
    numbers = [int.from_bytes(seq, "big") for seq in seqs[:-1]]
    assert [n for n in numbers if n < 10**6] == list(range(6000))
    publisher.close()


def test_a_new_process_tells_those_who_followed_the_old_one() -> None:
    """Its numbers are higher, so that they are not taken for old ones; and even if it never stores
    anything, they hear of it."""
    port = free_pair()
    block = StoredBlock(Key(b"k" * 32), None, bytes(4 * BLOCK), 4)
    with Router(port) as router:
        first = EventPublisher(f"tcp://127.0.0.1:{port}")
        while not router.blocks:
            first.announce(block)
            if router._sub.poll(50):
                router.hear()
        first.close()
        second = EventPublisher(f"tcp://127.0.0.1:{port}")
        last = max(router.seqs)
        while router.seqs[-1] <= last:
            router.hear()
        router.replay(last + 1)
        assert not router.blocks
        second.close()


def test_a_replay_begins_with_the_batch_that_is_asked_for() -> None:
    with publishing() as (lab, router):
        lab.submit(PROMPT, 1).wait()
        until(router, [PROMPT[:48]])
        start = router.seqs[-1]
        router.replay(start)
        assert router.replayed == list(range(start, router.replayed[-1] + 1)), (
            "it may not be the last"
        )


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "ipc:///tmp/x", "nonsense"])
def test_a_bad_address_is_one_line(address: str) -> None:
    with pytest.raises(SetupError, match="--kv-events"):
        EventPublisher(address)
