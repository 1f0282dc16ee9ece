"""What a cache and its tier still have to do, and waiting for it, in tests of the whole engine."""

from __future__ import annotations

import time

from tests.cache.lab import check_books, n_leases, nodes_of, records_of
from tests.harness import Harness
from tests.waiting import POLL_S

DEADLINE_S = 60.0


def on_its_way(harness: Harness) -> dict[str, int]:
    """Everything that must be zero when no request is under way. Call on the engine thread."""
    cache, health, worker = harness.cache, harness.engine.health(), harness.worker
    (tier,) = cache.records.tiers
    pending = {
        "requests": health.n_waiting + health.n_prefilling + health.n_decoding,
        "memory of requests": harness.engine.parts.budget.view()["held_bytes"],
        "cursors that race": len(cache.loader.racing),
        "loads": len(tier._reading),
        "records to spill": len(tier._to_spill),
        "records being written": sum(r.writing != 0 for r in records_of(cache)),
        "leases": n_leases(cache),
        "pins": sum(n.n_pins for n in nodes_of(cache.records.tree)),
        "orders": worker.n_pending,
        "queued bytes": worker.write_nbytes,
        "records that leave": cache.records.ledger.leaving_nbytes,
        "a scan": int(tier.scanning),
        "results": worker.n_results,
    }
    return {what: n for what, n in pending.items() if n}


def settle(harness: Harness) -> None:
    """Wait until all is written and nobody holds on to anything; the books must be right then."""
    until = time.monotonic() + DEADLINE_S
    while left := harness.between_steps(lambda: on_its_way(harness)):
        assert time.monotonic() < until, left
        time.sleep(POLL_S)
    harness.between_steps(lambda: check_books(harness.cache))
