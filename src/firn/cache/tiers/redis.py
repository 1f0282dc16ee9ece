"""The Redis tier: records as values of a Redis or Valkey server, through redis-py.

    redis://[user:password@]host[:port]/0?ttl_s=604800&prefix=firn&deadline_s=5&write_mb_per_s=64

    <prefix>:<name>                 head: magic, record's length, time, writer; then the record, if small
    <prefix>:<name>:<writer>:<i>    a large record's pieces, of 8 MiB each, written before the head

The head is set only if there is none, so a record is written once. The keys of pieces contain their
writer's number, so those of two writers are never mixed. Every key has a time to live, which each
use renews. Records that the server evicts at its maxmemory are misses; writes that it rejects are
refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from firn.cache.storage.faults import Damaged, Missing, PermanentFault, TierFault, TierFull
from firn.cache.tiers import Buffer, FoundRecord, TierOptions
from firn.cache.tiers._backoff import CircuitBreaker
from firn.cache.tiers._store import StoreSettings, StoreTier, first_line, number
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.errors import SetupError

SCHEMES = ("redis", "rediss")
PIECE_NBYTES = 8 << 20
"""Redis serves no other client while it copies a value: pieces keep that time short."""
READ_NBYTES = 1 << 20
TTL_S = 7 * 86_400
CONNECT_S = 2.0
OWN_SETTINGS = ("ttl_s", "prefix", "piece_kb")
_HEAD = struct.Struct("<8sQdQ")
_MAGIC = b"firn1\r\n\0"


class RecordHead(NamedTuple):
    """The beginning of the value under a record's own key."""

    nbytes: int
    written_at: float
    writer: int
    """The writer of the pieces; 0: the record follows the head."""


