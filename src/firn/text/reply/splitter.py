"""Splits a reply into text, reasoning and tool calls, however the stream is cut.

No markup is passed on as text, and no text is lost: a tag that never completes, or a call that turns out
not to be one, is text. Blank space around reasoning and calls belongs to the markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from firn.text.calls.call_parser import SPACE, CallParser
from firn.text.reply.pieces import Piece, ReasoningPiece, TextPiece
from firn.text.reply.stream_finder import StreamFinder

QUOTES = ("`", '"', "'")
"""After one of these, the tag that opens reasoning is only mentioned: in code or a quotation."""


class ReplySplitter(Protocol):
    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, was_cut: bool = True) -> list[Piece]:
        """The pieces that were held back. was_cut: the reply was longer than it may be."""
        ...


class MakeParser(Protocol):
    def __call__(self, marker: str, *, known_only: bool) -> CallParser: ...


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How a format marks reasoning.

    drop: markup around the answer, which is never shown. answer: the tags that may enclose the whole
    answer. implied: a reply begins inside reasoning, though no tag opens it. clues: what a chat template
    of the format contains; none: only the user can choose it.
    """

    open: str
    close: str
    drop: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    implied: bool = False
    clues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """Where calls begin, and what reads them from there.

    starts: single characters that begin a call at the beginning of a reply.
    """

    opens: tuple[str, ...]
    make: MakeParser
    starts: tuple[str, ...] = ()


