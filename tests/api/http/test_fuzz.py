"""Random bytes on a connection: never a 5xx, nothing is left over, and /health answers throughout.

`make soak` has the long version, on a real server.
"""

from __future__ import annotations

import threading

import httpx
import pytest

from firn.api.http import connections as module
from firn.api.http.connections import ConnectionLimits, Connections
from tests.api.live import serve
from tests.raw_fuzz import RawFuzzer


@pytest.mark.parametrize("seed", range(2))
def test_no_bytes_are_a_server_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 0.02)
    connections = Connections(ConnectionLimits(head_s=0.2, body_s=0.2, drain_s=0.1))
    with serve(connections=connections) as live:
        fuzzer = RawFuzzer(live.port, seed=seed)
        for _ in range(2):  # so that the pool has started its threads
            httpx.post(f"{live.url}/v1/tokenize", json={"text": "a"})
        n_threads = threading.active_count()
        for i in range(40):
            fuzzer.shoot()
            if i % 10 == 0:
                assert httpx.get(f"{live.url}/health", timeout=30).status_code == 200
        assert fuzzer.server_errors == []
        assert fuzzer.statuses[400]
        assert fuzzer.statuses[200]
        while connections.n_open or live.n_calls():
            live.on_loop(lambda: None)
        assert threading.active_count() <= n_threads + 1
        errors = [r for r in live.log.records if r.levelname in ("ERROR", "CRITICAL")]
        assert errors == []
