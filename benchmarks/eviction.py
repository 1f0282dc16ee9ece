"""Which eviction order keeps what is needed again? Orders compared on a trace, without a model.

    .venv/bin/python benchmarks/eviction.py                       # traffic in the shape of agents
    .venv/bin/python benchmarks/eviction.py conversation_trace.jsonl    # any trace, such as Mooncake's

For caches of several sizes, each a share of everything that the trace ever stores, the table shows
the share of prompt tokens that come from memory, or from an SSD, by eviction order.

    last use   the cache's own: least recently used first, the end of a chain before its beginning
    uses       every doubling of the uses counts as an hour (firn's order until November 2026)
    turns      what was resumed at its end counts as younger, by half the age of what is evicted
    foresight  evicts what is needed again last: no order can do much better

Takes a few minutes on one core; `--requests 5000` takes seconds.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from pathlib import Path

import numpy as np
from agent_trace import agent_trace
from report import cli, grid, save
from servers import lab

from firn.traces.read import read
from firn.traces.simulate import SimulatedSsd, SimulatedTier, play
from firn.traces.trace import Ints, Trace

HOUR_S = 3600.0
SHARES = (0.01, 0.05, 0.2)


class SimulatedMemory(SimulatedTier):
    """Evicts in the tree's order, but nothing that the running request has used or added."""

    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        super().__init__(trace, n_blocks=n_blocks)
        self._last = np.full(trace.n_nodes, -1, dtype=np.int32)
        """The request that used a block last."""
        self._at: list[float] = trace.at.tolist()

    def _rank(self, node: int) -> float:
        last: int = self._last[node]
        return self._at[last]

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        self._last[path] = i

    def _store(self, i: int, path: Ints, start: int) -> None:
        new = path[start : max(self._n_blocks, start)]  # everything but its own path can be evicted
        leased = []
        while self._n_stored + len(new) > self._n_blocks:
            self._lowest()
            if self._last[self._heap[0][3][-1]] == i:
                leased.append(heapq.heappop(self._heap))
            else:
                self._drop_lowest()
        for entry in leased:
            heapq.heappush(self._heap, entry)
        self._add(i, new, start)


class UsesInMemory(SimulatedMemory):
    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        super().__init__(trace, n_blocks=n_blocks)
        self._uses = np.zeros(trace.n_nodes, dtype=np.int32)

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        super()._use(i, path, n_there, n_hit)
        self._uses[path[:n_hit]] += 1

    def _add(self, i: int, new: Ints, start: int) -> None:
        self._uses[new] = 0
        super()._add(i, new, start)

    def _rank(self, node: int) -> float:
        return super()._rank(node) + HOUR_S * math.log2(1 + int(self._uses[node]))


class UsesOnSsd(SimulatedSsd):
    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        super().__init__(trace, n_blocks=n_blocks)
        self._uses = np.zeros(trace.n_nodes, dtype=np.int32)

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        self._uses[path[:n_hit]] += 1
        super()._use(i, path, n_there, n_hit)

    def _touch(self, path: Ints, now: float) -> None:
        stamps = now - self._lower[: len(path)] + HOUR_S * np.log2(1.0 + self._uses[path])
        self._stamps[path] = np.maximum(self._stamps[path], stamps)

    def _add(self, i: int, new: Ints, start: int) -> None:
        self._uses[new] = 0
        super()._add(i, new, start)


class Turns(SimulatedMemory):
    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        super().__init__(trace, n_blocks=n_blocks)
        self._ranks = np.zeros(trace.n_nodes)
        self._goes_on = np.zeros(trace.n_nodes, dtype=bool)
        self._age_s = 0.0
        """Average age of what is evicted."""
        self._now = 0.0

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        super()._use(i, path, n_there, n_hit)
        self._now = self._at[i]
        grows = n_hit > 0 and not self._goes_on[path[n_hit - 1]]
        rank = self._now + (self._age_s / 2 if grows else 0.0)
        self._ranks[path] = np.maximum(self._ranks[path], rank)
        self._goes_on[path[max(n_hit - 1, 0) : -1]] = True

    def _rank(self, node: int) -> float:
        return float(self._ranks[node])

    def _drop_lowest(self) -> None:
        node = self._heap[0][3][-1]
        age_s = self._now - self._at[self._last[node]]
        self._age_s += 0.01 * (age_s - self._age_s) if self._age_s else age_s
        self._ranks[node], self._goes_on[node] = 0.0, False
        super()._drop_lowest()


