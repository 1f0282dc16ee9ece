"""Parses the address given to `--tier`: a store's kind, location and settings. Opens nothing."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from firn.cache.tiers import TierOptions, schemes
from firn.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class StoreAddress:
    kind: str
    options: TierOptions
    shown: str
    """The address to show to people, without credentials and settings."""
    spill: str
    """Which records are written there: the name of a policy in spill_policy.py."""


def parse_address(text: str) -> StoreAddress:
    """Raises SetupError."""
    try:
        parts = urlsplit(text)
        settings = parse_qsl(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True)
    except ValueError:
        raise SetupError("--tier: not a valid address; use s3://bucket/prefix") from None
    kinds = schemes()
    if parts.scheme not in kinds:
        known = ", ".join(f"{scheme}://" for scheme in kinds)
        raise SetupError(f"--tier: an address must begin with one of {known}")
    if not parts.hostname:
        raise SetupError(f"--tier: {parts.scheme}:// must be followed by a host or bucket name")
    place = parts._replace(query="", fragment="")
    host = parts.netloc.rpartition("@")[2]
    extra = dict(settings)
    return StoreAddress(
        kinds[parts.scheme],
        TierOptions(place.geturl(), extra=extra),
        place._replace(netloc=host).geturl(),
        extra.get("spill", "proved"),
    )
