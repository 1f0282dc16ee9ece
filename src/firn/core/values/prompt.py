"""A rendered prompt: tokens, and what is known about them. All frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
"""How much each token of a prompt matters, for sparse prefill."""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Positions [start, end) of the prompt stand for one picture with this content digest."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture that is ready to go into a prompt.

    text: replaces the placeholder in the chat template's output; ids: the tokens of that text.
    inputs: what the model is given; opaque outside `models`.
    """

    digest: bytes
    text: str
    ids: TokenArray
    inputs: Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    ids: int64, one entry per token; never written to. boundaries: ascending positions where a
    message (or the tool list) ends. A later prompt is likely to share them, so a recurrent model's
    state is kept there. hints: the boundaries that the caller asked for.
    """

    ids: TokenArray
    picture_spans: tuple[PictureSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    hints: tuple[int, ...] = ()
    picture_inputs: tuple[Any, ...] = ()
    """Preprocessed pictures for the model, one for each span; opaque outside `models`."""
    whole_pictures: bool = False
    """Whether a picture's tokens attend to each other: then no chunk ends inside a picture, and
    nothing resumes there."""
    notes: tuple[str, ...] = ()
    """How it differs from what was sent, for the log."""
    essential: tuple[tuple[int, int], ...] = ()
    """Ranges that sparse prefill never skips: system prompt, tools, the newest message."""
    thinned: Thinned | None = None
    """Set if this is what sparse prefill left of a longer prompt."""
    salt: str = ""
    """Nothing is reused between prompts with different salts (see `core.keys`)."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def unbroken(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) that no prefill chunk and no resume point may cut."""
        return tuple((m.start, m.end) for m in self.picture_spans) if self.whole_pictures else ()

    @property
    def whole(self) -> Prompt:
        """The prompt before anything was skipped."""
        return self if self.thinned is None else self.thinned.whole

    @property
    def gap(self) -> int:
        """How far positions after the prompt are ahead of its token count."""
        return 0 if self.thinned is None else int(self.thinned.positions[-1]) + 1 - len(self)

    def position(self, n_tokens: int) -> int:
        """Where its first `n_tokens` tokens end in the whole prompt."""
        if self.thinned is None or not n_tokens:
            return n_tokens
        return int(self.thinned.positions[n_tokens - 1]) + 1

    def grown(self, reply: Sequence[int]) -> Prompt:
        """The prompt with these tokens appended."""
        ids = np.concatenate([self.ids, np.array(reply, dtype=np.int64)])
        if self.thinned is None:
            return replace(self, ids=ids)
        end = int(self.thinned.positions[-1]) + 1
        more = np.arange(end, end + len(reply), dtype=np.int64)
        positions = np.concatenate([self.thinned.positions, more])
        return replace(self, ids=ids, thinned=replace(self.thinned, positions=positions))


@dataclass(frozen=True, slots=True)
class Thinned:
    """Which tokens of the whole prompt a thinned one keeps: their positions, ascending.

    recipe: how they were chosen; a part of the root, so that whole prompts never match its records.
    """

    positions: TokenArray
    whole: Prompt
    recipe: str
