"""The inventory of a folder with records that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.cache.admin.inventory import take_inventory
from firn.cache.storage.faults import TierFault
from firn.cache.tiers.ssd import SsdTier
from tests.cache.tiers.records import Folder, of_size


def test_a_record_that_cannot_be_read_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata is longer than what the inventory reads of every file."""
    short, long = of_size(10, 1), of_size(10, tokens=range(20_000))
    folder = Folder(tmp_path)
    for record in (short, long):
        folder.write(record)

    def fail(tier: SsdTier, name: str, n: int | None = None) -> None:
        raise TierFault("I/O error")

    monkeypatch.setattr(SsdTier, "read", fail)
    inventory = take_inventory(tmp_path)
    assert [f.name for f in inventory.files if f.fault is None] == [str(short.name)]
    (faulty,) = inventory.faulty
    assert faulty.name == str(long.name)
    assert faulty.fault is not None
    assert faulty.fault.reason == "I/O error"
