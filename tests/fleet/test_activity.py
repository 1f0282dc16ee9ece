"""/v1/activity of the front: how many may watch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from firn.fleet import server
from firn.fleet.catalogue import ModelCatalogue
from tests.api.watchers import check_that_watchers_are_limited
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
