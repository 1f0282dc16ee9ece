"""What sparse prefill asks: which tokens of a prompt matter."""

from __future__ import annotations

from typing import Protocol, TypeVar

from firn.core.values import CacheControl, Namespace, Prompt, Scores

S = TypeVar("S")


class ScorerTraits(Protocol):
    @property
    def recipe(self) -> str:
        """Who scores, and how: a part of the root of whatever is read by it."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest prompt that it can score."""
        ...


class Scorer(ScorerTraits, Protocol[S]):
    """Scores prompts in slices. Engine thread only. `S` is a prompt's scoring, a handle."""

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> S:
        """Begin to score a prompt."""
        ...

    def read(self, reading: S, n_tokens: int, *, alone: bool = False) -> None:
        """Dispatch the next slice, in chunks of so many tokens; `settle` awaits it.

        alone: no other request waits, so the slice may be longer.
        """
        ...

    def settle(self, reading: S) -> bool:
        """Wait for what was dispatched; True: that was all."""
        ...

    def n_left(self, reading: S) -> int:
        """Tokens that are not scored yet."""
        ...

    def scores(self, reading: S) -> Scores:
        """One for each token of the prompt, once all is read."""
        ...

    def close_reading(self, reading: S) -> None:
        """The scoring is over, or given up. Idempotent."""
        ...

    def close(self) -> None: ...
