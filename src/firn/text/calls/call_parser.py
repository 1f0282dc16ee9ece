"""The basis of tool-call parsers: generators that read their text and wait for more of it.

A parser's `script` reads from a `Tape` as if the whole call were there. Each `yield` inside the
tape's methods waits for more text, so the parser works however the stream is split. It reports what
it reads with `start` and `arguments`, and raises NotACall if the text turns out to be something
else.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from firn.text.calls.schema import ToolSchemas
from firn.text.reply.pieces import CallArguments, CallPiece, CallStart
from firn.text.well_formed import well_formed

ParseCall = Callable[[str, Sequence[dict[str, Any]]], object]
"""(the text between the markers, the tools as OpenAI writes them) -> a call, or a list of calls.

A call is {"name": ..., "arguments": {...}}, with an "id" where the model gave one. Any exception
means that the text is not a call.
"""


T = TypeVar("T")
Script = Generator[None, None, T]
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class NativeParser:
    """`closes` is "" for a format whose calls run to the end of the reply."""

    name: str
    opens: str
    closes: str
    parse: ParseCall

    @property
    def tokens(self) -> list[str]:
        """Every text in the markers that may be a control token."""
        tokens = [self.opens, self.closes]
        for marker in (self.opens, self.closes):
            tokens += re.findall(r"<[^<>]*>", marker)
        return [t for t in tokens if t]


class NotACall(Exception):
    """The text after the marker is not a call of this format."""


class TextEnded(NotACall):
    """The reply ended inside the call."""


class Tape:
    """The text of a call as it arrives. `pos` is the reading position.

    # text:  [0, kept) already part of a call   [kept, pos) read   [pos, ...) to come
    """

    def __init__(self, marker: str) -> None:
        self.text = marker
        self.pos = len(marker)
        self.ended = False
        self._kept = 0
        self._n_dropped = 0

    def add(self, text: str) -> None:
        self.text = self.text[self._kept :] + text
        self.pos -= self._kept
        self._n_dropped += self._kept
        self._kept = 0

    def position(self) -> int:
        """The reading position, valid across waits; see `back_to`."""
        return self._n_dropped + self.pos

    def back_to(self, position: int) -> None:
        self.pos = position - self._n_dropped

    def keep(self) -> None:
        """Marks everything read so far as part of a call: `rest` will not return it."""
        self._kept = self.pos

    def rewind(self) -> None:
        """Goes back to the end of what was kept, to read on in another way."""
        self.pos = self._kept

    def rest(self) -> str:
        """All text that belongs to no call."""
        return self.text[self._kept :]

    def more(self) -> Script[None]:
        """Waits for text; raises TextEnded if the reply is over."""
        if self.ended:
            raise TextEnded
        yield

    def peek(self, n: int = 1) -> Script[str]:
        """The next n characters; fewer at the end of the reply."""
        while len(self.text) - self.pos < n and not self.ended:
            yield
        return self.text[self.pos : self.pos + n]

    def take(self, literal: str) -> Script[bool]:
        """Steps over `literal` if it is next."""
        is_next = yield from self.starts_with(literal)
        if is_next:
            self.pos += len(literal)
        return is_next

    def starts_with(self, literal: str) -> Script[bool]:
        """Whether `literal` is next; decided as early as possible."""
        while True:
            have = self.text[self.pos : self.pos + len(literal)]
            if have == literal:
                return True
            if self.ended or not literal.startswith(have):
                return False
            yield

    def expect(self, literal: str) -> Script[None]:
        if not (yield from self.take(literal)):
            raise TextEnded if self.ends_inside(literal) else NotACall

    def close(self, literal: str, *, stray: str = "") -> Script[None]:
        """Steps over a closing marker, and over spaces and stray characters in front of it.

        If it is not next, nothing is stepped over: the call has ended without it.
        """
        start = self.position()
        yield from self.skip(SPACE + stray)
        is_next = yield from self.take(literal)
        if not is_next and self.ends_inside(literal):
            self.pos = len(self.text)
        elif not is_next:
            self.back_to(start)

    def ends_inside(self, literal: str) -> bool:
        """Whether the reply has ended in the middle of this marker."""
        return self.ended and literal.startswith(self.text[self.pos :])

    def skip(self, chars: str = SPACE) -> Script[None]:
        """Steps over any of these characters; stops at the end of the reply."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos] in chars:
                self.pos += 1
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def until(self, *markers: str, limit: int | None = None) -> Script[tuple[str, str]]:
        """(the text before the first of these markers, the marker); both are stepped over."""
        start = self.position()
        n_seen = 0
        longest = max(map(len, markers))
        while True:
            self.back_to(start)
            hits = [(self.text.find(m, self.pos + n_seen), m) for m in markers]
            first = min((h for h in hits if h[0] >= 0), default=None)
            if first is not None:
                at, marker = first
                before = self.text[self.pos : at]
                if limit is not None and len(before) > limit:
                    raise NotACall
                self.pos = at + len(marker)
                return before, marker
            n_seen = max(0, len(self.text) - self.pos - longest + 1)
            if limit is not None and n_seen > limit:
                raise NotACall
            yield from self.more()

    def flow(self, *markers: str) -> Script[tuple[str, str]]:
        """The next piece of the text before the first marker, as soon as there is one.

        (piece, ""), or (piece, marker) once the marker has arrived and was stepped over. Raises
        TextEnded at the end of the reply, after all the text was returned.
        """
        while True:
            text = self.text[self.pos :]
            hits = [(text.find(m), m) for m in markers]
            first = min((h for h in hits if h[0] >= 0), default=None)
            if first is not None:
                at, marker = first
                self.pos += at + len(marker)
                return text[:at], marker
            n_free = len(text) if self.ended else len(text) - _overlap(text, markers)
            if n_free:
                self.pos += n_free
                return text[:n_free], ""
            yield from self.more()


