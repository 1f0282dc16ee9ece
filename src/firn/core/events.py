"""Two streams of events, one for each side of the detokenizer.

Engine events carry tokens and travel from the engine thread to a request's session. Events carry
text and travel from the session to the dialect, which renders them; a non-streaming answer is a fold
of the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from firn.core.errors import FirnError
from firn.core.reuse import Reason
from firn.core.values import Usage

# --- engine -> session ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms; `top` is sorted, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionTimes:
    """What a request waited for before its prompt was read. Times are from `time.perf_counter`.

    lookup_at, looked_up_at: start and end of the cache's lookup. row_at: when it left the queue.
    loads: whether records were being loaded from tiers below memory.
    """

    lookup_at: float
    looked_up_at: float
    row_at: float
    loads: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue; `n_cached` tokens of its prompt need no computing.

    tiers: how many of them came from each tier. reason: why there were not more; None: no more could
    be reused. keep: the share of the rest that is read; None: all of it. n_skipped: how many tokens
    are not, once known. waits: for the dashboard and the log.
    """

    n_cached: int
    tiers: tuple[tuple[str, int], ...] = ()
    reason: Reason | None = None
    keep: float | None = None
    n_skipped: int = 0
    waits: AdmissionTimes | None = field(default=None, compare=False, repr=False)

    @property
    def why(self) -> str:
        """The reason in words, or nothing."""
        return "" if self.reason is None else str(self.reason)


def reasons_in_words(admitted: Sequence[Admitted]) -> str:
    """Why the prompts of one call reused no more, each reason once."""
    return ", ".join(dict.fromkeys(a.why for a in admitted if a.why))


@dataclass(frozen=True, slots=True)
class Advanced:
    """More of the prompt came from the cache while it was being read. Replaces Admitted."""

    admission: Admitted


@dataclass(frozen=True, slots=True)
class Prefilled:
    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from `start` on.

    They arrive in order, starting at the second token: nothing precedes the first.
    """

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """`forced`: the model did not pick it; see `Engine.force`.

    n_drafted, n_accepted: tokens drafted and accepted in the decode step that ends with this token.
    """

    choice: int
    id: int
    logprob: TokenLogprob | None = None
    forced: bool = False
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """No more tokens for this choice. `stop`: the model ended it; `length`: max_tokens did."""

    choice: int
    reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class JobDone:
    """The last event of a job that ran to its end."""


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The last event of a job that did not."""

    error: FirnError


EngineEvent = (
    Admitted | Advanced | Prefilled | PromptLogprobs | Token | ChoiceDone | JobDone | JobFailed
)

# --- session -> dialect --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token's text and logprob, as the OpenAI API shows them.

    raw: its bytes in the text; empty: the text does not show it. logprob None: it is the prompt's first
    token, which nothing precedes.
    """

    text: str
    raw: bytes
    logprob: float | None
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was rendered and submitted to the engine."""

    n_prompt: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A prompt left the queue; `n_cached` of its tokens need no computing."""

    n_cached: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill is under way; streams send it as a comment line, which keeps the connection alive."""

    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    choice: int
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """`index` counts the calls of a choice from 0."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call's arguments, as JSON text."""

    choice: int
    index: int
    arguments: str


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    choice: int
    reason: FinishReason
    stop_string: str | None = None
    """The stop string that ended it, if one did."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a stream that ran to its end.

    first_token_at: from `time.perf_counter`; None: there was no token. ended_at: Unix time.
    """

    usage: Usage
    first_token_at: float | None = None
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a stream that did not."""

    error: FirnError


Event = (
    Started
    | Resumed
    | Progress
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallDelta
    | ChoiceFinished
    | Ended
    | Failed
)
