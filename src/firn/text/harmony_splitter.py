"""The splitter for harmony, the format of gpt-oss: every part of a reply has a header with its channel.

    <|channel|>analysis<|message|>...<|end|>                                    reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                  text

Written by hand, and on text: openai-harmony's parser needs its own vocabulary, which it downloads.
"""

from __future__ import annotations

import re
from typing import Literal

from firn.text.calls import Script
from firn.text.json_calls import JsonCallParser, JsonTape
from firn.text.pieces import Piece, ReasoningPiece, TextPiece
from firn.text.schema import ToolSchemas
from firn.text.stream_finder import StreamFinder

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROL = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_HEADER_STARTS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=", END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 1024

Kind = Literal["header", "text", "reasoning", "call"]


class HarmonyCall(JsonCallParser):
    """The body of a message to a function: its arguments."""

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = False) -> None:
        self._function = marker
        super().__init__("", schemas, known_only=known_only)

    def script(self) -> Script[None]:
        self.start(self._function)
        char = yield from JsonTape(self.tape).next_char()
        if not char:
            self.arguments("{}")
            return
        yield from self.guarded(self.stream_arguments())


class HarmonySplitter:
    """Owner: one choice of one reply. Without tools, a message to a function is text."""

    def __init__(self, schemas: ToolSchemas, prompt_tail: str) -> None:
        self._schemas = schemas
        self._kind: Kind = "header"
        self._header = ""
        self._finder = StreamFinder(_BODY_ENDS)
        self._call: HarmonyCall | None = None
        self._n_fed = 0
        self._out: list[Piece] = []
        if prompt_tail.endswith(MESSAGE):  # the prompt has begun a message already
            self._begin_body(prompt_tail.rpartition(START)[2])

    @property
    def in_reasoning(self) -> bool:
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._n_fed += len(text)
        while text:
            text = self._read_header(text) if self._kind == "header" else self._read_body(text)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        if self._kind == "header":
            # A header that was cut short is dropped, unless it never was a header.
            if self._header.strip() and "<|" not in self._header:
                self._out.append(TextPiece(self._header, self._n_fed - len(self._header)))
            self._header = ""
        else:
            rest = self._finder.flush()
            self._emit(rest, self._n_fed - len(rest))
            self._end_body()
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._out = self._out, []
        return pieces

    def _read_header(self, text: str) -> str:
        self._header += text
        header, message, body = self._header.partition(MESSAGE)
        n_header = len(header) if message else len(header) - len(MESSAGE) + 1
        if n_header > _MAX_HEADER or not _may_be_header(self._header):
            body, self._header = self._header, ""
            self._kind = "text"
            if body.startswith((START, CHANNEL)):  # else the same header would begin again, forever
                self._emit(body[:1], self._n_fed - len(body))
                body = body[1:]
            return body
        if not message:
            return ""
        self._header = ""
        self._begin_body(header)
        return body

    def _begin_body(self, header: str) -> None:
        """The header decides what the body is."""
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].lstrip()
        name = recipient[1] if recipient else ""
        is_function = name.startswith(_FUNCTIONS) or name in self._schemas
        if is_function and self._schemas.tools:
            self._kind = "call"
            self._call = HarmonyCall(name.removeprefix(_FUNCTIONS), self._schemas)
            self._out += self._call.feed("")
        elif channel.startswith("analysis"):
            self._kind = "reasoning"
        else:
            self._kind = "text"

    def _read_body(self, text: str) -> str:
        finder = self._finder
        before, needle, after = finder.feed(text)
        self._emit(
            before, self._n_fed - len(after) - len(needle) - len(finder.pending) - len(before)
        )
        if not needle:
            return after
        self._end_body()
        self._kind = "header"
        return needle + after if needle in (START, CHANNEL) else after

    def _emit(self, text: str, at: int) -> None:
        if not text:
            return
        if self._call is not None:
            self._out += self._call.feed(text)
        elif self._kind == "reasoning":
            self._out.append(ReasoningPiece(text))
        else:
            self._out.append(TextPiece(text, at))

    def _end_body(self) -> None:
        if self._call is not None:
            self._out += self._call.finish()
            self._call = None


def _may_be_header(text: str) -> bool:
    bare = text.lstrip()
    return any(bare.startswith(s) or s.startswith(bare) for s in _HEADER_STARTS)
