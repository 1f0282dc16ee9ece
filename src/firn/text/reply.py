"""One choice of a reply, from tokens to events: detokenize, split, stop.

Runs on the asyncio thread, once per token, so plain text with nothing to look for takes a short
path. Stop strings are searched for in what the user reads, not in reasoning, calls or their markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from firn.core.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Token,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.ports import Tokenizer
from firn.core.values import Tool, ToolChoice, ToolMode
from firn.text.detokenizer import Detokenizer
from firn.text.formats import ReplyFormat
from firn.text.logprobs import LogprobBuffer
from firn.text.make_splitter import make_splitter
from firn.text.pieces import CallArguments, CallStart, Piece, ReasoningPiece, TextPiece
from firn.text.stops import StopMatcher


class ReplyReader:
    """Owner: the session of the request, one reader per choice.

    feed() each token, then finish() once. When `stopped`, the last list from feed() has ended with
    ChoiceFinished, and neither is called again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        choice: int,
        stop: tuple[str, ...],
        format: ReplyFormat,
        tools: tuple[Tool, ...],
        tool_choice: ToolChoice,
        prompt_tail: str,
        new_id: Callable[[], str],
        logprobs: bool,
    ) -> None:
        self.stopped = False
        self.n_completion = 0
        self.n_reasoning = 0
        self._choice = choice
        self._new_id = new_id
        self._parallel = tool_choice.parallel
        self._detokenizer = Detokenizer(tokenizer, visible=format.visible)
        active = () if tool_choice.mode is ToolMode.NONE else tools
        self._splitter = make_splitter(format, active, prompt_tail)
        self._stops = StopMatcher(stop) if stop else None
        self._logprobs = LogprobBuffer(tokenizer, format.visible) if logprobs else None
        self._is_plain = not (self._splitter or self._stops or self._logprobs)
        self._n_raw = 0
        self._piece_end = 0
        """Where the last text or reasoning ends in the raw reply, or later: markup may lie before it."""
        self._n_calls = 0

    @property
    def in_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def n_held_logprobs(self) -> int:
        """Logprobs that wait for their text, which may be part of a call."""
        return self._logprobs.n_waiting if self._logprobs else 0

    def feed(self, token: Token) -> list[Event]:
        self.n_completion += 1
        text = self._detokenizer.feed(token.id)
        if self._is_plain:
            return [TextDelta(self._choice, text)] if text else []
        if self._logprobs:
            self._logprobs.add(token, self._n_raw, self._n_raw + len(text))
        if self._splitter and self._splitter.in_reasoning:
            self.n_reasoning += 1
        return self._events(self._split(text)) if text else []

    def finish(self, reason: Literal["stop", "length"]) -> list[Event]:
        """The events for what was held back, and ChoiceFinished."""
        pieces = self._split(self._detokenizer.flush())
        if self._splitter:
            pieces = [*pieces, *self._splitter.finish(was_cut=reason == "length")]
        events = self._events(pieces)
        if self.stopped:
            return events
        events += self._flush_stops()
        finished: FinishReason = "tool_calls" if reason == "stop" and self._n_calls else reason
        return [*events, ChoiceFinished(self._choice, finished)]

    def _split(self, text: str) -> Sequence[Piece]:
        at, self._n_raw = self._n_raw, self._n_raw + len(text)
        if not text:
            return ()
        return self._splitter.feed(text) if self._splitter else (TextPiece(text, at),)

    def _events(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events += self._text(piece)
            elif isinstance(piece, ReasoningPiece):
                events += self._flush_stops()
                events.append(ReasoningDelta(self._choice, piece.text))
                self._piece_end += len(piece.text)
                if self._logprobs:
                    self._logprobs.drop(self._piece_end)
            elif isinstance(piece, CallStart):
                events += self._flush_stops()
                events.append(self._start_call(piece))
            else:
                self._extend_arguments(events, piece)
            if self.stopped:
                break
        return events

    def _text(self, piece: TextPiece) -> list[Event]:
        end = self._piece_end = piece.at + len(piece.text)
        if not self._stops:
            return self._deltas(piece.text, end)
        text, stop = self._stops.feed(piece.text)
        if stop is None:
            return self._deltas(text, end - self._stops.n_pending)
        self.stopped = True
        events = self._deltas(text, end - self._stops.n_after - len(stop))
        return [*events, ChoiceFinished(self._choice, "stop", stop)]

    def _flush_stops(self) -> list[Event]:
        return self._deltas(self._stops.flush(), self._piece_end) if self._stops else []

    def _deltas(self, text: str, end: int) -> list[Event]:
        """`end`: where the text ends in the raw reply."""
        if not text:
            return []
        logprobs = self._logprobs.take(end - len(text), end) if self._logprobs else ()
        return [TextDelta(self._choice, text, logprobs)]

    def _start_call(self, call: CallStart) -> Event:
        if self._n_calls and not self._parallel:
            self.stopped = True
            return ChoiceFinished(self._choice, "tool_calls")
        index, self._n_calls = self._n_calls, self._n_calls + 1
        return ToolCallStarted(self._choice, index, call.id or self._new_id(), call.name)

    def _extend_arguments(self, events: list[Event], piece: CallArguments) -> None:
        last = events[-1] if events else None
        text = piece.text
        if isinstance(last, ToolCallDelta):
            text = events.pop().arguments + text  # type: ignore[union-attr]
        events.append(ToolCallDelta(self._choice, self._n_calls - 1, text))
