"""What can go wrong with stored records. To the engine it is a miss, never a wrong answer."""

from __future__ import annotations

from firn.core.errors import FirnError


class TierError(FirnError):
    """Any fault of a tier. `reason` is a short fixed phrase under which faults are counted."""

    code = "cache_tier_error"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class IoClosed(TierError):
    """The worker was closed before it reached the order."""

    def __init__(self) -> None:
        super().__init__("closed")


# --- reading -------------------------------------------------------------------------------


class Missing(TierError):
    """The tier does not have the record, or no longer has it."""

    def __init__(self, reason: str = "not stored") -> None:
        super().__init__(reason)


class Unusable(Missing):
    """The record exists but cannot be used: no permission, another version of firn, another key."""


class Unwanted(TierError):
    """Nobody wants the record any more, so it was neither read nor written."""

    def __init__(self) -> None:
        super().__init__("unwanted")


class Damaged(TierError):
    """The bytes are not the ones written, or belong to another record."""


class Foreign(TierError):
    """Another format version, or no record at all. Such a file is left alone."""


class Locked(Foreign):
    """Encrypted with another key."""

    def __init__(self) -> None:
        super().__init__("encrypted with another key")


class NotEncrypted(Foreign):
    """With a key, plain records are not accepted: anyone with write access could forge one."""

    def __init__(self) -> None:
        super().__init__("not encrypted", "with a key, only records sealed with it are read")


# --- writing -------------------------------------------------------------------------------


class Refused(TierError):
    """The tier works but does not accept this record: budget spent, or nothing older to evict."""


class TierFull(Refused):
    """The record does not fit, and nothing more may be evicted for it."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("full", detail)


class TierFault(TierError):
    """The tier itself fails: disk full, read-only, gone. Writing pauses and is retried later."""


class NotForgotten(FirnError):
    """What was cleared cannot be found by this process, but may be by one that is started later."""

    status = 503
    code = "cache_not_cleared"

    def __init__(self, tier: str, why: TierError) -> None:
        super().__init__(
            f"It was cleared from memory, but the {tier} tier could not be changed ({why.message}), so "
            "a restarted server may find it again. firn keeps trying; repeat the request to be sure."
        )


class PermanentFault(TierFault):
    """A fault that an immediate retry cannot fix: wrong credentials, no such bucket."""
