"""How much do several servers behind a router reuse of a trace, with and without a shared store?

    .venv/bin/python benchmarks/fleet.py fleet.jsonl --servers 8 --ssd-gb 16,64,256

A simulation: no server runs. `benchmarks/agent_trace.py` makes traces. Takes a minute for each size
with 60,000 requests.

Each server has an SSD of its own, with the cache's eviction order (simulate.py). The store takes
blocks that are used a second time and keeps them for `ttl_s` after their last use; a server also
keeps what it reads from the store. The router takes turns, or prefers the server that was last sent
the longest known prefix of the prompt, unless that one is overloaded. One process, request by
request.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from report import cli, grid, numbers, save
from servers import lab

from firn.core.units import seconds
from firn.traces.read import read
from firn.traces.simulate import TELL_EVERY, Progress, SimulatedSsd
from firn.traces.trace import Ints, Trace

Routing = Literal["round robin", "cache-aware"]
ROUTINGS: tuple[Routing, ...] = ("round robin", "cache-aware")
MATCH_SHARE = 0.3
"""A prompt with a smaller share of known blocks goes to the server with the least load."""
MAX_LOAD = 1.5
"""A server is passed over while its load is more than this many times the mean, and exceeds it
by MIN_LOAD_BLOCKS."""
MIN_LOAD_BLOCKS = 200
"""By how many blocks a load must exceed the mean for its server to be passed over."""
LOAD_FADES_S = 60.0
"""Load fades with this time constant."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of one trace. Rates are shares of the prompt tokens; counts are in blocks."""

    local: float
    """Reused from the server's own tiers."""
    from_store: float
    """Additionally reused from the store."""
    n_read: int
    n_written: int
    n_kept: int
    """Most blocks in the store at any time."""
    busiest: float
    """What the busiest server computed, as a multiple of the mean."""

    @property
    def reused(self) -> float:
        return self.local + self.from_store


def play_fleet(
    trace: Trace,
    *,
    n_servers: int,
    n_blocks: int,
    routing: Routing,
    ttl_s: float | None = None,
    progress: Progress = lambda n: None,
) -> FleetResult:
    """n_blocks: of each server. ttl_s: how long the store keeps unused blocks; None: no store."""
    servers = [SimulatedSsd(trace, n_blocks=n_blocks) for _ in range(n_servers)]
    store = SimulatedStore(trace, ttl_s) if ttl_s is not None else None
    router = _Router(trace, n_servers)
    turns = cycle(range(n_servers))
    n_local = n_from_store = 0
    computed = np.zeros(n_servers, dtype=np.int64)
    for i in range(len(trace)):
        server = next(turns) if routing == "round robin" else router.choose(i)
        n_hit = servers[server].play(i)
        n_fetched = store.play(i, n_hit) if store is not None else 0
        n_local += n_hit
        n_from_store += n_fetched
        n_computed = int(trace.n_prompt_blocks[i]) - n_hit - n_fetched
        computed[server] += n_computed
        router.sent(i, server, n_computed)
        if i % TELL_EVERY == 0:
            progress(i)
    progress(len(trace))
    if store is not None:
        store.count(float(trace.at[-1]))
    tokens = max(trace.n_prompt_tokens, 1)
    return FleetResult(
        n_local * trace.block / tokens,
        n_from_store * trace.block / tokens,
        n_read=n_from_store,
        n_written=store.n_written if store else 0,
        n_kept=store.n_most if store else 0,
        busiest=float(computed.max() / max(computed.mean(), 1)),
    )


class SimulatedStore:
    """Reused blocks, each kept for `ttl_s` after its last use. Owner: one `play_fleet`."""

    def __init__(self, trace: Trace, ttl_s: float) -> None:
        self._trace = trace
        self._ttl_s = ttl_s
        self._used_at = np.full(trace.n_nodes, -math.inf)
        self.n_written = 0
        self.n_most = 0
        self._counted_at = -math.inf

    def play(self, i: int, n_local: int) -> int:
        """How many blocks it adds to the server's own `n_local`; stores the used blocks."""
        trace, now = self._trace, float(self._trace.at[i])
        prompt = trace.path(i)[: trace.n_prompt_blocks[i]]
        there = now - self._used_at[prompt] <= self._ttl_s
        n_there = len(there) if there.all() else int(there.argmin())
        n_used = max(n_local, n_there)
        used = prompt[:n_used]
        self.n_written += int(np.count_nonzero(~there[:n_used]))
        self._used_at[used] = now
        if now - self._counted_at > self._ttl_s / 8:
            self.count(now)
        return max(n_there - n_local, 0)

    def count(self, now: float) -> None:
        """Updates `n_most`. Called only now and then, because it goes through all blocks."""
        self._counted_at = now
        n_stored = int(np.count_nonzero(now - self._used_at <= self._ttl_s))
        self.n_most = max(self.n_most, n_stored)


