"""The model as the engine thread drives it, and the rows it keeps on the device.

A row is a handle: the runner makes it, the engine passes it back, the cache copies blocks out of it.
Each runner has rows of its own class, so the ports are generic in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from firn.core.errors import FirnError
from firn.core.events import TokenLogprob
from firn.core.values import Job, ModelInfo, Prompt

LayerCache: TypeAlias = Any
"""One layer's cache, as mlx-lm made it (untyped). Only `models` and `cache.codecs` look inside."""


MAX_STEP_TOKENS = 32
"""The most tokens that one decode step feeds a row: so many may be added to it at once, and so many
may be taken back while the step is unread."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a row is in its layers: its index in the (possibly batched) caches, and what is settled.

    # [0, n_tokens) settled   [n_tokens, n_tokens + n_unread) fed to an unread step: some may be wrong
    """

    index: int
    n_tokens: int
    n_unread: int = 0


@dataclass(frozen=True, slots=True)
class RowView:
    """A row's layers as they may be read until its next step. What is cut out of a row is cut out of
    a view, so that nothing reads tokens which may still be taken back."""

    layers: list[LayerCache]
    at: At


class LiveRow(Protocol):
    """One sequence's state on the device."""

    @property
    def n_tokens(self) -> int:
        """Tokens that it will keep, including those of plain decode steps in flight."""
        ...

    def view(self) -> RowView:
        """Its layers, and how many of their tokens are settled. Raises RowInDoubt after a failed
        step."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether it has not left yet, so that its layers can be read."""
        ...


R = TypeVar("R", bound=LiveRow)
R_co = TypeVar("R_co", bound=LiveRow, covariant=True)


class Restored(Protocol):
    """A cached prefix for a new row: a value, to be used once. The engine tells the cache whether a row
    was made of it (`Cursor.filled`, `not_filled`)."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the records that are copied."""
        ...

    def fill(self, layers: list[LayerCache]) -> None:
        """Write its tokens into empty layer caches."""
        ...


class TakenTokens(Protocol[R_co]):
    """What one row took in a decode step: at least one token."""

    @property
    def row(self) -> R_co: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """One for each token."""
        ...

    @property
    def fault(self) -> FirnError | None:
        """Why this row cannot continue, if it cannot; the others of its group can."""
        ...

    @property
    def n_drafted(self) -> int:
        """Tokens that were drafted for it."""
        ...

    @property
    def n_right(self) -> int:
        """How many of those the model accepted."""
        ...


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Prompt tokens that were read."""

    logprobs: Sequence[TokenLogprob] = ()
    """Those that were asked for."""
    peak_nbytes: int = 0
    """Peak memory beyond what it left allocated. 0: unknown, because an earlier peak was higher."""


class Runner(Protocol[R]):
    """Runs the model. Engine thread only."""

    def start(self, restored: Restored | None) -> R:
        """A new row, empty or with a restored prefix."""
        ...

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        """Compute what a chunk needs of this picture of the prompt: it takes as long as a chunk.

        False: it was there already, or is not kept, so that the chunk computes it.
        """
        ...

    def prefill(self, row: R, prompt: Prompt, end: int, *, top_logprobs: int | None = None) -> None:
        """Dispatch prompt tokens [row.n_tokens, end); `finish_chunk` waits for them.

        top_logprobs: also compute the logprobs of tokens [row.n_tokens + 1, end + 1), each with
        this many of the likeliest alternatives.
        """
        ...

    @property
    def can_batch_prefill(self) -> bool:
        """Whether `batched_prefill` can be used."""
        ...

    def batched_prefill(
        self, rows: Sequence[R], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        """Dispatch tokens [row.n_tokens, end) of several prompts in one padded pass.

        A fault before the device has begun leaves the rows as they were.
        """
        ...

    def finish_chunk(self, row: R) -> ReadChunk:
        """Wait for what was dispatched."""
        ...

    @property
    def rest_tokens(self) -> int:
        """How many tokens before a prompt's last one can be left to its first decode step."""
        ...

    def choices(self, row: R, job: Job, indices: Sequence[int]) -> list[R]:
        """One row for each choice, all with this row's prefix, each with its own sampler."""
        ...

    def join(self, row: R, token: int, *, before: Sequence[int] = (), n_coming: int = 0) -> None:
        """Take part in decode steps. The first one consumes `token`.

        before: tokens before it that the step consumes too, at most `rest_tokens`. n_coming: how
        many more rows will join soon.
        """
        ...

    def resume(self, row: R, reply: Sequence[int], *, alone: bool = True) -> None:
        """Continue decoding after this reply, which the row has read again.

        alone: in a group of its own, because a step of its last group failed and it must be found
        out which row was at fault.
        """
        ...

    def force(self, row: R, tokens: Sequence[int], *, at: int) -> None:
        """Make these the row's tokens from position `at` on, whatever the model would pick.

        # [0, n_tokens) consumed   [n_tokens] picked   at > n_tokens
        """
        ...

    def groups(self) -> list[list[R]]:
        """The decoding rows, in the groups that step and fail together."""
        ...

    def launch(self, rows: Sequence[R]) -> None:
        """Dispatch one decode step of a group."""
        ...

    def collect(self, rows: Sequence[R], *, keep_in_flight: int) -> Sequence[TakenTokens[R]]:
        """Read the tokens of a group's dispatched steps, except the newest `keep_in_flight` steps.

        In order; a row may have several.
        """
        ...

    def live_nbytes(self) -> int:
        """Device memory used by the caches of the decoding rows."""
        ...

    @property
    def info(self) -> ModelInfo: ...

    def leave(self, rows: Sequence[R]) -> None:
        """Drop rows, whatever they are doing; the others are not affected."""
        ...

    def confirm(self) -> None:
        """Wait for everything dispatched so far; raises any device error not reported yet."""
        ...

    def free_memory(self) -> None:
        """Memory ran out: release what is kept for reuse."""
        ...

    def close(self) -> None:
        """Called as the thread ends: wait for the device and release what belongs to the thread."""
        ...
