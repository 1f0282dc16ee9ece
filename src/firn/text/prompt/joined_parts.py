"""Joins adjacent texts of a message. Pure."""

from __future__ import annotations

from firn.core.values import MessagePart, TextPart


class JoinedParts:
    """The parts of a message under construction. Owner: the call that builds it.

    Texts are joined once, at the end: a client may send a message of a hundred thousand texts.
    """

    def __init__(self) -> None:
        self._parts: list[MessagePart] = []
        self._texts: list[str] = []
        self._is_open = False
        """The last part is a text, made of `_texts`."""

    def add(self, part: MessagePart, *, between: str = "") -> None:
        """Adds a part. A text extends the previous one, with `between` unless either is empty."""
        if not isinstance(part, TextPart):
            self.end_text()
            self._parts.append(part)
            return
        self._is_open = True
        if part.text:
            self._texts += [between, part.text] if self._texts else [part.text]

    def end_text(self) -> None:
        """The next text will be a part of its own."""
        if self._is_open:
            self._parts.append(TextPart("".join(self._texts)))
        self._texts, self._is_open = [], False

    def result(self) -> tuple[MessagePart, ...]:
        self.end_text()
        return tuple(self._parts)