class _Router:
    """Knows where each block was last sent, and every server's load. Owner: one `play_fleet`."""

    def __init__(self, trace: Trace, n_servers: int) -> None:
        self._trace = trace
        self._owner: Ints = np.full(trace.n_nodes, -1, dtype=np.int32)
        self._load = np.zeros(n_servers)
        self._at = 0.0

    def choose(self, i: int) -> int:
        at = float(self._trace.at[i])
        self._load *= math.exp(-max(at - self._at, 0.0) / LOAD_FADES_S)
        self._at = at
        prompt = self._trace.path(i)[: self._trace.n_prompt_blocks[i]]
        idle = int(self._load.argmin())
        if not len(prompt):
            return idle
        unknown = self._owner[prompt] < 0
        n_known = len(prompt) if not unknown.any() else int(unknown.argmax())
        if n_known < MATCH_SHARE * len(prompt):
            return idle
        owner = int(self._owner[prompt[n_known - 1]])
        load, mean = self._load[owner], self._load.mean()
        is_busy = load > MAX_LOAD * mean and load > mean + MIN_LOAD_BLOCKS
        return idle if is_busy else owner

    def sent(self, i: int, server: int, n_computed: int) -> None:
        self._owner[self._trace.path(i)] = server
        self._load[server] += n_computed


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("trace", type=Path)
    options.add_argument("--servers", type=int, default=8)
    options.add_argument("--ssd-gb", default="16,64,256", help="each server's, in GiB")
    options.add_argument(
        "--store-ttl", default="7d", help="how long the store keeps what is unused"
    )
    options.add_argument("--token-bytes", type=int, default=0, help="(default: the trace's)")
    options.add_argument("--out", type=Path, help="JSON file (default: fleet.json in the lab)")
    args = options.parse_args()
    source = read(args.trace)
    trace = Trace.of(source.entries, block=source.block)
    block_nbytes = trace.block * (args.token_bytes or trace.token_nbytes)
    if not block_nbytes:
        options.error("the trace does not say how many bytes a token takes; add --token-bytes")
    sizes, runs = numbers(args.ssd_gb), list[dict[str, Any]]()
    rows = [
        ["routing", "store", *(f"{gb} GiB each" for gb in sizes), "read", "written", "TiB kept"]
    ]
    for routing, has_store in product(ROUTINGS, (False, True)):
        played = [
            play_fleet(
                trace,
                n_servers=args.servers,
                n_blocks=max(round(gb * 2**30 / block_nbytes), 1),
                routing=routing,
                ttl_s=seconds(args.store_ttl) if has_store else None,
            )
            for gb in sizes
        ]
        runs += [
            {"routing": routing, "store": has_store, "ssd_gb": gb, **asdict(result)}
            for gb, result in zip(sizes, played, strict=True)
        ]
        first = played[0]
        traffic = (first.n_read / len(trace), first.n_written / len(trace))
        kept_tib = first.n_kept * block_nbytes / 2**40
        cells = [*(f"{p.reused:.1%}" for p in played), *(f"{n:.1f}" for n in traffic)]
        rows.append([routing, "yes" if has_store else "no", *cells, f"{kept_tib:.1f}"])
    unlimited = float(trace.known.sum()) * trace.block / max(trace.n_prompt_tokens, 1)
    print(f"One server with everything would reuse {unlimited:.1%} of the prompt tokens.")
    print(f"Blocks read and written a prompt, and TiB kept, are those with {sizes[0]} GiB each.\n")
    print(grid(rows))
    save(args.out or lab() / "fleet.json", "fleet", options=vars(args), result={"runs": runs})


if __name__ == "__main__":
    cli(main)
