"""One choice of a reply, from tokens to events: detokenize, split, stop.

Runs on the asyncio thread, once per token, so plain text with nothing to look for takes a short
path. Stop strings are searched for in what the user reads, not in reasoning, calls or their markup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from firn.core.events import (
    ChoiceFinished,
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    Token,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.ports import Tokenizer
from firn.core.values import Tool, ToolChoice, ToolMode
from firn.text.reply.detokenizer import Detokenizer
from firn.text.reply.formats import ReplyFormat, make_splitter
from firn.text.reply.pieces import CallArguments, CallStart, Piece, ReasoningPiece, TextPiece
from firn.text.reply.stream_finder import StreamFinder


class StopMatcher:
    """The stop that ends first wins, as it would if the text arrived one character at a time."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._finder = StreamFinder(stops)
        self.n_after = 0
        """How many characters of the last text follow the stop that matched."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to pass on, the stop that matched or None). Feed no more after a match."""
        before, stop, after = self._finder.feed(text)
        self.n_after = len(after)
        return before, stop or None

    @property
    def n_pending(self) -> int:
        """How many characters wait for a match to complete or fail."""
        return len(self._finder.pending)

    def flush(self) -> str:
        """What was held back for a match that did not complete."""
        return self._finder.flush()


class _Entry(NamedTuple):
    """A token whose text is [start, end) of the raw reply; empty while a character is incomplete."""

    start: int
    end: int
    logprob: TokenLogprob


class LogprobBuffer:
    """Tokens wait here until some of their text is delivered. Owner: one choice of a reply.

    A token is shown with the delta that has its first character; the tokens of a split character,
    with that character. Tokens of reasoning, calls and markup are never shown: the bytes of the
    tokens that are shown add up to the choice's text.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special - visible
        self._waiting: deque[_Entry] = deque()

    @property
    def n_waiting(self) -> int:
        """Logprobs that are kept here, judging by the last token; its alternatives count, too."""
        return len(self._waiting) * (1 + len(self._waiting[-1].logprob.top)) if self._waiting else 0

    def add(self, token: Token, start: int, end: int) -> None:
        if token.logprob is not None and token.id not in self._hidden:
            self._waiting.append(_Entry(start, end, token.logprob))

    def take(self, start: int, end: int) -> tuple[TextLogprob, ...]:
        """The logprobs of the tokens with text in [start, end); earlier tokens are dropped."""
        logprobs = []
        while self._waiting and self._waiting[0].start < end:
            entry = self._waiting.popleft()
            if entry.end > start or entry.start >= start:
                logprobs.append(self._shown(entry.logprob))
        return tuple(logprobs)

    def drop(self, end: int) -> None:
        """No text before this will be shown: reasoning of any length keeps no tokens here."""
        while self._waiting and self._waiting[0].start < end and self._waiting[0].end <= end:
            self._waiting.popleft()

    def _shown(self, logprob: TokenLogprob) -> TextLogprob:
        data = self._tokenizer.token_bytes(logprob.token)
        top = []
        for token, value in logprob.top:
            raw = self._tokenizer.token_bytes(token)
            top.append((_text(raw), raw, value))
        return TextLogprob(_text(data), data, logprob.logprob, tuple(top))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


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
        self._is_forced = False
        """Whether the last token was."""
        self._hides = False
        """Whether to hide forced tokens: they close thinking that had already ended, since they were
        withdrawn too late. The model has seen them, but the user need not."""

    @property
    def in_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def n_held_logprobs(self) -> int:
        """Logprobs that wait for their text, which may be part of a call."""
        return self._logprobs.n_waiting if self._logprobs else 0

    def feed(self, token: Token) -> list[Event]:
        self.n_completion += 1
        if token.forced != self._is_forced:
            self._is_forced = token.forced
            self._hides = token.forced and not self.in_reasoning
        if self._hides:
            return []
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
