"""Stop strings, matched in the text across tokens; no part of a match is passed on."""

from __future__ import annotations

from collections.abc import Iterable

from firn.text.stream_finder import StreamFinder


class StopMatcher:
    """The stop that ends first wins, as it would if the text arrived one character at a time."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._finder = StreamFinder(stops)
        self.n_after = 0
        """How many characters of the last text follow the stop that matched."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to pass on, the stop that matched or None). Feed no more after a match."""
        before, stop, after = self._finder.feed(text)
        self.n_after = len(after)
        return before, stop or None

    @property
    def n_pending(self) -> int:
        """How many characters wait for a match to complete or fail."""
        return len(self._finder.pending)

    def flush(self) -> str:
        """What was held back for a match that did not complete."""
        return self._finder.flush()
