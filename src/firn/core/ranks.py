"""What crosses between the processes that serve one sharded model: calls, as values.

Rank 0 decides and tells; the others do as they are told, in the same order. A call is a name, a few JSON
values and bytes. What a follower answers is a call too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RankCall:
    name: str
    args: tuple[Any, ...] = ()
    """What JSON can say."""
    blob: bytes = b""


OnAnswer = Callable[[int, RankCall], None]
"""Gets a follower's rank and its answer, on a thread of the channel's."""


class RankLost(BaseException):
    """The ranks are no longer in step: this process must end.

    Not an Exception: nothing between the device and the end of the engine may take it for the fault of
    one request and go on.
    """


class Followers(Protocol):
    """All ranks but 0, as rank 0 speaks to them."""

    @property
    def n_followers(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """One of them is gone, and this process is about to end."""
        ...

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        """Send a call to all, with what waits for it (`tell_later`). Any thread. Raises RankLost."""
        ...

    def tell_later(self, name: str, *args: Any) -> None:
        """A call that may wait for the next one that is sent."""
        ...

    def on_answer(self, name: str, take: OnAnswer) -> None:
        """Who is given the answers of this name."""
        ...

    def end_group(self, why: str) -> RankLost:
        """What happened here the others do not know of: end the group. Returns what to raise."""
        ...
