"""The pieces that a splitter makes of a reply's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """`at`: how many characters of the raw reply come before it."""

    text: str
    at: int


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """`id` is the model's own, where the format has one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


CallPiece = CallStart | CallArguments
Piece = TextPiece | ReasoningPiece | CallPiece
