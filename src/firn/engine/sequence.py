"""The mutable state of a request in flight. Owner: the engine thread."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field, replace
from typing import overload

from firn.core.events import AdmissionTimes, Admitted
from firn.core.ports import Cursor, LiveRow
from firn.core.values import Job, Prompt


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens at positions [at, end) of a reply that are given, not picked by the model."""

    at: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.at + len(self.tokens)

    def rest(self, start: int) -> ForcedTokens:
        """The part from `start` on."""
        n_done = max(start - self.at, 0)
        return ForcedTokens(self.at + n_done, self.tokens[n_done:])


NOT_FORCED = ForcedTokens(0, ())


class ListTail(abc.Sequence[int]):
    """A view of a growing list, from a position on."""

    def __init__(self, tokens: list[int], start: int) -> None:
        self._tokens = tokens
        self._start = start

    def __len__(self) -> int:
        return len(self._tokens) - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self._tokens[self._start :][index]
        return self._tokens[index + self._start if index >= 0 else index]


@dataclass(eq=False)
class Choice:
    """One reply of a request: its row on the device and the tokens it has so far."""

    sequence: Sequence
    index: int
    row: LiveRow | None = None
    cursor: Cursor | None = None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    n_rescues: int = 0
    forced: ForcedTokens = NOT_FORCED

    @property
    def n_picked(self) -> int:
        """Reply tokens that have been picked, including those in flight."""
        if self.row is None:
            return len(self.tokens)
        # After a step was taken back there are more tokens here than the row has consumed.
        in_flight = self.row.n_tokens + 1 - len(self.sequence.job.prompt)
        return max(in_flight, len(self.tokens))

    def force(self, forced: ForcedTokens) -> bool:
        """Force these tokens, at the next position or later. False: earlier ones are still under way."""
        if self.forced.at < self.n_picked < self.forced.end:
            return False
        self.forced = ForcedTokens(max(forced.at, self.n_picked), forced.tokens)
        return True


def looked_up(cursor: Cursor, began_at: float) -> AdmissionTimes:
    """The times of a request whose prompt the cache has just looked up."""
    now = time.perf_counter()
    return AdmissionTimes(began_at, now, now, loads=cursor.racing)


class AsItIs:
    """What a preparer has done with a request's prompt: nothing."""

    def told(self, admission: Admitted) -> Admitted:
        """What the client is told, given what the cache has done for the prompt that is read."""
        return admission


AS_IT_IS = AsItIs()


@dataclass(eq=False)
class Sequence:
    """One request, from its arrival to its end."""

    job: Job
    cursor: Cursor
    choices: list[Choice] = field(default_factory=list)
    admitted: bool = False
    announced: bool = False
    """The client has been told what the cache did for it."""
    need_nbytes: int = 0
    waits: AdmissionTimes | None = None
    was_preempted: bool = False
    """Its rows were dropped, and it waits in the queue again."""
    was_at_fault: bool = False
    """A fault in its work may have been another request's, so it was tried again, but only once."""
    has_failed: bool = False
    prepared: AsItIs = AS_IT_IS
    """What was done with its prompt, which `job` has; `job` itself is replaced then."""

    def __post_init__(self) -> None:
        self.choices = [Choice(self, i) for i in range(self.job.n)]

    def mark_started(self) -> None:
        """It has left the queue and has a row."""
        if self.waits is not None:
            self.waits = replace(self.waits, row_at=time.perf_counter())

    @property
    def admission(self) -> Admitted:
        """What the cache has done for its prompt, and how long each wait took."""
        return replace(self.prepared.told(self.cursor.admission), waits=self.waits)

    @property
    def open_choices(self) -> list[Choice]:
        return [c for c in self.choices if not c.done]

    @property
    def replies(self) -> list[int]:
        """Lengths of the replies that are not over."""
        return [len(c.tokens) for c in self.open_choices]

    @property
    def has_begun(self) -> bool:
        """Whether its replies have tokens: then they can no longer be read as one prompt."""
        return any(c.tokens or c.done for c in self.choices)


@dataclass(eq=False)
class PrefillTask:
    """A prompt to read, and the choices that start to decode when it is read.

    # [0, row.n_tokens) done   [row.n_tokens, n_total) to do   the last token makes the logits
    """

    number: int
    sequence: Sequence
    prompt: Prompt
    choices: list[Choice]
    cursor: Cursor
    row: LiveRow
    wants_logprobs: bool = False
    """The logprobs of the prompt's tokens are wanted."""
    is_preparing: bool = False
    """Something has to be done with its prompt before it is read."""
    chunk_start: int = 0
    chunk_began: float = 0.0
    share: float = 1.0
    """Its share of the tokens of its last pass."""
    others: list[PrefillTask] = field(default_factory=list)
    """Tasks read in the same pass; this one leads it."""
    n_pictures: int = 0
    """How many of its prompt's pictures have been read, or passed, before a chunk."""
    could_batch: bool = False
    """Other tasks could have been read in the same pass, whether or not they were."""

    @property
    def is_prompt(self) -> bool:
        """Whether it reads the request's prompt, not the tokens of an interrupted reply."""
        return self.cursor is self.sequence.cursor

    @property
    def is_plain(self) -> bool:
        """Whether a row may read its tokens in any company, and nothing else is wanted of them."""
        return not (self.is_preparing or self.wants_logprobs or self.prompt.has_gaps)

    @property
    def n_total(self) -> int:
        return len(self.prompt) - 1

    @property
    def n_left(self) -> int:
        return self.n_total - self.row.n_tokens

    @property
    def progress(self) -> tuple[int, int]:
        """Positions done, and all positions."""
        prompt = self.prompt
        return prompt.position(self.row.n_tokens), prompt.position(len(prompt))
