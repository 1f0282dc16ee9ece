"""What this machine computes on."""

from __future__ import annotations

import pytest

from firn.models.device import CHUNKS, Device, device, free_nbytes


def test_the_device_has_a_kind_and_memory() -> None:
    found = device()
    assert found.kind in CHUNKS
    assert found.memory_nbytes > 1 << 28
    assert 0 <= free_nbytes(found) <= found.memory_nbytes


@pytest.mark.parametrize(("kind", "chunk"), [("cpu", 256), ("metal", 512), ("cuda", 2048)])
def test_the_prefill_chunk_is_the_devices(kind: str, chunk: int) -> None:
    assert Device(kind, 1 << 30).prefill_chunk == chunk
