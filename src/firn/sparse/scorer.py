"""The port of what decides which tokens of a prompt matter."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from firn.core.values import CacheControl, Namespace, Prompt

S = TypeVar("S")
Scores = npt.NDArray[np.float32]
"""How much each token of a prompt matters."""


class Scorer(Protocol[S]):
    """Scores prompts in slices. Engine thread only. `S` is a handle: one prompt's scoring."""

    @property
    def recipe(self) -> str:
        """Which model scores, and how: a part of the root of every prompt that it has thinned."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest prompt that it can score."""
        ...

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> S:
        """Start to score a prompt."""
        ...

    def read(self, reading: S, n_tokens: int, *, alone: bool = False) -> None:
        """Dispatch the next slice, in chunks of `n_tokens`; `finish_slice` waits for it.

        alone: no other request is waiting, so the slice may be longer.
        """
        ...

    def finish_slice(self, reading: S) -> bool:
        """Wait for what was dispatched; True: it was the last slice."""
        ...

    def n_left(self, reading: S) -> int:
        """Tokens that have not been scored yet."""
        ...

    def scores(self, reading: S) -> Scores:
        """One score for each token of the prompt, after the last slice."""
        ...

    def close_reading(self, reading: S) -> None:
        """End the scoring, finished or not. Idempotent."""
        ...

    def close(self) -> None: ...
