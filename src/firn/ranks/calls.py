"""What the processes of one sharded model send each other: calls, as values.

Rank 0 decides and sends calls; the followers execute them in the same order. A call is a name, a
few JSON values and bytes. A follower's answer is a call too.
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
"""Called with a follower's rank and its answer."""


class RankLost(BaseException):
    """The ranks are no longer in step: this process must end.

    Not an Exception, so that no handler on the way up can mistake it for the fault of one request
    and continue.
    """


class Followers(Protocol):
    """All ranks except 0, as rank 0 sees them."""

    @property
    def n_followers(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """Whether one of them is gone, in which case this process is about to end."""
        ...

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        """Send a call to all, after those of `tell_later`. Any thread. Raises RankLost."""
        ...

    def tell_later(self, name: str, *args: Any) -> None:
        """Hold a call back until the next one is sent."""
        ...

    def on_answer(self, name: str, take: OnAnswer) -> None:
        """Set the handler of answers with this name."""
        ...

    def end_group(self, why: str) -> RankLost:
        """End the group: something happened that followers cannot know. Returns what to raise."""
        ...