def with_foresight(trace: Trace, n_blocks: int) -> Ints:
    """Blocks of each prompt that were cached, if what is needed again last is evicted first."""
    n = len(trace)
    next_use, uses = np.full(trace.n_nodes, n, dtype=np.int64), []
    for i in reversed(range(n)):
        path = trace.path(i)
        uses.append(next_use[path].copy())
        next_use[path[: trace.n_prompt_blocks[i]]] = i
    uses.reverse()
    held = np.zeros(trace.n_nodes, dtype=bool)
    depths, n_held, heap = np.zeros(n, dtype=np.int32), 0, list[tuple[int, int, int]]()
    for i in range(n):
        path = trace.path(i)
        there = held[path]
        n_there = len(path) if there.all() else int(there.argmin())
        depths[i] = min(n_there, int(trace.n_prompt_blocks[i]))
        new = path[n_there : max(n_blocks, n_there)]
        next_use[path] = uses[i]
        held[new] = True
        n_held += len(new)
        for depth, (node, use) in enumerate(zip(path.tolist(), uses[i].tolist(), strict=True)):
            if held[node]:
                heapq.heappush(heap, (-use, -depth, node))
        while n_held > n_blocks:
            use, _, node = heapq.heappop(heap)
            if held[node] and -use == next_use[node]:
                held[node] = False
                n_held -= 1
    return depths


ORDERS: dict[str, dict[str, type[SimulatedTier]]] = {
    "memory": {"last use": SimulatedMemory, "uses": UsesInMemory, "turns": Turns},
    "ssd": {"last use": SimulatedSsd, "uses": UsesOnSsd},
}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("trace", nargs="?", type=Path, help="(default: made up)")
    options.add_argument("--requests", type=int, default=50_000, help="of a trace that is made up")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--no-foresight", action="store_true")
    options.add_argument("--out", type=Path, help="JSON file (default: eviction.json in the lab)")
    args = options.parse_args()
    if args.trace is None:
        block = 256
        trace = Trace.of(agent_trace(args.requests, seed=args.seed, block=block), block=block)
    else:
        source = read(args.trace)
        trace = Trace.of(source.entries, block=source.block)

    def rate(depths: Ints) -> float:
        return float(depths.sum()) * trace.block / trace.n_prompt_tokens

    span_d = (trace.at[-1] - trace.at[0]) / 86_400
    print(
        f"{len(trace):,} requests in {span_d:.1f} days, {trace.n_prompt_tokens / 1e6:,.1f} M prompt "
        f"tokens, {trace.working_set_tokens / 1e6:,.1f} M ever stored; "
        f"without limits {rate(trace.known):.2%} are reused\n"
    )
    rows, result = [["", *(f"{share:.0%}" for share in SHARES)]], {}
    for tier, orders in ORDERS.items():
        for name, store in orders.items():
            began = time.perf_counter()
            rates = [
                rate(play(store(trace, n_blocks=int(trace.n_nodes * share)))) for share in SHARES
            ]
            result[f"{tier}, {name}"] = rates
            each_us = (time.perf_counter() - began) / len(SHARES) / len(trace) * 1e6
            print(f"{tier}, {name}: {each_us:.0f} us a request", flush=True)
    if not args.no_foresight:
        result["foresight"] = [
            rate(with_foresight(trace, int(trace.n_nodes * share))) for share in SHARES
        ]
    rows += [[name, *(f"{r:.2%}" for r in rates)] for name, rates in result.items()]
    print(f"\n{grid(rows)}\n")
    save(args.out or lab() / "eviction.json", "eviction", options=vars(args), result=result)


if __name__ == "__main__":
    cli(main)
