"""Runs replies through splitters, and puts the pieces together again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.core.values import Tool
from firn.text.calls.call_parser import NativeParser
from firn.text.reply.formats import ReplyFormat, make_splitter
from firn.text.reply.pieces import CallArguments, CallStart, Piece, ReasoningPiece, TextPiece

WEATHER = Tool(
    "get_weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
    },
)
OTHER = Tool("other", "Takes anything.", {})
TOOLS = (WEATHER, OTHER)
NATIVE = NativeParser("fake", "<call>", "</call>", lambda text, tools: json.loads(text))
TO_USER = {
    "harmony": "<|channel|>final<|message|>",
    "muse": " to=user<|message|>",
    "functionary": "all\n",
}
"""What precedes text in a format that shapes the whole reply."""
NEXT_PART = {
    "harmony": "<|start|>assistant",
    "muse": "<|eom|><|start|>assistant",
    "functionary": ">>>",
}
"""What is between two parts of such a reply."""


@dataclass
class Call:
    name: str
    text: str = ""
    id: str | None = None

    @property
    def arguments(self) -> Any:
        return json.loads(self.text)


@dataclass
class Reply:
    """A reply put together again. `order`: the kinds of its pieces, with runs of a kind merged."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    n_pieces: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reply) and self.key() == other.key()

    def key(self) -> tuple[object, ...]:
        return (self.text, self.reasoning, self.calls, self.order)


def fold(pieces: Iterable[Piece], raw: str | None = None) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.n_pieces += 1
        kind = type(piece).__name__
        if reply.order[-1:] != [kind]:
            reply.order.append(kind)
        if isinstance(piece, TextPiece):
            assert piece.text
            if raw is not None:
                assert raw[piece.at : piece.at + len(piece.text)] == piece.text
            reply.text += piece.text
        elif isinstance(piece, ReasoningPiece):
            assert piece.text
            reply.reasoning += piece.text
        elif isinstance(piece, CallStart):
            reply.calls.append(Call(piece.name, id=piece.id))
        elif isinstance(piece, CallArguments):
            assert piece.text
            reply.calls[-1].text += piece.text
    return reply


def read(
    format: ReplyFormat,
    chunks: Sequence[str],
    *,
    tools: tuple[Tool, ...] = TOOLS,
    tail: str = "",
    was_cut: bool = True,
) -> Reply:
    splitter = make_splitter(format, tools, tail)
    assert splitter is not None
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += splitter.feed(chunk)
    pieces += splitter.finish(was_cut=was_cut)
    return fold(pieces, "".join(chunks))


def read_at_every_split(
    format: ReplyFormat,
    text: str,
    *,
    tools: tuple[Tool, ...] = TOOLS,
    tail: str = "",
    was_cut: bool = True,
) -> Reply:
    """The reply, which must not depend on how its text is cut."""

    def read_in(chunks: Sequence[str]) -> Reply:
        return read(format, chunks, tools=tools, tail=tail, was_cut=was_cut)

    whole = read_in([text])
    assert read_in(list(text)) == whole
    for i in range(1, len(text)):
        assert read_in([text[:i], text[i:]]) == whole, i
    return whole
