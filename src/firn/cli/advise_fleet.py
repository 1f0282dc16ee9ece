"""`firn cache advise --servers N`: plays a trace against a fleet, and shows the result as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from firn.bench.report import grid
from firn.cli.terminal import plain_console
from firn.traces.fleet import ROUTINGS, FleetResult, Routing, play_fleet
from firn.traces.trace import Trace

SHARES = (0.125, 0.5, 2.0)
"""Default sizes of a server's own tiers, relative to its share of everything that is stored."""
Key = tuple[Routing, bool, int]
"""Routing, whether there is a store, and the number of blocks of each server."""
SizeText = Callable[[int], str]
MIB = 1 << 20


def show_fleet(
    trace: Trace,
    *,
    n_servers: int,
    sizes: Sequence[int],
    ttl_s: float,
    block_nbytes: int,
    size_text: SizeText,
    as_json: bool,
) -> None:
    """sizes: of each server, in blocks. size_text: formats a size."""
    sizes = sizes or [max(round(s * trace.n_nodes / n_servers), 1) for s in SHARES]
    results: dict[Key, FleetResult] = {}
    for routing in ROUTINGS:
        for has_store in (False, True):
            for size in sizes:
                results[routing, has_store, size] = play_fleet(
                    trace,
                    n_servers=n_servers,
                    n_blocks=size,
                    routing=routing,
                    ttl_s=ttl_s if has_store else None,
                )
    if as_json:
        print(json.dumps(_json(trace, results, n_servers, ttl_s, block_nbytes), indent=2))
        return
    unlimited = float(trace.known.sum()) * trace.block / max(trace.n_prompt_tokens, 1)
    console = plain_console()
    console.print(
        f"{len(trace):,} requests to {n_servers} servers; one with everything would reuse "
        f"{unlimited:.1%} of the prompt tokens.\n",
        highlight=False,
    )
    console.print(grid(_rows(results, sizes, size_text)), highlight=False)
    for line in _traffic_lines(trace, results, sizes, block_nbytes, size_text):
        console.print(line, highlight=False)


def _rows(
    results: dict[Key, FleetResult], sizes: Sequence[int], size_text: SizeText
) -> list[list[str]]:
    rows = [["routing", "store", *(f"{size_text(size)} each" for size in sizes), "busiest"]]
    for routing in ROUTINGS:
        for has_store in (False, True):
            played = [results[routing, has_store, size] for size in sizes]
            cells = [f"{p.reused:.1%}" for p in played]
            rows.append([routing, "yes" if has_store else "no", *cells, f"{played[0].busiest:.2f}"])
    return rows


def _traffic_lines(
    trace: Trace,
    results: dict[Key, FleetResult],
    sizes: Sequence[int],
    block_nbytes: int,
    size_text: SizeText,
) -> list[str]:
    """The traffic between a fleet and its store."""
    lines = [""]
    span_s = max(float(trace.at[-1] - trace.at[0]), 1.0)
    for routing in ROUTINGS:
        played = results[routing, True, sizes[0]]
        reads, writes = played.n_read / len(trace), played.n_written / len(trace)
        line = f"{routing}, {size_text(sizes[0])} each: "
        line += f"a prompt reads {reads:.1f} blocks and writes {writes:.1f}"
        if block_nbytes:
            read, written = (
                n * block_nbytes / span_s / MIB for n in (played.n_read, played.n_written)
            )
            line += f" ({read:.1f} and {written:.1f} MiB/s on average)"
        lines.append(f"{line}; the store holds up to {size_text(played.n_kept)}.")
    return lines


def _json(
    trace: Trace, results: dict[Key, FleetResult], n_servers: int, ttl_s: float, block_nbytes: int
) -> dict[str, Any]:
    return {
        "requests": len(trace),
        "prompt_tokens": trace.n_prompt_tokens,
        "block_tokens": trace.block,
        "block_bytes": block_nbytes,
        "servers": n_servers,
        "store_ttl_s": ttl_s,
        "runs": [
            {
                "routing": routing,
                "store": has_store,
                "server_blocks": size,
                "reused": played.reused,
                "local": played.local,
                "from_store": played.from_store,
                "blocks_read": played.n_read,
                "blocks_written": played.n_written,
                "blocks_kept": played.n_kept,
                "busiest": played.busiest,
            }
            for (routing, has_store, size), played in results.items()
        ],
    }
