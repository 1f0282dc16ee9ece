"""A reply as a list of blocks, each of one kind: how Anthropic and OpenAI's Responses show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from firn.core.events import (
    ChoiceFinished,
    Event,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
    ToolCallStarted,
)

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """`id` and `name` are a call's; its text is the JSON of its arguments."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    piece: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Step = Opened | Grown | Closed


class Blocks:
    """Owned by one encoder, or by one fold. Blocks come one after another, never two at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish: ChoiceFinished | None = None
        self._open: Block | None = None

    def take(self, event: Event) -> list[Step]:
        """What the event does to the blocks, in order."""
        match event:
            case TextDelta():
                return self._grow("text", event.text, event.logprobs)
            case ReasoningDelta():
                return self._grow("reasoning", event.text)
            case ToolCallStarted():
                return [*self.close(), *self._begin("call", id=event.id, name=event.name)]
            case ToolCallDelta():
                return self._grow("call", event.arguments)
            case ChoiceFinished():
                self.finish = event
                return self.close()
            case _:
                return []

    def close(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Closed(block)]

    def _grow(self, kind: Kind, piece: str, logprobs: tuple[TextLogprob, ...] = ()) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            steps = [*self.close(), *self._begin(kind)]
        block = self.all[-1]
        block.pieces.append(piece)
        block.logprobs.extend(logprobs)
        return [*steps, Grown(block, piece, logprobs)]

    def _begin(self, kind: Kind, *, id: str = "", name: str = "") -> list[Step]:
        self._open = Block(len(self.all), kind, id, name)
        self.all.append(self._open)
        return [Opened(self._open)]
