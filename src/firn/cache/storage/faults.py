"""What can go wrong with stored records. For the engine it is a miss, never a wrong answer."""

from __future__ import annotations

from firn.core.errors import FirnError


class TierError(FirnError):
    """Any fault of a tier. `reason` is a short fixed phrase, by which faults are counted."""

    code = "cache_tier_error"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


# --- reading -------------------------------------------------------------------------------


class Missing(TierError):
    """The tier does not have the record, or not any more."""

    def __init__(self, reason: str = "not stored") -> None:
        super().__init__(reason)


class Unusable(Missing):
    """It is there, but may not be read, is of another version of firn, or sealed with another key."""


class Unwanted(TierError):
    """Nobody wants the record any more, so it was not read or written."""

    def __init__(self) -> None:
        super().__init__("unwanted")


class Damaged(TierError):
    """The bytes are not those that were written, or belong to another record."""


class Foreign(TierError):
    """Another format version, or no record at all. Such a file is left alone."""


class Locked(Foreign):
    """Encrypted with another key."""

    def __init__(self) -> None:
        super().__init__("encrypted with another key")


class NotEncrypted(Foreign):
    """Who has a key takes no other record: anybody who may write to the tier could have made it up."""

    def __init__(self) -> None:
        super().__init__("not encrypted", "with a key, only what it has sealed is read")


# --- writing -------------------------------------------------------------------------------


class Refused(TierError):
    """The tier works but will not take this record: write budget spent, or nothing older to evict."""


class TierFull(Refused):
    """The record does not fit, and nothing more may be evicted for it."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("full", detail)


class TierFault(TierError):
    """The tier itself fails: disk full, read-only, gone. Writing pauses and is tried again later."""


class PermanentFault(TierFault):
    """A fault that a second attempt cannot mend: wrong credentials, no such bucket."""