def _overlap(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest suffix of `text` that begins a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for n in range(longest, 0, -1):
        if any(m.startswith(text[-n:]) for m in markers):
            return n
    return 0


class CallParser(ABC):
    """Reads the calls of one format: text in, calls out; `rest` is the text that belongs to no call.

    Created at an opening marker and fed the text after it. When `done`, `rest` is the text after
    the last call; if there was no call, all text from the marker on. Owner: a splitter.
    """

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = False) -> None:
        self.done = False
        self.marker = marker
        self.schemas = schemas
        self.tape = Tape(marker)
        self.name = ""
        self.n_calls = 0
        self.is_open = False
        self.missing: list[str] = []
        """What the arguments of the open call lack to be JSON, last first."""
        self.has_arguments = False
        """Whether anything of the arguments of the open call has been read."""
        self._was_cut = True
        self._known_only = known_only
        self._out: list[CallPiece] = []
        self._script = self.script()

    def feed(self, text: str) -> list[CallPiece]:
        self.tape.add(text)
        return self._run()

    def finish(self, *, was_cut: bool = True) -> list[CallPiece]:
        """The reply is over. A call that lacks only its closing marker still counts, and if the model
        has ended the reply itself, the arguments become JSON."""
        self.tape.ended = True
        self._was_cut = was_cut
        return self._run()

    @property
    def rest(self) -> str:
        return self.tape.rest()

    @abstractmethod
    def script(self) -> Script[None]:
        """Reads from the end of the marker to the end of the call, or of several calls."""

    # --- what a script reports -------------------------------------------------------------

    def start(self, name: str, call_id: str | None = None) -> None:
        """Reports that a call begins. Raises NotACall if the name cannot be a tool's."""
        self.name = self.checked(name)
        self.n_calls += 1
        self.is_open = True
        self.missing.clear()
        self.has_arguments = False
        self._out.append(CallStart(self.name, call_id or None))
        self.tape.keep()

    def checked(self, name: str) -> str:
        name = name.strip()
        if not name or any(c in SPACE for c in name):
            raise NotACall
        if self._known_only and name not in self.schemas:
            raise NotACall
        return name

    def arguments(self, text: str) -> None:
        """Reports a piece of the JSON text of the call's arguments."""
        if text:
            self._out.append(CallArguments(well_formed(text)))
            self.has_arguments = True
        self.tape.keep()

    def complete(self) -> None:
        """Reports what makes JSON of the arguments, which are not read any further."""
        self.arguments("".join(reversed(self.missing)) if self.has_arguments else "{}")
        self.end()

    def end(self) -> None:
        """Reports that the call's arguments are complete."""
        self.is_open = False
        self.tape.keep()

    def whole(self, name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> None:
        """Reports a call and all its arguments, in the types of its schema.

        Raises NotACall for a value that JSON cannot express, such as infinity.
        """
        values = self.schemas.coerce(name.strip(), arguments)
        try:
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise NotACall from e
        self.start(name, call_id)
        self.arguments(text)
        self.end()

    def _run(self) -> list[CallPiece]:
        if not self.done:
            try:
                next(self._script)
            except StopIteration:
                self.tape.keep()
                self.done = True
            except TextEnded:
                self.done = True
                if self.is_open and not self._was_cut:
                    self.complete()
                if self.n_calls:  # the beginning of another marker or call is not text
                    self.tape.pos = len(self.tape.text)
                    self.tape.keep()
            except NotACall:
                self.done = True
                if self.is_open:  # the client has seen its beginning, so the call ends here
                    self.complete()
        pieces, self._out = self._out, []
        return pieces
