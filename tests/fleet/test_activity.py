"""/v1/activity of the front: how many may watch, there and in a model's process."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx

from firn.api.calls.event_router import EventRouter
from firn.api.http.auth import ANYONE
from firn.api.http.exchange import Exchange
from firn.fleet import server
from firn.fleet.catalogue import ModelCatalogue
from firn.fleet.vouching import VouchedKeys, vouch
from tests.api.live import serve
from tests.api.observe.watchers import SHARE, check_that_watchers_are_limited
from tests.fleet.fronts import config


def test_watchers_that_come_at_the_same_time_are_limited(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        made = config("firn-demo", "firn-demo-hybrid", tmp=tmp_path)
        parts = server.build(made, ModelCatalogue(made), tmp_path)
        try:
            await check_that_watchers_are_limited(parts.app)
        finally:
            parts.pool.close()

    asyncio.run(check())


def headers_for(address: str) -> list[tuple[bytes, bytes]]:
    """What the front of a server without keys tells a model's process."""
    return vouch(Exchange(caller=replace(ANYONE, address=address)))


def test_a_models_process_shares_its_watchers_by_the_fronts_clients() -> None:
    with serve(keys=VouchedKeys()) as live, ExitStack() as streams, httpx.Client() as client:

        def watch(address: str) -> int:
            headers = headers_for(address)
            stream = client.stream("GET", f"{live.url}/v1/activity", headers=headers)
            return streams.enter_context(stream).status_code

        assert [watch("10.0.0.1") for _ in range(SHARE + 1)] == [200] * SHARE + [429]
        assert watch("10.0.0.2") == 200
        assert watch("fe80::1%eth0") == 200


def test_a_models_process_shares_its_calls_by_the_fronts_clients() -> None:
    ask = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    router = EventRouter(max_calls=4)
    with serve(keys=VouchedKeys(), event_router=router) as live, ExitStack() as streams:
        live.engine.hold("decode", after=4)

        def call(address: str) -> int:
            headers = headers_for(address)
            stream = httpx.stream(
                "POST", f"{live.url}/v1/chat/completions", headers=headers, json=ask
            )
            return streams.enter_context(stream).status_code

        assert [call("10.0.0.1") for _ in range(3)] == [200, 200, 429]
        assert call("10.0.0.2") == 200
