"""Stop strings, matched on text across token borders; no part of a match leaks."""

from __future__ import annotations

from collections.abc import Iterable

from firn.text.scan import Finder


class StopMatcher:
    """The stop that ends first wins, as it would if the text came one character at a time."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._finder = Finder(stops)

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to pass on, the stop that matched or None). Feed no more after a match."""
        before, stop, _ = self._finder.feed(text)
        return before, stop or None

    def flush(self) -> str:
        """What was held back for a match that did not come."""
        return self._finder.flush()
