from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.live import Live, serve


@pytest.fixture
def live() -> Iterator[Live]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def shared_live() -> Iterator[Live]:
    """One server for tests that leave nothing behind."""
    with serve() as running:
        yield running
