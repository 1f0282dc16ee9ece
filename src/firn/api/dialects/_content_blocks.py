"""A reply as a list of content blocks of one kind each, as Anthropic and OpenAI's Responses show it."""

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

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, eq=False)
class ContentBlock:
    """id, name: of a call, whose text is the JSON of its arguments."""

    index: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockGrown:
    block: ContentBlock
    piece: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: ContentBlock


BlockEvent = BlockOpened | BlockGrown | BlockClosed


class ContentBlocks:
    """Owner: one encoder, or one fold. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self.finish: ChoiceFinished | None = None
        self._open: ContentBlock | None = None

    def take(self, event: Event) -> list[BlockEvent]:
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

    def close(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [BlockClosed(block)]

    def _grow(
        self, kind: BlockKind, piece: str, logprobs: tuple[TextLogprob, ...] = ()
    ) -> list[BlockEvent]:
        changes: list[BlockEvent] = []
        if self._open is None or self._open.kind != kind:
            changes = [*self.close(), *self._begin(kind)]
        block = self.all[-1]
        block.pieces.append(piece)
        block.logprobs.extend(logprobs)
        return [*changes, BlockGrown(block, piece, logprobs)]

    def _begin(self, kind: BlockKind, *, id: str = "", name: str = "") -> list[BlockEvent]:
        self._open = ContentBlock(len(self.all), kind, id, name)
        self.all.append(self._open)
        return [BlockOpened(self._open)]
