"""What crosses between the processes that serve one sharded model: calls, as values.

Rank 0 decides and sends calls; the followers make them in the same order. A call is a name, a few JSON
values and bytes. A follower's answer is a call too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RankCall:
    name: str
    args: tuple[Any, ...] = ()
    """JSON values."""
    blob: bytes = b""


OnAnswer = Callable[[int, RankCall], None]
"""Gets a follower's rank and its answer, on the connection's thread."""


class RankLost(BaseException):
    """The ranks are no longer in step: this process must end.

    Not an Exception: no code between the device and the engine's end may take it for the fault of one
    request and go on.
    """


class Followers(Protocol):
    """All ranks except 0, as rank 0 sees them."""

    @property
    def n_followers(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """One of them is gone, and this process is about to end."""
        ...

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        """Send a call to all, after those that wait (`tell_later`). Any thread. Raises RankLost."""
        ...

    def tell_later(self, name: str, *args: Any) -> None:
        """Keep a call until the next one is sent."""
        ...

    def on_answer(self, name: str, take: OnAnswer) -> None:
        """Set what is called with answers of this name."""
        ...

    def end_group(self, why: str) -> RankLost:
        """Something happened that the followers do not know of: end the group. Returns what to raise."""
        ...
