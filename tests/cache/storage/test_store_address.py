"""The address of a store in `--tier`: a place and settings, or one line that says what is wrong."""

from __future__ import annotations

import pytest

from firn.cache.storage.store_address import parse_address
from firn.cache.tiers import TierOptions
from firn.core.errors import SetupError


def test_an_address_is_a_place_and_settings() -> None:
    address = parse_address("rediss://me:pass%23word@host:7000/2?ttl_s=60&spill=all")
    assert address.kind == "redis"
    assert address.options == TierOptions(
        "rediss://me:pass%23word@host:7000/2", extra={"ttl_s": "60", "spill": "all"}
    )
    assert address.shown == "rediss://host:7000/2"
    assert address.spill == "all"
    assert parse_address("s3://bucket/some/prefix").spill == "proved"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("s3://[", "not a valid address"),
        ("s3://bucket?deadline_s", "not a valid address"),
        ("gs://bucket", "s3://"),
        ("bucket", "s3://"),
        ("s3:///prefix", "must be followed by a host or bucket name"),
    ],
)
def test_what_is_no_address_is_said(text: str, says: str) -> None:
    with pytest.raises(SetupError) as caught:
        parse_address(text)
    assert says in caught.value.message
