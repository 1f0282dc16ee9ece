"""The basis of splitters for replies in channels: every part has a header that says what its body is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from firn.text.calls.call_parser import CallParser
from firn.text.calls.schema import ToolSchemas
from firn.text.reply.pieces import Piece, ReasoningPiece, TextPiece
from firn.text.reply.stream_finder import StreamFinder

_MAX_HEADER = 1024

Kind = Literal["text", "reasoning"]


class ChannelSplitter(ABC):
    """Owner: one choice of one reply. Without tools, a message to a function is text.

    header_end: ends a header. starts: what a header may begin with. body_ends: what ends a body, besides
    `next_headers`, which also begin the next header. openers: those of `starts` that are no text.
    """

    header_end: ClassVar[str]
    starts: ClassVar[tuple[str, ...]]
    openers: ClassVar[tuple[str, ...]]
    body_ends: ClassVar[tuple[str, ...]]

    def __init__(self, schemas: ToolSchemas, prompt_tail: str) -> None:
        self.schemas = schemas
        self._in_header = True
        self._header = ""
        self._kind: Kind = "text"
        self._next_headers = self.next_headers()
        self._finder = StreamFinder((*self.body_ends, *self._next_headers))
        self._call: CallParser | None = None
        self._n_fed = 0
        self._out: list[Piece] = []
        if prompt_tail.endswith(self.header_end):  # the prompt has begun a message already
            self._begin_body(prompt_tail.rpartition(self.openers[0])[2])

    @abstractmethod
    def body(self, header: str) -> Kind | CallParser:
        """What the body after this header is."""

    def next_headers(self) -> tuple[str, ...]:
        """What begins a header though nothing has ended the body before it."""
        return self.openers

    @property
    def in_reasoning(self) -> bool:
        return not self._in_header and self._call is None and self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._n_fed += len(text)
        while text:
            text = self._read_header(text) if self._in_header else self._read_body(text)
        return self._take_pieces()

    def finish(self, *, was_cut: bool = True) -> list[Piece]:
        if self._in_header:
            # A header that was cut short is dropped, unless it never was a header.
            if self._header.strip() and "<|" not in self._header:
                self._out.append(TextPiece(self._header, self._n_fed - len(self._header)))
            self._header = ""
        else:
            rest = self._finder.flush()
            end = self._n_fed - len(rest)
            if self._call is None or not self._call.done:  # else it is the beginning of a marker
                self._emit(rest, end)
                end = self._n_fed
            self._end_body(end, was_cut=was_cut)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._out = self._out, []
        return pieces

    def _read_header(self, text: str) -> str:
        self._header += text
        header, end, body = self._header.partition(self.header_end)
        n_header = len(header) if end else len(header) - len(self.header_end) + 1
        if n_header > _MAX_HEADER or not self._may_be_header():
            body, self._header = self._header, ""
            self._in_header, self._kind = False, "text"
            if body.startswith(self.openers):  # else the same header would begin again, forever
                self._emit(body[:1], self._n_fed - len(body))
                body = body[1:]
            return body
        if not end:
            return ""
        self._header = ""
        self._begin_body(header)
        return body

    def _may_be_header(self) -> bool:
        bare = self._header.lstrip()
        return any(bare.startswith(s) or s.startswith(bare) for s in self.starts)

    def _begin_body(self, header: str) -> None:
        self._in_header = False
        body = self.body(header)
        if isinstance(body, CallParser):
            self._call = body
            self._out += body.feed("")
        else:
            self._kind = body

    def _read_body(self, text: str) -> str:
        finder = self._finder
        before, needle, after = finder.feed(text)
        end = self._n_fed - len(after) - len(needle) - len(finder.pending)
        self._emit(before, end - len(before))
        if not needle:
            return after
        self._end_body(end)
        self._in_header = True
        return needle + after if needle in self._next_headers else after

    def _emit(self, text: str, at: int) -> None:
        if not text:
            return
        if self._call is not None:
            self._out += self._call.feed(text)
        elif self._kind == "reasoning":
            self._out.append(ReasoningPiece(text))
        else:
            self._out.append(TextPiece(text, at))

    def _end_body(self, end: int, *, was_cut: bool = False) -> None:
        """end: where the body ends in the raw reply."""
        call, self._call = self._call, None
        if call is None:
            return
        self._out += call.finish(was_cut=was_cut)
        if call.rest.strip():  # text, or a call in another format
            self._out.append(TextPiece(call.rest, end - len(call.rest)))