class RedisClient:
    """Implements _store.ObjectClient. Thread-safe: redis-py lends each call a connection."""

    def __init__(
        self,
        client: Any,
        errors: Any,
        *,
        prefix: str,
        ttl_s: float,
        attempt_s: float,
        piece_nbytes: int = PIECE_NBYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        self._errors = errors
        self._prefix = prefix
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._attempt_s = attempt_s
        self._piece_nbytes = piece_nbytes
        self._clock = clock

    def get(self, name: str, n: int | None) -> memoryview:
        with self._translating():
            return self._get(name)[:n]

    def _get(self, name: str) -> memoryview:
        until = self._clock.elapsed() + self._attempt_s
        value = self._client.get(self._key(name))
        if value is None:
            raise Missing
        head = _parse(value)
        if not head.writer:
            data = memoryview(value)[_HEAD.size :]
            if len(data) != head.nbytes:
                raise Damaged("wrong length", f"{len(data)} of {head.nbytes} bytes")
            return data
        view = np.empty(head.nbytes, dtype=np.uint8).data
        at = 0
        for piece_key in self._piece_keys(name, head):
            piece = self._client.get(piece_key)
            if piece is None:
                raise Missing("a piece is gone")
            if len(piece) != min(self._piece_nbytes_in(head), head.nbytes - at):
                raise Damaged("wrong length", "of a piece")
            view[at : at + len(piece)] = piece
            at += len(piece)
            self._check_time(until, at, head.nbytes)
        return view

    def find(self, names: Sequence[str]) -> Iterator[FoundRecord]:
        with self._translating():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.getrange(self._key(name), 0, _HEAD.size - 1)
            raws: list[bytes] = pipe.execute()
        for name, raw in zip(names, raws, strict=True):
            if len(raw) == _HEAD.size and raw.startswith(_MAGIC):
                head = _parse(raw)
                yield FoundRecord(name, head.nbytes, head.written_at)

    def put(self, name: str, pieces: Sequence[Buffer], *, replace: bool) -> bool:
        with self._translating():
            return self._put(name, pieces, replace=replace)

    def _put(self, name: str, pieces: Sequence[Buffer], *, replace: bool) -> bool:
        until = self._clock.elapsed() + self._attempt_s
        key, nbytes = self._key(name), sum(memoryview(p).nbytes for p in pieces)
        if not replace and self._client.exists(key):
            return False
        is_small = nbytes <= self._piece_nbytes
        writer = 0 if is_small else int.from_bytes(os.urandom(8), "little") | 1
        head = RecordHead(nbytes, self._clock.wall(), writer)
        raw = _HEAD.pack(_MAGIC, head.nbytes, head.written_at, self._tagged(head.writer))
        keys = list(self._piece_keys(name, _parse(raw)))
        if is_small:
            raw, pieces = b"".join([raw, *pieces]), ()
        at = 0
        try:
            for piece_key, piece in zip(keys, _cut(pieces, self._piece_nbytes), strict=True):
                self._client.set(piece_key, piece, px=self._ttl_ms)
                at += len(piece)
                self._check_time(until, at, nbytes)
            is_new = bool(self._client.set(key, raw, px=self._ttl_ms, nx=not replace))
        except (self._errors.RedisError, TierFault):
            self._drop(keys)
            raise
        if not is_new:
            self._drop(keys)
        return is_new

    def touch(self, names: Sequence[str]) -> None:
        """Renew the time to live, also of a large record's pieces, whose keys follow from its head.

        The server's own eviction counts this as a use.
        """
        with self._translating():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.pexpire(self._key(name), self._ttl_ms)
                pipe.getrange(self._key(name), 0, _HEAD.size - 1)
            raws = pipe.execute()[1::2]
            pipe = self._client.pipeline(transaction=False)
            for name, raw in zip(names, raws, strict=True):
                if len(raw) == _HEAD.size and raw.startswith(_MAGIC):
                    for piece_key in self._piece_keys(name, _parse(raw)):
                        pipe.pexpire(piece_key, self._ttl_ms)
            pipe.execute()

    def delete(self, name: str) -> bool:
        with self._translating():
            raw = self._client.getrange(self._key(name), 0, _HEAD.size - 1)
            keys = [self._key(name)]
            if len(raw) == _HEAD.size and raw.startswith(_MAGIC):
                keys += self._piece_keys(name, _parse(raw))
            return bool(self._client.unlink(*keys))

    # --- inside ------------------------------------------------------------------------------

    def _check_time(self, until: float, n_done: int, nbytes: int) -> None:
        """The library limits each command; a record of many pieces takes many of them."""
        if self._clock.elapsed() > until and n_done < nbytes:
            raise TierFault("too slow", f"{n_done} of {nbytes} bytes")

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _piece_keys(self, name: str, head: RecordHead) -> Iterator[str]:
        if head.writer:
            n = -(-head.nbytes // self._piece_nbytes_in(head))
            yield from (f"{self._key(name)}:{head.writer:x}:{i}" for i in range(n))

    def _tagged(self, writer: int) -> int:
        """The writer's number, with its piece size in KiB in the low bits: servers may differ."""
        return (writer >> 24 << 24) | (self._piece_nbytes >> 10) if writer else 0

    @staticmethod
    def _piece_nbytes_in(head: RecordHead) -> int:
        return max((head.writer & 0xFFFFFF) << 10, 1024)

    def _drop(self, keys: Sequence[str]) -> None:
        """Delete pieces without a head; if that fails too, they expire."""
        try:
            if keys:
                self._client.unlink(*keys)
        except self._errors.RedisError:
            return

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """What the library raises is raised as a tier's fault."""
        errors = self._errors
        try:
            yield
        except errors.OutOfMemoryError as e:
            raise TierFull(first_line(e)) from e
        except (errors.AuthenticationError, errors.NoPermissionError) as e:
            raise PermanentFault("no permission", first_line(e)) from e
        except errors.TimeoutError as e:
            raise TierFault("too slow", first_line(e)) from e
        except errors.ReadOnlyError as e:
            raise TierFault("read-only", first_line(e)) from e
        except (errors.RedisError, OSError) as e:
            raise TierFault("unreachable", first_line(e)) from e


def open_tier(options: TierOptions) -> StoreTier:
    """Raises SetupError."""
    settings = StoreSettings.of(options, OWN_SETTINGS)
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as e:
        raise SetupError(
            "--tier redis://... needs the package redis: pip install 'firn[redis]'."
        ) from e
    attempt_s = settings.deadline_s / 2
    ttl_s = number(options, "ttl_s", TTL_S, low=1)
    piece_kb = int(number(options, "piece_kb", PIECE_NBYTES >> 10, low=1))
    try:
        client = redis.Redis.from_url(
            options.location,
            socket_timeout=attempt_s,
            socket_connect_timeout=min(CONNECT_S, attempt_s),
            socket_read_size=READ_NBYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as e:
        raise SetupError(f"--tier redis://...: {e}") from e
    store = RedisClient(
        client,
        redis.exceptions,
        prefix=options.extra.get("prefix", "firn"),
        ttl_s=ttl_s,
        attempt_s=attempt_s,
        piece_nbytes=min(piece_kb << 10, 0xFFFFFF << 10),
    )
    return StoreTier(store, settings, CircuitBreaker("redis"))


def _parse(raw: bytes) -> RecordHead:
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise Damaged("not a record")
    _, nbytes, written_at, writer = _HEAD.unpack_from(raw)
    if nbytes > 1 << 32:
        raise Damaged("not a record", "its length")
    return RecordHead(nbytes, written_at, writer)


def _cut(pieces: Sequence[Buffer], nbytes: int) -> Iterator[memoryview]:
    """These bytes in pieces of this size, the last one shorter."""
    if pieces:
        whole = np.concatenate([np.frombuffer(p, dtype=np.uint8) for p in pieces if len(p)]).data
        for at in range(0, len(whole), nbytes):
            yield whole[at : at + nbytes]