class TagSplitter:
    """Owner: one choice of one reply."""

    def __init__(
        self,
        think: ThinkTags | None,
        calls: CallMarkers | None,
        *,
        in_reasoning: bool,
        drop: tuple[str, ...] = (),
        begun: str = "",
    ) -> None:
        """drop: markup that is never shown. begun: markup of the reply that the prompt ends with."""
        self.in_reasoning = in_reasoning
        self._think = think
        self._calls = calls
        self._drop = (*drop, *think.drop) if think else drop
        self._answer = (think.answer if think else None) or ("", "")
        opens = calls.opens if calls else ()
        tags = (think.open, think.close) if think else ()
        self._text_finder = StreamFinder((*tags, *self._answer, *opens, *self._drop))
        self._reasoning_finder = StreamFinder((think.open, think.close, *opens) if think else ())
        self._parser: CallParser | None = None
        self._n_fed = -len(begun)
        self._at_start = True
        """Neither text nor a call has arrived yet."""
        self._is_fresh = True
        """The next text may begin with a call that has no marker."""
        self._is_quoting = False
        """The last character of the text was a quotation mark."""
        self._has_reasoned = False
        """The reasoning has begun with something other than its tag."""
        self._in_answer = False
        """The tag that encloses the answer has been opened."""
        self._skip = "\n" if in_reasoning else ""
        """Characters to drop before the next text: they belong to the markup before it."""
        self._space = TextPiece("", 0)
        """Blank space that is text only if text follows."""
        self._out: list[Piece] = []
        if begun:
            self.feed(begun)

    def feed(self, text: str) -> list[Piece]:
        self._n_fed += len(text)
        self._read(text)
        return self._take_pieces()

    def finish(self, *, was_cut: bool = True) -> list[Piece]:
        while self._parser is not None:
            self._out.extend(self._parser.finish(was_cut=was_cut))
            self._read(self._leave_parser())
        if self.in_reasoning:
            self._emit_reasoning(self._reasoning_finder.flush())
        else:
            rest = self._text_finder.flush()
            if self._skip != SPACE:  # else another call was cut off in its marker
                self._emit_text(rest, self._n_fed - len(rest))
            if self._space.text:
                self._out.append(self._space)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._out = self._out, []
        return pieces

    def _read(self, text: str) -> None:
        while text:
            if self._parser is not None:
                text = self._read_call(self._parser, text)
            elif self.in_reasoning:
                text = self._read_reasoning(text)
            else:
                text = self._read_text(text)

    # --- text ------------------------------------------------------------------------------

    def _read_text(self, text: str) -> str:
        if self._is_fresh and self._calls is not None and self._calls.starts:
            return self._read_start(text, self._calls)
        finder = self._text_finder
        before, needle, after = finder.feed(text)
        if before:
            self._emit_text(
                before, self._n_fed - len(after) - len(needle) - len(finder.pending) - len(before)
            )
        if needle:
            self._handle_marker(needle, self._n_fed - len(after) - len(needle))
        return after

    def _read_start(self, text: str, calls: CallMarkers) -> str:
        """Reads the beginning of a reply whose calls have no marker."""
        bare = text.lstrip(SPACE)
        if len(bare) < len(text):
            self._emit_text(text[: len(text) - len(bare)], self._n_fed - len(text))
        if not bare:
            return ""
        self._is_fresh = False
        if bare[0] not in calls.starts:
            return bare
        self._enter_parser(bare[0], calls)
        return bare[1:]

    def _handle_marker(self, needle: str, at: int) -> None:
        is_quoted, self._is_quoting = self._is_quoting, False
        opens = self._think is not None and needle == self._think.open
        if needle in self._drop or self._encloses_answer(needle):
            self._is_fresh = self._at_start
            self._space, self._skip = TextPiece("", 0), "\n"
        elif needle in self._answer or (opens and is_quoted):
            self._emit_text(needle, at)
        elif opens:
            self.in_reasoning = True
            self._has_reasoned = False
            self._space, self._skip = TextPiece("", 0), "\n"
        elif self._think and needle == self._think.close:
            if self._at_start:  # reasoning that was never opened, or opened and closed elsewhere
                self._is_fresh = True
                self._space, self._skip = TextPiece("", 0), "\n"
            else:
                self._emit_text(needle, at)
        elif self._calls:
            self._enter_parser(needle, self._calls)

    def _encloses_answer(self, needle: str) -> bool:
        opens, closes = self._answer
        is_tag = (needle == opens and self._at_start) or (needle == closes and self._in_answer)
        if is_tag:
            self._in_answer = needle == opens
        return is_tag

    def _emit_text(self, text: str, at: int) -> None:
        """Passes on text; blank space at its end waits, since a call may follow."""
        self._is_quoting = text[-1:] in QUOTES
        if at < 0:  # what the prompt has begun turned out to be no markup
            text, at = text[-at:], 0
        if self._skip:
            bare = text.lstrip(self._skip)
            if not bare:
                return
            at += len(text) - len(bare)
            text, self._skip = bare, ""
        if self._space.text:
            text, at = self._space.text + text, self._space.at
            self._space = TextPiece("", 0)
        if self._calls is not None or (self._at_start and text.isspace()):
            bare = text.rstrip(SPACE)
            if len(bare) < len(text):
                self._space = TextPiece(text[len(bare) :], at + len(bare))
                text = bare
        if text:
            self._at_start = False
            self._out.append(TextPiece(text, at))

    # --- reasoning -------------------------------------------------------------------------

    def _read_reasoning(self, text: str) -> str:
        before, needle, after = self._reasoning_finder.feed(text)
        if before:
            self._emit_reasoning(before)
        if needle and self._think and needle == self._think.close:
            self.in_reasoning = False
            self._is_fresh = self._at_start
            self._space, self._skip = TextPiece("", 0), "\n"
        elif needle and self._think and needle == self._think.open:
            if self._has_reasoned:  # else the model repeats the tag that the prompt ends with
                self._emit_reasoning(needle)
        elif needle and self._calls:
            self._enter_parser(needle, self._calls)
        return after

    def _emit_reasoning(self, text: str) -> None:
        """Passes on reasoning, without the line breaks between it and its tags."""
        if self._skip:
            text = text.lstrip(self._skip)
            if not text:
                return
            self._skip = ""
        text = self._space.text + text
        bare = text.rstrip("\n")
        self._space = TextPiece(text[len(bare) :], 0)
        if bare:
            self._has_reasoned = True
            self._out.append(ReasoningPiece(bare))

    # --- calls -----------------------------------------------------------------------------

    def _enter_parser(self, marker: str, calls: CallMarkers) -> None:
        # A call inside reasoning is real if the model forgot to close its tag, else a quotation.
        self._parser = calls.make(marker, known_only=self.in_reasoning)

    def _read_call(self, parser: CallParser, text: str) -> str:
        self._out.extend(parser.feed(text))
        return self._leave_parser() if parser.done else ""

    def _leave_parser(self) -> str:
        """The text after the call; without a call, the marker's first character becomes text."""
        parser, self._parser = self._parser, None
        if parser is None:
            return ""
        rest = parser.rest
        if parser.n_calls:
            self._at_start = False
            self._space, self._skip = TextPiece("", 0), "\n" if self.in_reasoning else SPACE
            return rest
        if self.in_reasoning:
            self._emit_reasoning(rest[:1])
        else:
            self._emit_text(rest[:1], self._n_fed - len(rest))
        return rest[1:]
