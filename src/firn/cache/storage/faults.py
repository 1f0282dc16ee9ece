"""What can go wrong with stored records: a miss or a drop for the engine, never a wrong answer."""

from __future__ import annotations

from firn.core.errors import FirnError


class TierError(FirnError):
    """Any fault of a tier. `reason` is a short fixed phrase: what counters are kept by."""

    code = "cache_tier_error"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


# --- reading -------------------------------------------------------------------------------


class Missing(TierError):
    """The record is not there (any more)."""

    def __init__(self, reason: str = "not stored") -> None:
        super().__init__(reason)


class Unwanted(TierError):
    """Nobody waits for the record any more, so it was not read."""

    def __init__(self) -> None:
        super().__init__("unwanted")


class Damaged(TierError):
    """The bytes are not those that were written, or not those of the record asked for."""


class Foreign(TierError):
    """Not for us: another format version, or no record at all. Kept, and never read."""


class Locked(Foreign):
    """Encrypted with a key that is not here."""

    def __init__(self) -> None:
        super().__init__("encrypted with another key")


# --- writing -------------------------------------------------------------------------------


class Refused(TierError):
    """The tier is well but will not take this record: write budget spent, nothing older to evict."""


class TierFull(Refused):
    """Nothing more may be evicted, and the record does not fit."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("full", detail)


class TierFault(TierError):
    """The tier itself fails: disk full, read-only, gone. Writing pauses and is retried later."""
