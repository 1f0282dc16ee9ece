"""What a router makes of a reply's text, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """`at`: how many characters of the raw reply come before it."""

    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """`id` is the model's own, where the format has one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the JSON text of the arguments of the call that started last."""

    text: str


CallPiece = CallStart | CallArguments
Piece = Text | Reasoning | CallPiece
