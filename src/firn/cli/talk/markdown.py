"""Markdown of a reply, styled for a terminal while it arrives. Pure.

Nothing is dropped but the markers of what is styled: text that only looks like Markdown stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PLAIN, STRONG, CODE, QUIET = "", "bold", "cyan", "dim"
Styled = tuple[str, str]
"""A text and its style."""

_BLOCK = re.compile(r"( *)(#{1,6} |```|[-*+] )")
_MAY_BE_BLOCK = re.compile(r" *(#{0,6}|`{0,2}|[-*+])")
_INLINE = re.compile(r"`|\*\*|\n")


class MarkdownStyler:
    """One reply. What a marker may still change is held back, at most to the end of its line."""

    def __init__(self) -> None:
        self._held = ""
        self._starts_line = True
        self._in_fence = False
        self._line_style = PLAIN
        """The style of the rest of a heading, of code, or of a fence."""

    def feed(self, text: str) -> list[Styled]:
        self._held += text
        return list(self._style(is_end=False))

    def flush(self) -> list[Styled]:
        """What was held back. The next reply begins anew."""
        rest = list(self._style(is_end=True))
        self._starts_line, self._in_fence, self._line_style = True, False, PLAIN
        return rest

    def _style(self, *, is_end: bool) -> Iterator[Styled]:
        while self._held:
            if self._starts_line:
                if not is_end and _MAY_BE_BLOCK.fullmatch(self._held):
                    return
                yield from self._begin_line()
            elif self._line_style:
                yield from self._to_line_end(self._line_style)
            else:
                piece = self._inline(is_end=is_end)
                if piece is None:
                    return
                yield piece

    def _begin_line(self) -> Iterator[Styled]:
        self._starts_line = False
        block = _BLOCK.match(self._held)
        marker = block[2] if block else ""
        if marker == "```":
            self._in_fence = not self._in_fence
            self._line_style = QUIET
            return
        self._line_style = CODE if self._in_fence else PLAIN
        if block is None or self._in_fence:
            return
        if marker.startswith("#"):
            self._line_style = STRONG
            self._held = self._held[block.end() :]
        else:
            yield self._take(block.end(), f"{block[1]}• ", PLAIN)

    def _to_line_end(self, style: str) -> Iterator[Styled]:
        end = self._held.find("\n")
        if end < 0:
            yield self._take(len(self._held), self._held, style)
            return
        if end:
            yield self._take(end, self._held[:end], style)
        yield self._end_line()

    def _inline(self, *, is_end: bool) -> Styled | None:
        """The next piece of the line; None: it may depend on what follows."""
        found = _INLINE.search(self._held)
        if found is None:
            n = len(self._held) - (not is_end and self._held.endswith("*"))
            return self._take(n, self._held[:n], PLAIN) if n else None
        if found.start():
            return self._take(found.start(), self._held[: found.start()], PLAIN)
        marker = found[0]
        if marker == "\n":
            return self._end_line()
        line = self._held.partition("\n")[0]
        end = line.find(marker, len(marker) + 1)
        inner = line[len(marker) : end]
        if end > 0 and inner == inner.strip():
            return self._take(end + len(marker), inner, CODE if marker == "`" else STRONG)
        if end < 0 and not (is_end or len(line) < len(self._held)):
            return None
        return self._take(len(marker), marker, PLAIN)

    def _end_line(self) -> Styled:
        self._starts_line, self._line_style = True, PLAIN
        return self._take(1, "\n", PLAIN)

    def _take(self, n: int, shown: str, style: str) -> Styled:
        self._held = self._held[n:]
        return shown, style
